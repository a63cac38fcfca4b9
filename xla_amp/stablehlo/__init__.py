"""Mixed precision for StableHLO modules: programs that have left their framework.

    >>> import jax, jax.numpy as jnp
    >>> from xla_amp import stablehlo
    >>> lowered = jax.jit(jnp.dot).lower(jnp.ones((8, 8)), jnp.ones((8, 8)))
    >>> stablehlo.autocast(lowered).report.casts
    {'f32->bf16': 2}

docs/stablehlo.md tells what the pass does.  Importing this package does not import jax; using a name does.
"""

import importlib
from typing import Any

_PUBLIC = {
    "Converted": "xla_amp.stablehlo.passes.autocast",
    "Program": "xla_amp.stablehlo.io",
    "Report": "xla_amp.stablehlo.passes.report",
    "autocast": "xla_amp.stablehlo.passes.autocast",
    "compare": "xla_amp.stablehlo.tools.comparison",
    "inspect": "xla_amp.stablehlo.tools.inspection",
    "load": "xla_amp.stablehlo.io",
    "save": "xla_amp.stablehlo.io",
}
"""Public name -> module that defines it."""

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'xla_amp.stablehlo' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
