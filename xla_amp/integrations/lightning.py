"""Lightning and Fabric: ``accelerator="xla_amp"``, with ``precision="bf16-mixed"`` or ``"16-mixed"``.

    import lightning as L
    import xla_amp.integrations.lightning

    trainer = L.Trainer(accelerator="xla_amp", precision="bf16-mixed")

Importing this module registers the accelerator and the strategy with Lightning, and replaces the attributes of
`PATCHES`; it starts no device.  The device starts with the first Trainer or Fabric that uses it.
``accelerator="auto"`` selects it when the program has started it already (`xla_amp.xla_device()`).

A training step is one XLA executable.  The host waits only where a value is shown or saved: the progress bar, a logger,
a checkpoint.

Under torchrun or `xla_amp.launch` the processes train together: each has one device and its part of the data, and the
gradients are averaged in the step's executable.

Source: https://lightning.ai/docs/pytorch/stable/extensions/accelerator.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map

try:
    from lightning.fabric import connector
    from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
    from lightning.fabric.plugins.io import TorchCheckpointIO
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallel
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
    from lightning.pytorch.trainer.connectors import accelerator_connector
    from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
except ImportError as error:
    raise ImportError(
        f"xla_amp.integrations.lightning needs the package `lightning` ({error}): pip install 'xla-amp[lightning]'"
    ) from error

from xla_amp.backends import base, devices
from xla_amp.common import renamed
from xla_amp.errors import DeviceError, PolicyError
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.pytorch.device import xla_device
from xla_amp.pytorch.distributed import gradients, xm_collectives
from xla_amp.pytorch.distributed import xla_model as xm
from xla_amp.pytorch.optim.grad_scaler import GradScaler
from xla_amp.tools.monitor.on_pytorch import Monitor, RunningStep, monitor

NAME = "xla_amp"
"""Name of the accelerator and of the strategy."""

_LOW: Mapping[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Mixed precision -> its low dtype."""


class XLAAccelerator(Accelerator):
    """Lightning's accelerator for the XLA device of the engine in use."""

    def setup_device(self, device: torch.device) -> None:
        """Starts the device.

        Raises:
            ValueError: `device` is not the XLA device.
        """
        expected = xla_device()
        if device.type != expected.type:
            raise ValueError(f"XLAAccelerator.setup_device({device}): expected a device of type {expected.type!r}")

    def teardown(self) -> None:
        """Nothing: the device lives as long as the process."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """PJRT's memory statistics in bytes, for `DeviceStatsMonitor`."""
        return dict(devices.engine().memory_stats())

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """The number of this process's devices: 1.

        Raises:
            ValueError: a number that is neither 1 nor that of the processes.
        """
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count not in (1, -1, xm.xrt_world_size()):
            raise ValueError(
                f"devices={devices!r}: accelerator='{NAME}' trains on one device per process, and there are "
                f"{xm.xrt_world_size()}: start {count} processes with torchrun or xla_amp.launch, and leave devices out"
            )
        return 1

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The device."""
        return [xla_device()]

    @staticmethod
    def auto_device_count() -> int:
        """1."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """True: XLA has a CPU platform everywhere."""
        return True

    @staticmethod
    def name() -> str:
        """The name for ``accelerator=``."""
        return NAME


class XLACheckpointIO(TorchCheckpointIO):
    """Writes checkpoints whose tensors are on the CPU, so that they load on any machine."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Copies all tensors to the host and writes them with `torch.save`."""
        devices.engine().sync(wait=True)  # one wait for all the values below
        on_host = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, checkpoint)
        super().save_checkpoint(on_host, path, storage_options)


class _ByPolicy:
    """What the mixed precisions of Lightning and of Fabric share; before a base class of theirs."""

    precision: Any  # Lightning and Fabric declare it with types of their own

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        policy: Policy | str | Path | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(devices.XLA)
        super().__init__(precision, devices.XLA, scaler)  # type: ignore[call-arg]
        self.policy = policy

    def forward_context(self) -> AbstractContextManager[Any]:
        """A region of `xla_amp.autocast`."""
        return autocast(devices.XLA, dtype=_LOW[self.precision], policy=self.policy)


class XLAMixedPrecision(_ByPolicy, MixedPrecision):  # type: ignore[misc]
    """Lightning's mixed precision by a policy of xla_amp.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        policy: the rules, as for `xla_amp.autocast`; None is the device's default.
        scaler: for ``"16-mixed"``; None is a `xla_amp.GradScaler` with its defaults.

    Raises:
        ValueError: `precision` is not one of the two.
        MisconfigurationException: a scaler with ``"bf16-mixed"``.

    Example:
        Trainer(accelerator="xla_amp", plugins=XLAMixedPrecision("bf16-mixed", policy="my_rules.toml"))
    """

    autocast_context_manager = _ByPolicy.forward_context  # type: ignore[assignment]


