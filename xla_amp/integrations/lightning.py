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
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.connectors import accelerator_connector
    from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
except ImportError as error:
    raise ImportError(
        f"xla_amp.integrations.lightning needs the package `lightning` ({error}): pip install 'xla-amp[lightning]'"
    ) from error

from xla_amp.backends import base, devices
from xla_amp.errors import DeviceError, PolicyError
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.pytorch.distributed import gradients, xm_collectives
from xla_amp.pytorch.distributed import xla_model as xm
from xla_amp.pytorch.distributed.xla_model import xla_device
from xla_amp.pytorch.optim.grad_scaler import GradScaler
from xla_amp.tools.monitor.on_pytorch.monitor import Monitor, monitor
from xla_amp.tools.monitor.on_pytorch.running_step import MonitoredStep

NAME = "xla_amp"
"""Name of the accelerator and of the strategy."""

NAME_OF_PROCESSES = "xla_amp_processes"
"""Name of the strategy for several processes."""

_LOW: Mapping[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Mixed precision -> its low dtype."""


def _region(precision: str, policy: Policy | str | Path | None) -> autocast:
    """A region for one forward pass; without mixed precision it still marks where a step begins."""
    if precision in _LOW:
        return autocast(devices.XLA, dtype=_LOW[precision], policy=policy)
    return autocast(devices.XLA, enabled=False)


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


class XLAPrecision(Precision):
    """Float32 on the XLA device: the plugin for ``precision="32-true"``."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Marks where a step begins."""
        return _region("32-true", None)


class _ByPolicy:
    """What the plugins of Lightning and of Fabric for mixed precision share; beside a base class of theirs."""

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

    def _region(self) -> autocast:
        return _region(self.precision, self.policy)


class XLAMixedPrecision(_ByPolicy, MixedPrecision):
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

    def autocast_context_manager(self) -> Any:
        """A region of `xla_amp.autocast`."""
        return self._region()


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
        self._step: MonitoredStep | None = None
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
        if self._step is not None and self._step.kept is not None:
            self._step.kept.batch = (*self._step.kept.batch, batch)

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


class FabricXLAPrecision(FabricPrecision):
    """`XLAPrecision` for Fabric."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Marks where a step begins."""
        return _region("32-true", None)


class FabricXLAMixedPrecision(_ByPolicy, FabricMixed):
    """`XLAMixedPrecision` for Fabric, with the same arguments."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """A region of `xla_amp.autocast`."""
        return self._region()


class _Evaluates:
    """What `Trainer`'s strategies share; before a base class of theirs."""

    lightning_module: Any

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, which outside training begins a program: an evaluation has one for each shape."""
        if not self.lightning_module.trainer.training:
            devices.engine().sync(False)
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]


class XLAStrategy(_Evaluates, SingleDeviceStrategy):
    """One process that trains on the XLA device."""

    strategy_name = NAME

    def __init__(self, checkpoint_io: Any = None, precision_plugin: Precision | None = None) -> None:
        super().__init__(xla_device(), None, checkpoint_io or XLACheckpointIO(), precision_plugin)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins a program with an epoch: what was recorded before, to log it, is no part of the first step."""
        if batch_idx == 0:
            devices.engine().sync()


class FabricXLAStrategy(FabricSingleDevice):
    """`XLAStrategy` for Fabric."""

    def __init__(self, checkpoint_io: Any = None, precision: FabricPrecision | None = None) -> None:
        super().__init__(xla_device(), None, checkpoint_io or XLACheckpointIO(), precision)


_OPERATIONS = {"mean": "sum", "avg": "sum", "sum": "sum", "min": "min", "max": "max", "product": "mul"}
"""Lightning's names of reductions, and torch.distributed's -> ours."""


class _Together:
    """What the strategies of Lightning and of Fabric for several processes share; before a base class of theirs.

    Rank 0 alone shows and saves values, and reading one runs what was recorded.  A program with a collective must be
    the same on all processes, so it begins and ends where all of them are at the same place.
    """

    def __init__(self, checkpoint_io: Any = None, **precision: Any) -> None:
        super().__init__(checkpoint_io=checkpoint_io or XLACheckpointIO(), **precision)  # type: ignore[call-arg]
        self._device = xla_device()
        rank_zero_only.rank = xm.get_ordinal()  # type: ignore[attr-defined]

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        return self._device

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return xm.xrt_world_size()

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return xm.get_ordinal()

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return xm.get_local_ordinal()

    @property
    def is_distributed(self) -> bool:
        """True: samplers give each process its part."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        xm.rendezvous(f"lightning {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object that process `src` has: of the types that `xla_model.mesh_reduce` takes."""
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
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPERATIONS:
            raise ValueError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPERATIONS)}")
        value = tensor.detach().to(self._device)
        devices.engine().sync()
        reduced = xm_collectives.all_reduce(
            _OPERATIONS[name], value, scale=1 / self.world_size if name in ("mean", "avg") else 1.0
        )
        devices.engine().sync()
        return reduced

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Everybody's tensor, stacked.

        Raises:
            ValueError: a group of processes, or ``sync_grads=True``.
        """
        _no_group(group)
        if sync_grads:
            raise ValueError("all_gather(sync_grads=True): collectives on the XLA device have no gradient")
        value = tensor.detach().to(self._device)
        devices.engine().sync()
        gathered = xm_collectives.all_gather(value.unsqueeze(0), 0)
        devices.engine().sync()
        return gathered


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


class XLAProcessesStrategy(_Evaluates, _Together, ParallelStrategy):
    """One of several processes that torchrun or `xla_amp.launch` has started, with one device each.

    Gradients are averaged right before they are unscaled and clipped; with manual optimization in `manual_backward`.
    Parameters begin as those of rank 0.
    """

    strategy_name = NAME_OF_PROCESSES

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

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a program, unless it goes on accumulating, and runs the step."""
        module: Any = self.lightning_module
        if not self._accumulates or _is_watched(module.trainer):
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
        """Averages the gradients after the backward pass, steps, and ends the program."""
        module: Any = self.lightning_module

        def averaged() -> Any:
            found = closure()
            if module.automatic_optimization:
                gradients.reduce_gradients(optimizer)
            return found

        result = super().optimizer_step(optimizer, averaged, model, **kwargs)
        devices.engine().sync()
        self._accumulates = False
        return result

    def teardown(self) -> None:
        """Frees what the run held, and keeps ``WORLD_SIZE``, which Lightning's environment deletes."""
        super(ParallelStrategy, self).teardown()


