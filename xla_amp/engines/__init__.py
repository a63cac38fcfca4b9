"""What executes torch operations on XLA: the protocol, devices as users name them, torch_xla behind the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_amp.common.events import Point

if TYPE_CHECKING:
    from xla_amp.engines.base import Engine


@Point
def choose(wanted: str) -> Engine:  # type: ignore[empty-body]
    """Asks for the engine of a value of ``XLA_AMP_ENGINE``; `xla_amp.engine_choice` answers, above all engines."""
