"""JAX's Pallas attention kernel on TPU: supported calls, tile shapes, trace settings.

The kernel does not write the score matrix to memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention.attention_call import Attention

MARKS: Final = ("mosaic", "tpu_custom_call")
LANES: Final = 128
"""Lanes of a TPU's vector registers: the kernels' smallest tile."""
_TILE_EDGES: Final = (512, 256, 128)
"""Tile edges, best first.  A tile edge must divide the number of rows, or of columns."""
_MAX_ROW_BYTES: Final = 1024
"""Bytes of a row of queries, keys or values.  Tiles of longer rows do not fit into the VMEM of a v5e or a v5p."""


def objection(call: Attention) -> str | None:
    """Why the kernel does not compute this call: a bias, dropout, parts of tiles, too long rows."""
    if in_the_way := call.objection_to_kernels((np.float32, jnp.bfloat16)):
        return in_the_way
    if call.bias is not None:
        return "it has a mask or bias"
    if any(extent % LANES for extent in call.shape[2:]):
        return f"rows and columns must be multiples of {LANES}"
    features = max(call.query.shape[-1], call.value.shape[-1])
    return "too many features for VMEM" if features * call.dtype.itemsize > _MAX_ROW_BYTES else None


def tile_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    tile_rows, tile_columns = (next(edge for edge in _TILE_EDGES if n % edge == 0) for n in (rows, columns))
    return tile_rows, tile_columns


@contextlib.contextmanager
def trace_settings(call: Attention) -> Iterator[None]:
    """Trace with 32-bit indices, and with full float32 products for float32 operands."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        if call.dtype == np.float32:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield
