"""Lowerings: what each ATen operation computes, as pure JAX functions in families.

This folder imports JAX, but neither torch nor any other module of the package except `xla_amp.common.events`,
`xla_amp.common.loss_scaling` and `xla_amp.hardware`.  The families are loaded when the table is first used: the JAX
front uses the forms of contractions and attention alone.
"""

from typing import TYPE_CHECKING

from xla_amp.lowering.operand import OneHot, Permuted
from xla_amp.lowering.registry import SUPPLIES, Lowering

if TYPE_CHECKING:
    from xla_amp.lowering.registry import find, register, table

__all__ = ["SUPPLIES", "Lowering", "OneHot", "Permuted", "find", "register", "table"]

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> object:
        if name not in ("find", "register", "table"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
        from xla_amp.lowering import families, registry  # noqa: F401 (a new row is compared with those of the families)

        globals()[name] = value = getattr(registry, name)
        return value
