"""What the fronts ask of an XLA engine, and the choice of one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from xla_amp import config
from xla_amp.errors import EngineError


@runtime_checkable
class Engine(Protocol):
    """An executor of torch operations on an XLA device; `xla_amp.engines.jax` is one."""

    DEVICE_TYPE: str
    """torch's name of the device type."""

    def device(self) -> torch.device:
        """The device; the first call starts the engine."""

    def is_started(self) -> bool:
        """Whether the engine has been used."""

    def platform(self) -> str:
        """XLA's platform underneath: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""

    def sync(self, wait: bool = False) -> None:
        """Ends the step; with `wait`, returns when the device has finished."""


def select() -> Engine:
    """The engine that ``XLA_AMP_ENGINE`` names; ``auto`` is the lazy device on JAX.

    Raises:
        EngineError: the engine cannot be used here.
    """
    if config.engine() == "torch_xla":
        raise EngineError(
            "XLA_AMP_ENGINE=torch_xla: this version of xla_amp has no torch_xla engine; "
            "unset XLA_AMP_ENGINE, or set it to jax, to use the lazy device on JAX"
        )
    from xla_amp.engines import jax as engine

    return engine
