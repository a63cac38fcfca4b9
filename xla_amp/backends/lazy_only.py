"""Saying so where a function needs the lazy device and the process uses torch_xla."""

from __future__ import annotations

from xla_amp.backends import base
from xla_amp.errors import EngineError

LAZY = "jax"
"""torch's name of the lazy device."""


def require(caller: str, instead: str = "") -> None:
    """Raises unless the lazy device is the XLA engine in use; starts nothing.

    Args:
        caller: the public function that was called.
        instead: what does the same with torch_xla, if something does.

    Raises:
        EngineError: another engine is in use.
    """
    active = base.select().DEVICE_TYPE
    if active != LAZY:
        there = f"use {instead} there, or " if instead else ""
        raise EngineError(
            f"{caller} works on the lazy device {LAZY!r} alone, and this process uses torch_xla's device {active!r}: "
            f"{there}set XLA_AMP_ENGINE=jax before the first use"
        )