class _Accumulates:
    """`Fabric.no_backward_sync`."""

    def __init__(self, strategy: FabricXLAProcessesStrategy) -> None:
        self.strategy = strategy

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Leaves gradients as they are; the first backward pass outside averages their sum."""
        before = self.strategy.averages
        self.strategy.averages = before and not enabled
        try:
            yield
        finally:
            self.strategy.averages = before


class FabricXLAProcessesStrategy(_Together, FabricParallel):
    """`XLAProcessesStrategy` for Fabric: gradients are averaged in ``fabric.backward``."""

    def __init__(self, checkpoint_io: Any = None, precision: FabricPrecision | None = None) -> None:
        super().__init__(checkpoint_io, precision=precision)
        self._backward_sync_control: Any = _Accumulates(self)
        self.averages = True
        self._modules: list[torch.nn.Module] = []

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
        if self.averages:
            found = {id(p): p for part in self._modules for p in part.parameters()}
            gradients.average(list(found.values()))

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Steps, and ends the program."""
        result = super().optimizer_step(optimizer, **kwargs)
        devices.engine().sync()
        return result

    def teardown(self) -> None:
        """As in `XLAProcessesStrategy`."""
        super(FabricParallel, self).teardown()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Front:
    """The classes of Lightning or of Fabric, and the names of their connector's attributes."""

    connector: Any
    precision_name: str
    given_precision: str
    strategy: Callable[[], Any]
    of_processes: Callable[[], Any]
    full: Callable[[], Any]
    mixed: Callable[[Any], Any]