class FabricXLAMixedPrecision(_ByPolicy, FabricMixed):
    """`XLAMixedPrecision` for Fabric, with the same arguments."""


class LossScaleMonitor(Callback):
    """Logs ``loss_scale`` of ``precision="16-mixed"`` with the step's other values, without reading it.

    Args:
        prog_bar: show it on the progress bar, too.

    Raises:
        MisconfigurationException: the trainer has no loss scaler.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        super().__init__()
        self.prog_bar = prog_bar

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks that there is a scale."""
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            raise MisconfigurationException(
                f"LossScaleMonitor: expected a trainer with precision='16-mixed', which scales losses; this one has "
                f"precision={trainer.precision_plugin.precision!r}"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Logs the scale that the next step uses."""
        pl_module.log("loss_scale", trainer.precision_plugin.scaler._scale, prog_bar=self.prog_bar)


class MonitorCallback(Callback):
    """`xla_amp.monitor` of the trained module, its first optimizer and its scaler, with the batches and losses.

    Args:
        options: arguments of `xla_amp.monitor` by name, as ``directory`` and ``sinks``.

    `monitor` is the `Monitor` once training has started.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.monitor: Monitor | None = None
        self._step: RunningStep | None = None
        self._block: contextlib.ExitStack | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the monitor."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.monitor = monitor(pl_module, trainer.optimizers[0], scaler, **self.options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a step, or adds a micro-batch to it."""
        if self.monitor is None:
            return
        if self._block is None:
            self._block = contextlib.ExitStack()
            self._step = self._block.enter_context(self.monitor.step())
            self._steps = trainer.global_step
        if self._step is not None:
            self._step.batch = (*self._step.batch, batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        """Ends the step if this was its last micro-batch."""
        if self._step is None or self._block is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            part = loss if trainer.accumulate_grad_batches == 1 else loss / trainer.accumulate_grad_batches
            self._step.loss = part if self._step.loss is None else self._step.loss + part
        if trainer.global_step != self._steps:
            block, self._block, self._step = self._block, None, None
            block.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Reads what is left, and removes the hooks."""
        if self.monitor is not None:
            self.monitor.close()


_OPERATIONS = {"mean": "sum", "avg": "sum", "sum": "sum", "min": "min", "max": "max", "product": "mul"}
"""Lightning's names of reductions, and torch.distributed's -> ours."""


class _OneOfSeveral:
    """What the strategies of Lightning and of Fabric share; before a base class of theirs.

    Rank 0 alone shows and saves values, and reading one runs what was recorded.  A program with a collective must be
    the same on all processes, so it begins and ends where all of them are at the same place.
    """

    def __init__(self, checkpoint_io: Any = None, **precision: Any) -> None:
        super().__init__(checkpoint_io=checkpoint_io or XLACheckpointIO(), **precision)  # type: ignore[call-arg]
        self._device = xla_device()
        rank_zero_only.rank = xm.get_ordinal()  # type: ignore[attr-defined]

    root_device = property(lambda self: self._device, doc="This process's device.")
    world_size = property(lambda self: xm.xrt_world_size(), doc="The number of processes.")
    global_rank = property(lambda self: xm.get_ordinal(), doc="This process's rank.")
    local_rank = property(lambda self: xm.get_local_ordinal(), doc="This process's rank on its host.")
    is_distributed = property(lambda self: self.world_size > 1, doc="Whether samplers give each process its part.")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        xm.rendezvous(f"lightning {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object that process `src` has: with several processes, of the types that `mesh_reduce` takes."""
        if self.world_size == 1:
            return obj
        return xm.mesh_reduce("lightning", obj if self.global_rank == src else None, lambda parts: parts[src])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes, or any, say yes."""
        answers: list[bool] = xm.mesh_reduce("lightning", bool(decision), list)
        return min(answers) if all else max(answers)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all processes; what is no tensor is returned as it is.

        Raises:
            ValueError: a group of processes, or an unknown reduction.
        """
        _no_group(group)
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPERATIONS:
            raise ValueError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPERATIONS)}")
        if self.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        scale = 1 / self.world_size if name in ("mean", "avg") else 1.0
        return _apart(tensor, lambda value: xm_collectives.all_reduce(_OPERATIONS[name], value, scale=scale))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Everybody's tensor, stacked; with one process the tensor, as in Lightning.

        Raises:
            ValueError: a group of processes, or ``sync_grads=True``.
        """
        _no_group(group)
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise ValueError("all_gather(sync_grads=True): collectives on the XLA device have no gradient")
        gathered: torch.Tensor = _apart(tensor, lambda value: xm_collectives.all_gather(value.unsqueeze(0), 0))
        return gathered


def _apart(tensor: torch.Tensor, collective: Callable[[torch.Tensor], Any]) -> Any:
    """The result of a collective in a separate program, the same in all processes."""
    value = tensor.detach().to(xla_device())
    devices.engine().sync()
    result = collective(value)
    devices.engine().sync()
    return result


def _no_group(group: Any) -> None:
    if group is not None and group is not getattr(getattr(torch.distributed, "group", None), "WORLD", None):
        raise ValueError(f"group={group!r}: on the XLA device all processes reduce together; leave it out")


def _is_watched(trainer: Any) -> bool:
    """Whether a progress bar, or code that is not Lightning's, may read values of one process after each batch."""
    hooks = [
        getattr(part, name)
        for part in (*trainer.callbacks, trainer.lightning_module)
        for name in ("on_train_batch_start", "on_train_batch_end")
    ]
    return trainer.progress_bar_callback is not None or any(
        hook.__module__.partition(".")[0] not in ("lightning", "xla_amp") for hook in hooks
    )


