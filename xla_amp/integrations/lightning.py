"""Lightning and Fabric: ``accelerator="xla_amp"``, with ``precision="bf16-mixed"`` or ``"16-mixed"``.

    import lightning as L
    import xla_amp.integrations.lightning

    trainer = L.Trainer(accelerator="xla_amp", precision="bf16-mixed")

Importing this module registers the accelerator and the strategy with Lightning, and replaces the attributes of
`PATCHES`; it starts no device.  The device starts with the first Trainer or Fabric that uses it.
``accelerator="auto"`` selects it when the program has started it already (`xla_amp.xla_device()`).

A training step is one XLA executable.  The host waits only where a value is shown or saved: the progress bar, a logger,
a checkpoint.

Source: https://lightning.ai/docs/pytorch/stable/extensions/accelerator.html
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
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
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.connectors import accelerator_connector
    from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
except ImportError as error:
    raise ImportError(
        f"xla_amp.integrations.lightning needs the package `lightning` ({error}): pip install 'xla-amp[lightning]'"
    ) from error

from xla_amp.backends import devices
from xla_amp.errors import PolicyError
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.pytorch.distributed.xla_model import xla_device
from xla_amp.pytorch.optim.grad_scaler import GradScaler

NAME = "xla_amp"
"""Name of the accelerator and of the strategy."""

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
        """The number of devices: 1.

        Raises:
            ValueError: more than one device was asked for.
        """
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count not in (1, -1):
            raise ValueError(
                f"devices={devices!r}: accelerator='{NAME}' trains on one device per process: write devices=1 (for "
                "several devices, use xla_amp.launch or SPMD without Lightning)"
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


class XLAStrategy(SingleDeviceStrategy):
    """One process that trains on the XLA device."""

    strategy_name = NAME

    def __init__(self, checkpoint_io: Any = None, precision_plugin: Precision | None = None) -> None:
        super().__init__(xla_device(), None, checkpoint_io or XLACheckpointIO(), precision_plugin)


class FabricXLAStrategy(FabricSingleDevice):
    """`XLAStrategy` for Fabric."""

    def __init__(self, checkpoint_io: Any = None, precision: FabricPrecision | None = None) -> None:
        super().__init__(xla_device(), None, checkpoint_io or XLACheckpointIO(), precision)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Front:
    """The classes of Lightning or of Fabric, and the names of their connector's attributes."""

    connector: Any
    precision_name: str
    given_precision: str
    strategy: Callable[[], Any]
    full: Callable[[], Any]
    mixed: Callable[[Any], Any]


_TRAINER = _Front(
    connector=accelerator_connector._AcceleratorConnector,
    precision_name="_precision_flag",
    given_precision="_precision_plugin_flag",
    strategy=XLAStrategy,
    full=XLAPrecision,
    mixed=XLAMixedPrecision,
)
_FABRIC = _Front(
    connector=connector._Connector,
    precision_name="_precision_input",
    given_precision="_precision_instance",
    strategy=FabricXLAStrategy,
    full=FabricXLAPrecision,
    mixed=FabricXLAMixedPrecision,
)


def _choose_strategy(front: _Front, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def choose(self: Any) -> Any:
        return front.strategy() if isinstance(self.accelerator, XLAAccelerator) else original(self)

    return choose


def _make_precision(front: _Front, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(self: Any) -> Any:
        ours = isinstance(self.accelerator, XLAAccelerator)
        if not ours or getattr(self, front.given_precision) is not None:
            return original(self)
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
        return data.detach().clone() if on_device else original(data)

    return convert


def _read_when_shown(original: property) -> property:
    def progress_bar_metrics(self: Any) -> Any:
        values = original.__get__(self)
        values.update(convert_tensors_to_scalars(values))
        return values

    return property(progress_bar_metrics)


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
)
"""Each does what Lightning does unless the accelerator, or the value, is on the XLA device."""


def _install() -> None:
    for accelerators in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
        accelerators.register(NAME, XLAAccelerator, description="The XLA device of xla_amp", override=True)
    for strategies, strategy in ((StrategyRegistry, XLAStrategy), (STRATEGY_REGISTRY, FabricXLAStrategy)):
        strategies.register(NAME, strategy, description="One process on the XLA device", override=True)
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.replace(inspect.getattr_static(patch.owner, patch.name)))


_install()
