"""Lightning and Fabric: ``accelerator="xla_amp"``, with ``precision="bf16-mixed"`` or ``"16-mixed"``.

    import lightning as L
    import xla_amp.integrations.lightning

    trainer = L.Trainer(accelerator="xla_amp", precision="bf16-mixed")

Importing this module registers the accelerator and the strategy, and replaces the attributes of `PATCHES`; the first
Trainer or Fabric that uses the device starts it.  ``accelerator="auto"`` selects it when the program has started it.

A training step is one XLA executable.  The host waits only where a value is shown or saved.  Under torchrun or
`xla_amp.launch` each process has one device and its part of the data, and the gradients are averaged in the step's
executable.

Source: https://lightning.ai/docs/pytorch/stable/extensions/accelerator.html
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallel
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError(
        f"xla_amp.integrations.lightning needs the package `lightning` ({error}): pip install 'xla-amp[lightning]'"
    ) from error

from xla_amp.engines import base, devices
from xla_amp.errors import DeviceError
from xla_amp.integrations import patches
from xla_amp.integrations.patches import Patch
from xla_amp.integrations.trainer_steps import TrainerSteps
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.pytorch.device import xla_device
from xla_amp.pytorch.distributed import gradients, xm_collectives
from xla_amp.pytorch.distributed import xla_model as xm
from xla_amp.pytorch.optim.grad_scaler import GradScaler

NAME = "xla_amp"
"""Name of the accelerator and of the strategy."""

_LOW: Mapping[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Mixed precision -> its low dtype."""


class XLAAccelerator(CPUAccelerator):
    """Lightning's accelerator for the XLA device of the engine in use: as the CPU, each process has one."""

    def setup_device(self, device: torch.device) -> None:
        """Starts the device."""
        xla_device()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """PJRT's memory statistics in bytes, for `DeviceStatsMonitor`."""
        return dict(devices.engine().memory_stats())

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """The number of processes, or a `ValueError` for a number that is neither 1 nor that of the processes."""
        count, world = len(devices) if isinstance(devices, list) else int(devices), xm.xrt_world_size()
        if count not in (1, -1, world):
            raise ValueError(
                f"devices={devices!r}: accelerator='{NAME}' trains on one device per process, and there are "
                f"{world}: start {count} processes with torchrun or xla_amp.launch, and leave devices out"
            )
        return world

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The device, once for each process: Lightning divides data by their number."""
        return [xla_device()] * devices

    @staticmethod
    def name() -> str:
        """The name for ``accelerator=``."""
        return NAME


class XLACheckpointIO(TorchCheckpointIO):
    """Writes checkpoints whose tensors are on the CPU, so that they load on any machine."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Copies all tensors to the host and writes them with `torch.save`."""
        devices.engine().sync(wait=True)  # one wait for all the values below
        super().save_checkpoint(move_data_to_device(checkpoint, "cpu"), path, storage_options)


class _ByPolicy:
    """What the mixed precisions of Lightning and of Fabric share; before a base class of theirs."""

    precision: Any  # Lightning and Fabric declare it with types of their own

    def __init__(
        self, precision: str, policy: Policy | str | Path | None = None, scaler: GradScaler | None = None
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(devices.XLA)
        super().__init__(precision, devices.XLA, scaler)  # type: ignore[call-arg]
        self.policy = policy

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
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

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, *algorithm: Any, **named: Any) -> None:
        """Clips, also for an optimizer that unscales gradients in its step: here they are unscaled before."""
        if clip_val > 0 and self.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self.scaler.unscale_(getattr(optimizer, "optimizer", optimizer))
        Precision.clip_gradients(self, optimizer, clip_val, *algorithm, **named)


class FabricXLAMixedPrecision(_ByPolicy, FabricMixed):
    """`XLAMixedPrecision` for Fabric, with the same arguments."""


class LossScaleMonitor(Callback):
    """Logs ``loss_scale`` with the step's other values, without reading it; without a scaler there is none.

    Args:
        prog_bar: show it on the progress bar, too.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        super().__init__()
        self.prog_bar = prog_bar

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Logs the scale that the next step uses."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            pl_module.log("loss_scale", scaler._scale, prog_bar=self.prog_bar)


class MonitorCallback(TrainerSteps, Callback):
    """`xla_amp.monitor` as the attribute `monitor`, with the losses; takes its options by name."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a step, unless the batch belongs to the one that has begun."""
        if self._step is None:
            self._begin(pl_module, trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None))
            self._before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        """Ends the step if this was its last micro-batch."""
        self._add(outputs.get("loss") if isinstance(outputs, Mapping) else outputs, trainer.accumulate_grad_batches)
        if trainer.global_step != self._before:
            self._end()


