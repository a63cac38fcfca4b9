"""Which dtypes the contractions of a lowered program have."""

from __future__ import annotations

import collections
from typing import Any

import jax


def contractions(function: Any, *args: Any) -> collections.Counter[tuple[str, str]]:
    """Operand dtypes of every dot and convolution in the StableHLO of ``jit(function)``, called functions included."""
    return contractions_of(jax.jit(function).lower(*args))


def contractions_of(lowered: Any) -> collections.Counter[tuple[str, str]]:
    """Those of a program that is lowered."""
    from jaxlib.mlir import ir

    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def look(operation: Any) -> Any:
        name = operation.operation.name
        if name in ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"):
            left, right = (str(ir.RankedTensorType(o.type).element_type) for o in list(operation.operands)[:2])
            found[left, right] += 1
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(look)
    return found
