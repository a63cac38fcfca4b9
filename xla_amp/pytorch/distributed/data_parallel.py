"""`DistributedDataParallel` without torch's reducer: gradients are averaged when a backward pass ends."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map

from xla_amp.backends import base, devices
from xla_amp.pytorch.distributed import xm_collectives

_ACTING = (
    "self",
    "module",
    "device_ids",
    "output_device",
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "process_group",
)
_ALLOW_UNUSED = ("find_unused_parameters", "static_graph")


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's class of that name, for models with parameters that get no gradient, or sparse ones.

    torch's own class works on the device, too, in a process group of the backend ``xla_amp``; not with
    `find_unused_parameters`, `static_graph` or sparse gradients.  This one averages all gradients in one collective at
    the end of the backward pass.  All processes run one program, so a parameter that one of them does not use is used
    by none, and keeps its gradient.  Parameters and buffers come from rank 0; ``no_sync()`` and the names in
    ``state_dict()`` are torch's.

    Args:
        module: on the device, with the same parameters in all processes.
        *args: as torch's class takes them.
        **options: `find_unused_parameters` or `static_graph`, which allow parameters that get no gradient; as torch's
            `device_ids`, `output_device`, `broadcast_buffers`, `forward_sync_buffers` and `init_sync`; `process_group`,
            which has all processes.

    Raises:
        TypeError: an argument that tunes torch's reducer.
        ValueError: a group of some processes.
        RuntimeError: a forward pass after a backward pass in which parameters got no gradient, which is not allowed.

    Example:
        >>> model = DistributedDataParallel(model, find_unused_parameters=True)  # doctest: +SKIP
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        bound = inspect.signature(nn.parallel.DistributedDataParallel.__init__).bind(self, module, *args, **options)
        given = bound.arguments
        unused = [bool(given.pop(name, False)) for name in _ALLOW_UNUSED]
        for name, value in given.items():
            if name not in _ACTING and value != bound.signature.parameters[name].default:
                raise TypeError(
                    f"xla_amp.DistributedDataParallel({name}={value!r}): all gradients are averaged in one collective "
                    f"of the step, which {name} does not change; leave it out"
                )
        self._expects = False
        """Whether the backward pass of the newest forward pass reduces."""
        self._ready: set[nn.Parameter] = set()
        """Parameters whose gradients wait for the end of the backward pass."""
        self._reduced: set[nn.Parameter] = set()
        """Those that were reduced since the newest forward pass."""
        synchronize = given.get("init_sync", True)
        given["init_sync"] = False  # done below, in one program
        super().__init__(*bound.args[1:], **bound.kwargs)
        world = base.processes().world_size()
        if torch.distributed.get_world_size(self.process_group) != world:
            raise ValueError(
                f"xla_amp.DistributedDataParallel(process_group=...): expected a group of all {world} processes"
            )
        self._allow_unused = any(unused)
        self.find_unused_parameters, self.static_graph = unused
        if synchronize:
            sent: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
            if given.get("forward_sync_buffers") is not None or self.broadcast_buffers:
                sent += module.named_buffers()
            _broadcast_now([x for name, x in sent if name not in self.parameters_to_ignore])

    def _ddp_init_helper(self, parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        """Registers hooks in place of torch's reducer."""
        self.reducer = self.logger = None  # type: ignore[assignment]
        self._in_order = parameters
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._is_ready)
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's result, after buffers were copied from rank 0."""
        if self._reduced and not self._allow_unused and len(self._reduced) < len(self._in_order):
            names = [name for name, each in self.module.named_parameters() if each.requires_grad]
            missing = [name for name in names if self.module.get_parameter(name) not in self._reduced]
            self._reduced.clear()
            raise RuntimeError(
                f"DistributedDataParallel: the last backward pass gave {', '.join(missing)} no gradient; pass "
                "find_unused_parameters=True if that is meant"
            )
        self._reduced.clear()
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()
        if torch.is_grad_enabled():
            self._expects = self.require_backward_grad_sync
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.device_ids:
            inputs, kwargs = tree_map(self._moved, (inputs, kwargs))
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def _sync_buffers(self) -> None:
        """Copies the buffers from rank 0: in a training step as an operation of its program."""
        if hasattr(self, "buffer_hook"):
            super()._sync_buffers()  # type: ignore[no-untyped-call]
            return
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        in_step = self.training and torch.is_grad_enabled()
        broadcast = xm_collectives.collective_broadcast if in_step else _broadcast_now
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):  # type: ignore[attr-defined]
            broadcast(self.modules_buffers)

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def _is_ready(self, parameter: nn.Parameter) -> None:
        if self._expects:
            if not self._ready:
                Variable._execution_engine.queue_callback(self._reduce)
            self._ready.add(parameter)

    def _reduce(self) -> None:
        ready = [parameter for parameter in self._in_order if parameter in self._ready]
        self._ready.clear()
        self._reduced.update(ready)
        xm_collectives.average(ready)

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: all processes run one program, so each has the same number of batches.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "DistributedDataParallel.join(): all processes run one program, so each needs the same number of batches; "
            "torch.utils.data.DistributedSampler repeats samples for that, or leaves some out with drop_last=True"
        )

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Raises: gradients are averaged in one collective of the step.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "DistributedDataParallel.register_comm_hook(): xla_amp.DistributedDataParallel has no buckets; use torch's "
            "class, or xla_model.reduce_gradients(optimizer, dtype=torch.bfloat16)"
        )


def _broadcast_now(tensors: Sequence[torch.Tensor]) -> None:
    """Copies rank 0's values in a program for itself, so that each process may read what it likes before and after."""
    devices.engine().sync()
    xm_collectives.collective_broadcast(tensors)
    devices.engine().sync()