_OPERATIONS = {"mean": "sum", "avg": "sum", "sum": "sum", "min": "min", "max": "max", "product": "mul"}
"""Lightning's names of reductions, and torch.distributed's -> ours."""


class _OneOfSeveral:
    """What the strategies of Lightning and of Fabric share; before a base class of theirs.

    Rank 0 alone shows and saves values, and reading one runs what was recorded.  A program with a collective must be
    the same on all processes, so it begins and ends where all of them are at the same place.
    """

    _averages = True

    def __init__(self, checkpoint_io: Any = None, **precision: Any) -> None:
        # Of Lightning's environments this one alone leaves torchrun's variables as they are, which a next run reads.
        options = {"cluster_environment": TorchElasticEnvironment(), **precision}
        super().__init__(checkpoint_io=checkpoint_io or XLACheckpointIO(), **options)  # type: ignore[call-arg]
        self._models = torch.nn.ModuleList()
        self._backward_sync_control: Any = self
        rank_zero_only.rank = xm.get_ordinal()  # type: ignore[attr-defined]

    root_device = property(lambda self: xla_device(), doc="This process's device.")
    world_size = property(lambda self: xm.xrt_world_size(), doc="The number of processes.")
    global_rank = property(lambda self: xm.get_ordinal(), doc="This process's rank.")
    local_rank = property(lambda self: xm.get_local_ordinal(), doc="This process's rank on its host.")
    is_distributed = property(lambda self: self.world_size > 1, doc="Whether samplers give each process its part.")

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Moves it."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Copies rank 0's parameters and buffers."""
        gradients.broadcast_master_param(module)
        self._models.append(module)
        return module

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module | None = None, enabled: bool = True) -> Iterator[None]:
        """Leaves gradients as they are; the first backward pass outside averages their sum."""
        before = self._averages
        self._averages = before and not enabled
        try:
            yield
        finally:
            self._averages = before

    block_backward_sync = no_backward_sync

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Averages the gradients after the backward pass; those that others have averaged stay as they are."""
        result = super().backward(*args, **kwargs)  # type: ignore[misc]
        if self._averages:
            gradients.average(list(self._models.parameters()))
        return result

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps, and ends the program: what Lightning computes next differs from step to step."""
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        devices.engine().sync()
        return result

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        xm.rendezvous(f"lightning {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object that process `src` has: with several processes, of the types that `mesh_reduce` takes."""
        if self.world_size == 1:
            return obj
        return xm.mesh_reduce("lightning", obj if self.global_rank == src else None, lambda parts: parts[src])

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all processes; what is no tensor is returned as it is."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPERATIONS:
            raise ValueError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPERATIONS)}")
        if self.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        scale = 1 / self.world_size if name in ("mean", "avg") else 1.0
        return _apart(tensor, group, lambda value: xm_collectives.all_reduce(_OPERATIONS[name], value, scale=scale))

    reduce = all_reduce

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Everybody's tensor, stacked; with one process the tensor, as in Lightning."""
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise ValueError("all_gather(sync_grads=True): collectives on the XLA device have no gradient")
        return _apart(tensor, group, lambda value: xm_collectives.all_gather(value.unsqueeze(0), 0))


def _apart(tensor: torch.Tensor, group: Any, collective: Callable[[torch.Tensor], Any]) -> Any:
    """Runs a collective of all processes alone in a program, which is then the same in each process."""
    if group is not None and group is not getattr(getattr(torch.distributed, "group", None), "WORLD", None):
        raise ValueError(f"group={group!r}: on the XLA device all processes reduce together; leave it out")
    value = tensor.detach().to(xla_device())
    devices.engine().sync()
    result = collective(value)
    devices.engine().sync()
    return result