class XLAStrategy(_OneOfSeveral, ParallelStrategy):
    """One process, or one of several that torchrun or `xla_amp.launch` has started, with one device each.

    Gradients are averaged right before they are unscaled and clipped; with manual optimization in `manual_backward`.
    Parameters begin as those of rank 0.
    """

    strategy_name = NAME

    def __init__(self, checkpoint_io: Any = None, precision_plugin: Precision | None = None) -> None:
        super().__init__(checkpoint_io, precision_plugin=precision_plugin)
        self._accumulates = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As `all_reduce`: what ``self.log(..., sync_dist=True)`` calls."""
        return self.all_reduce(tensor, group, reduce_op)

    def model_to_device(self) -> None:
        """Moves the model, and copies rank 0's parameters and buffers."""
        model: Any = self.model
        model.to(self.root_device)
        gradients.broadcast_master_param(model)
        self._accumulates = False

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, which outside training begins a program: an evaluation has one for each shape."""
        module: Any = self.lightning_module
        if not module.trainer.training:
            devices.engine().sync(False)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins a program with an epoch: what was recorded before, to log it, is no part of the first step."""
        if batch_idx == 0:
            devices.engine().sync()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; with several processes it begins a program, unless it goes on accumulating."""
        module: Any = self.lightning_module
        if self.is_distributed and (not self._accumulates or _is_watched(module.trainer)):
            devices.engine().sync()
        self._accumulates = True
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; the next training step begins a program."""
        self._accumulates = False
        return super().validation_step(*args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Averages the gradients of manual optimization, in which users clip before they step."""
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            gradients.average(list(module.parameters()))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Averages the gradients after the backward pass, steps, and ends the program.

        The means of an epoch would make its last step another program.  With manual optimization several optimizers of
        one process share a program.
        """
        module: Any = self.lightning_module

        def averaged() -> Any:
            found = closure()
            if module.automatic_optimization:
                gradients.reduce_gradients(optimizer)
            return found

        result = super().optimizer_step(optimizer, averaged, model, **kwargs)
        if self.is_distributed or module.automatic_optimization:
            devices.engine().sync()
        self._accumulates = False
        return result

    def teardown(self) -> None:
        """Frees what the run held, and keeps ``WORLD_SIZE``, which Lightning's environment deletes."""
        super(ParallelStrategy, self).teardown()


class FabricXLAStrategy(_OneOfSeveral, FabricParallel):
    """`XLAStrategy` for several processes under Fabric: gradients are averaged in ``fabric.backward``."""

    def __init__(self, checkpoint_io: Any = None, precision: FabricPrecision | None = None) -> None:
        super().__init__(checkpoint_io, precision=precision)
        self._backward_sync_control: Any = self
        self._averages = True
        self._modules: list[torch.nn.Module] = []

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Leaves gradients as they are; the first backward pass outside averages their sum."""
        before = self._averages
        self._averages = before and not enabled
        try:
            yield
        finally:
            self._averages = before

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Moves it."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Copies rank 0's parameters and buffers."""
        gradients.broadcast_master_param(module)
        self._modules.append(module)
        return module

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Averages the gradients after the backward pass; those that others have averaged stay as they are."""
        super().backward(tensor, module, *args, **kwargs)
        if self._averages:
            found = {id(p): p for part in self._modules for p in part.parameters()}
            gradients.average(list(found.values()))

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Steps, and ends the program."""
        result = super().optimizer_step(optimizer, **kwargs)
        devices.engine().sync()
        return result

    def teardown(self) -> None:
        """As in `XLAStrategy`."""
        super(FabricParallel, self).teardown()


def _fabrics_strategy() -> Any:
    """Of one process it is Fabric's own: others demand ``fabric.launch()``."""
    if base.in_processes():
        return FabricXLAStrategy()
    return SingleDeviceStrategy(xla_device(), checkpoint_io=XLACheckpointIO())


# ---- patches ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of Lightning that importing this module replaces.

    It does what Lightning does unless the accelerator, or the value, is on the XLA device.
    """

    owner: Any
    name: str
    reason: str
    """Why, and what breaks without it."""
    replace: Callable[[Any], Any]
    """Makes the new attribute from the old one."""


def _choose_strategy(strategy: Callable[[], Any], original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: strategy() if isinstance(self.accelerator, XLAAccelerator) else original(self)


def _make_precision(mixed: Callable[[Any], Any], original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    prefix = "_precision_plugin_flag", "_precision_flag"
    given_name, name_of = prefix if mixed is XLAMixedPrecision else ("_precision_instance", "_precision_input")

    def make(self: Any) -> Any:
        if not isinstance(self.accelerator, XLAAccelerator) or getattr(self, given_name) is not None:
            return original(self)
        strategy = self._strategy_flag if isinstance(self._strategy_flag, str) else type(self._strategy_flag).__name__
        if strategy.lower().startswith(("ddp", "fsdp", "deepspeed", "modelparallel", "model_parallel")):
            raise DeviceError(
                f"strategy={strategy!r} with accelerator={NAME!r}: leave strategy out; processes that torchrun or "
                f"xla_amp.launch has started train together"
            )
        precision = getattr(self, name_of)
        if precision not in (*_LOW, "32-true"):
            raise PolicyError(
                f"precision={precision!r} with accelerator={NAME!r}: expected 'bf16-mixed', '16-mixed' or '32-true'; "
                f"for other rules pass plugins={mixed.__name__}('bf16-mixed', policy=...)"
            )
        return mixed(precision) if precision in _LOW else original(self)

    return make


def _choose_auto(original: Callable[[], str]) -> Callable[[], str]:
    return staticmethod(lambda: NAME if devices.engine().is_started() else original())  # both are static methods


def _keep_on_device(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(data: Any) -> Any:
        on_device = isinstance(data, torch.Tensor) and devices.is_xla(data.device.type)
        return data.detach() if on_device else original(data)

    return convert


def _read_when_shown(original: property) -> property:
    def progress_bar_metrics(self: Any) -> Any:
        values = original.__get__(self)
        values.update(convert_tensors_to_scalars(values))
        return values

    return property(progress_bar_metrics)


_TRAINER, _FABRIC = accelerator_connector._AcceleratorConnector, connector._Connector
_STRATEGY = "The automatic strategy of a registered accelerator is the CPU's: tensors would stay on the host."
_PRECISION = "The name of a mixed precision gives CUDA's plugin, whose scaler and torch.autocast find no CUDA."
_AUTO = "accelerator='auto' asks a fixed list of accelerators: it would not select the device that is in use."

PATCHES = tuple(
    Patch(owner=owner, name=name, replace=replace, reason=reason)
    for owner, name, replace, reason in (
        (_TRAINER, "_choose_strategy", functools.partial(_choose_strategy, XLAStrategy), _STRATEGY),
        (_FABRIC, "_choose_strategy", functools.partial(_choose_strategy, _fabrics_strategy), _STRATEGY),
        (_TRAINER, "_check_and_init_precision", functools.partial(_make_precision, XLAMixedPrecision), _PRECISION),
        (_FABRIC, "_check_and_init_precision", functools.partial(_make_precision, FabricXLAMixedPrecision), _PRECISION),
        (_TRAINER, "_choose_auto_accelerator", _choose_auto, _AUTO),
        (_FABRIC, "_choose_auto_accelerator", _choose_auto, _AUTO),
        (
            result,
            "convert_tensors_to_scalars",
            _keep_on_device,
            "Reads each value of the progress bar in each step, also when no bar shows it: a wait a step.",
        ),
        (
            logger_connector._LoggerConnector,
            "progress_bar_metrics",
            _read_when_shown,
            "Without it a bar shows the tensors that the row above leaves on the device.",
        ),
    )
)


def __getattr__(name: str) -> Any:
    raise renamed.missing(__name__, name, (XLAStrategy.__name__, XLAMixedPrecision.__name__))


def _install() -> None:
    for accelerators in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
        accelerators.register(NAME, XLAAccelerator, description="The XLA device of xla_amp", override=True)
    for strategies, strategy in ((StrategyRegistry, XLAStrategy), (STRATEGY_REGISTRY, _fabrics_strategy)):
        strategies.register(NAME, strategy, description="The XLA device, in one or several processes", override=True)
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.replace(inspect.getattr_static(patch.owner, patch.name)))


_install()
