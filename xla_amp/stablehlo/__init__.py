"""Mixed precision for StableHLO modules: programs that have left their framework.

    >>> import jax, jax.numpy as jnp
    >>> from xla_amp import stablehlo
    >>> lowered = jax.jit(jnp.dot).lower(jnp.ones((8, 8)), jnp.ones((8, 8)))
    >>> stablehlo.autocast(lowered).report.casts
    {'f32->bf16': 2}

docs/stablehlo.md describes the pass.  Importing this package does not import jax; using a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_amp import public_names as _names

if TYPE_CHECKING:
    # What type checkers and IDEs read. `_PUBLIC` loads the same names at run time, on first use.
    from xla_amp.stablehlo.api import autocast as autocast
    from xla_amp.stablehlo.io import load as load
    from xla_amp.stablehlo.io import save as save
    from xla_amp.stablehlo.measure.comparison import compare as compare
    from xla_amp.stablehlo.measure.inspection import inspect as inspect
    from xla_amp.stablehlo.program import Program as Program

_PUBLIC = {
    "Program": "xla_amp.stablehlo.program",
    "autocast": "xla_amp.stablehlo.api",
    "compare": "xla_amp.stablehlo.measure.comparison",
    "inspect": "xla_amp.stablehlo.measure.inspection",
    "load": "xla_amp.stablehlo.io",
    "save": "xla_amp.stablehlo.io",
}
"""Public name -> module that defines it."""

__all__ = sorted(_PUBLIC)

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> object:
        return _names.load(__name__, name, _PUBLIC, __all__)


def __dir__() -> list[str]:
    return list(__all__)