class XLAStrategy(_OneOfSeveral, ParallelStrategy):
    """One process, or one of several that torchrun or `xla_amp.launch` has started, with one device each.

    Gradients are averaged after the last backward pass of a step.  Parameters begin as those of rank 0.

    Args:
        capture: capture the training step as `xla_amp.compile` does, by its contract.  What prevents it is a warning.
        options: of Lightning's `ParallelStrategy`, by name.

    Example:
        Trainer(accelerator="xla_amp", strategy=XLAStrategy(capture=True), precision="bf16-mixed")
    """

    def __init__(self, *, capture: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._capture = capture

    def setup(self, trainer: Any) -> None:
        """As Lightning's; a training step is captured from here on, if it is to be."""
        super().setup(trainer)
        if self._capture and trainer.training:
            from xla_amp.integrations import captured
            from xla_amp.integrations.lightning_capture import CapturedOptimization

            loop = trainer.fit_loop.epoch_loop
            if not trainer.lightning_module.automatic_optimization:
                captured.report("it is optimized by hand; give a function of the module to xla_amp.compile")
            made = CapturedOptimization(trainer)
            made.optim_progress, loop.automatic_optimization = loop.automatic_optimization.optim_progress, made

    def model_to_device(self) -> None:
        """Moves the model, and copies rank 0's parameters and buffers."""
        model: Any = self.model
        self.module_to_device(model)
        self._models = torch.nn.ModuleList()
        self.setup_module(model)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, which outside training begins a program: an evaluation has one for each shape."""
        if not self.lightning_module.trainer.training:  # type: ignore[union-attr]
            devices.engine().sync(False)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins a program with an epoch: what was recorded before, to log it, is no part of the first step.

        With several processes each step begins one; each micro-batch if a bar of one of them reads values after it.
        """
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        goes_on = batch_idx % trainer.accumulate_grad_batches and trainer.progress_bar_callback is None
        if batch_idx == 0 or (self.is_distributed and not goes_on):
            devices.engine().sync()

    def on_validation_end(self) -> None:
        """Ends the program: rank 0 alone has read values."""
        devices.engine().sync()


class FabricXLAStrategy(_OneOfSeveral, FabricParallel):
    """`XLAStrategy` for several processes under Fabric: gradients are averaged in ``fabric.backward``."""


def _fabrics_strategy() -> Any:
    """Of one process it is Fabric's own: others demand ``fabric.launch()``."""
    if base.in_processes():
        return FabricXLAStrategy()
    return SingleDeviceStrategy(xla_device(), checkpoint_io=XLACheckpointIO())


# ---- patches ---------------------------------------------------------------------------------------------------------
# Each function below replaces an attribute: `original` is what it replaces, the rest are its arguments.


def _choose(
    mixed: Callable[[Any], Any], precision: str, plugin: str, original: Any, self: Any, /, *args: Any, **kwargs: Any
) -> None:
    """`mixed` makes our precision; the attribute `precision` is its name, `plugin` is what the user passed instead."""
    original(self, *args, **kwargs)
    if self._accelerator_flag == "auto" and devices.engine().is_started():
        self._accelerator_flag = NAME
    if self._accelerator_flag != NAME and not isinstance(self._accelerator_flag, XLAAccelerator):
        return
    if self._strategy_flag == "auto":
        self._strategy_flag = NAME
    elif self._strategy_flag != NAME and not isinstance(self._strategy_flag, _OneOfSeveral):
        raise DeviceError(
            f"strategy={self._strategy_flag!r} with accelerator={NAME!r}: leave strategy out; processes that torchrun "
            "or xla_amp.launch has started train together"
        )
    if getattr(self, plugin) is None and getattr(self, precision) != "32-true":
        setattr(self, plugin, mixed(getattr(self, precision)))


def _keep_on_device(original: Any, data: Any) -> Any:
    on_device = isinstance(data, torch.Tensor) and devices.is_xla(data.device.type)
    return data.detach() if on_device else original(data)


def _read_when_shown(original: Any, self: Any) -> Any:
    values = original(self)
    values.update(convert_tensors_to_scalars(values))
    return values


_TRAINER = "lightning.pytorch.trainer.connectors"
_FLAGS = (
    "A registered accelerator gets the CPU's strategy and CUDA's precision: tensors would stay on the host, and the "
    "scaler finds no CUDA. 'auto' asks a fixed list of accelerators, without the device that is in use."
)

PATCHES = (
    Patch(f"{_TRAINER}.accelerator_connector", "_AcceleratorConnector", "_check_config_and_set_final_flags",
          functools.partial(_choose, XLAMixedPrecision, "_precision_flag", "_precision_plugin_flag"), _FLAGS),
    Patch("lightning.fabric.connector", "_Connector", "_check_config_and_set_final_flags",
          functools.partial(_choose, FabricXLAMixedPrecision, "_precision_input", "_precision_instance"), _FLAGS),
    Patch(f"{_TRAINER}.logger_connector.result", "", "convert_tensors_to_scalars", _keep_on_device,
          "Reads each value of the progress bar in each step, also when no bar shows it: a wait a step."),
    Patch(f"{_TRAINER}.logger_connector.logger_connector", "_LoggerConnector", "progress_bar_metrics", _read_when_shown,
          "Without it a bar shows the tensors that the row above leaves on the device."),
)  # fmt: skip


for _accelerators in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
    _accelerators.register(NAME, XLAAccelerator, description="The XLA device of xla_amp", override=True)
for _strategies, _strategy in ((StrategyRegistry, XLAStrategy), (STRATEGY_REGISTRY, _fabrics_strategy)):
    _strategies.register(NAME, _strategy, description="The XLA device, in one or several processes", override=True)
patches.install(PATCHES, {})
