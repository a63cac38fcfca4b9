"""Which dtypes the contractions of a lowered program have."""

from __future__ import annotations

import collections
from typing import Any

import jax


def contractions(function: Any, *args: Any) -> collections.Counter[tuple[str, str]]:
    """Operand dtypes of every dot and convolution in the StableHLO of ``jit(function)``, called functions included."""
    from jaxlib.mlir import ir

    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def look(operation: Any) -> Any:
        name = operation.operation.name
        if name in ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"):
            left, right = (str(ir.RankedTensorType(o.type).element_type) for o in list(operation.operands)[:2])
            found[left, right] += 1
        return ir.WalkResult.ADVANCE

    module = jax.jit(function).lower(*args).compiler_ir("stablehlo")
    module.operation.walk(look)
    return found
