"""Grouped matrix products: one matrix per group of rows, as mixtures of experts need them.

Group ``g`` ends at ``offsets[g]`` along the grouped axis, and rows after the last group are zero (torch leaves them
undefined).  The sizes are data: one program serves all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.linalg.contraction import contract, precision
from xla_amp.lowering.operand import as_dtype, is_half, up
from xla_amp.lowering.registry import register


@register("_grouped_mm")
def grouped_mm(
    left: jax.Array,
    right: jax.Array,
    offsets: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    *,
    platform: str,
) -> jax.Array:
    """``left[m, k] @ right[g, k, n]``, or grouped over k (both 2-d), over n (`left` 3-d) or not at all (both 3-d)."""
    if offsets is None:
        product = contract(left, right, ((2,), (1,)), ((0,), (0,)), platform=platform)
    else:
        sizes = jnp.diff(offsets, prepend=jnp.zeros(1, offsets.dtype))
        if left.ndim == 2 and right.ndim == 2:
            product = _ragged(left, right, sizes, contracting=(1, 0), ragged=1, group=(), platform=platform)
        elif left.ndim == 2:
            product = _ragged(left, right, sizes, contracting=(1, 1), ragged=0, group=(0,), platform=platform)
        else:
            # left[g, m, k] @ right[k, n], grouped over n, is the transpose of the form above.
            product = _ragged(right, left, sizes, contracting=(0, 2), ragged=1, group=(0,), platform=platform).T
    return product if bias is None else product + as_dtype(bias, product.dtype)


def _ragged(
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    *,
    contracting: tuple[int, int],
    ragged: int,
    group: tuple[int, ...],
    platform: str,
) -> jax.Array:
    """A dot whose left axis `ragged` is split into groups of `sizes`; `group` is the right operand's group axis."""
    if is_half(left.dtype) and platform == "cpu":  # XLA:CPU has no half dot in the form that XLA expands this to
        left, right = up(left), up(right)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((contracting[0],), (contracting[1],)), ((), ())),
        lhs_ragged_dimensions=[ragged],
        rhs_group_dimensions=list(group),
    )
    return lax.ragged_dot_general(
        left,
        right,
        sizes,
        numbers,
        precision=precision(left.dtype),
    )