_TRAINER = _Front(
    connector=accelerator_connector._AcceleratorConnector,
    precision_name="_precision_flag",
    given_precision="_precision_plugin_flag",
    strategy=XLAStrategy,
    of_processes=XLAProcessesStrategy,
    full=XLAPrecision,
    mixed=XLAMixedPrecision,
)
_FABRIC = _Front(
    connector=connector._Connector,
    precision_name="_precision_input",
    given_precision="_precision_instance",
    strategy=FabricXLAStrategy,
    of_processes=FabricXLAProcessesStrategy,
    full=FabricXLAPrecision,
    mixed=FabricXLAMixedPrecision,
)


def _choose_strategy(front: _Front, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def choose(self: Any) -> Any:
        if not isinstance(self.accelerator, XLAAccelerator):
            return original(self)
        return front.of_processes() if base.in_processes() else front.strategy()

    return choose


def _refuse_torchs_strategy(strategy: Any) -> None:
    name = strategy if isinstance(strategy, str) else type(strategy).__name__.lower()
    if name.startswith(("ddp", "fsdp", "deepspeed", "modelparallel", "model_parallel")):
        raise DeviceError(
            f"strategy={name!r} with accelerator={NAME!r}: leave strategy out; processes that torchrun or "
            f"xla_amp.launch has started train together with the strategy {NAME_OF_PROCESSES!r}"
        )


def _make_precision(front: _Front, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(self: Any) -> Any:
        ours = isinstance(self.accelerator, XLAAccelerator)
        if not ours or getattr(self, front.given_precision) is not None:
            return original(self)
        _refuse_torchs_strategy(self._strategy_flag)
        name = getattr(self, front.precision_name)
        if name not in (*_LOW, "32-true"):
            raise PolicyError(
                f"precision={name!r} with accelerator={NAME!r}: expected 'bf16-mixed', '16-mixed' or '32-true'; for "
                f"other rules pass plugins={front.mixed.__name__}('bf16-mixed', policy=...)"
            )
        return front.mixed(name) if name in _LOW else front.full()

    return make


def _choose_auto(front: _Front, original: Callable[[], str]) -> Callable[[], str]:
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


def _end_step(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def epoch_end_reached(self: Any) -> None:
        if devices.is_xla(self.trainer.strategy.root_device.type):
            devices.engine().sync()
        original(self)

    return epoch_end_reached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of Lightning that importing this module replaces."""

    owner: Any
    name: str
    reason: str
    replace: Callable[[Any], Any]
    """Makes the new attribute from the old one."""


PATCHES = (
    *(
        Patch(
            owner=front.connector,
            name=name,
            reason=reason,
            replace=functools.partial(replace, front),
        )
        for front in (_TRAINER, _FABRIC)
        for name, replace, reason in (
            (
                "_choose_strategy",
                _choose_strategy,
                "The automatic strategy of a registered accelerator is the CPU's, whatever the accelerator is.",
            ),
            (
                "_check_and_init_precision",
                _make_precision,
                "The name of a mixed precision gives CUDA's plugin; others can be given as objects only.",
            ),
            ("_choose_auto_accelerator", _choose_auto, "accelerator='auto' asks a fixed list of accelerators."),
        )
    ),
    Patch(
        owner=result,
        name="convert_tensors_to_scalars",
        reason="Lightning reads each value of the progress bar in each step, also when no bar shows it.",
        replace=_keep_on_device,
    ),
    Patch(
        owner=logger_connector._LoggerConnector,
        name="progress_bar_metrics",
        reason="The values that stay on the device are read here, when they are shown.",
        replace=_read_when_shown,
    ),
    Patch(
        owner=logger_connector._LoggerConnector,
        name="epoch_end_reached",
        reason="The means of an epoch, in the program of its last step, would make it another one.",
        replace=_end_step,
    ),
)
"""Each does what Lightning does unless the accelerator, or the value, is on the XLA device."""


def _install() -> None:
    for accelerators in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
        accelerators.register(NAME, XLAAccelerator, description="The XLA device of xla_amp", override=True)
    for strategies, one, several in (
        (StrategyRegistry, XLAStrategy, XLAProcessesStrategy),
        (STRATEGY_REGISTRY, FabricXLAStrategy, FabricXLAProcessesStrategy),
    ):
        strategies.register(NAME, one, description="One process on the XLA device", override=True)
        strategies.register(NAME_OF_PROCESSES, several, description="One of several processes", override=True)
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.replace(inspect.getattr_static(patch.owner, patch.name)))


_install()
