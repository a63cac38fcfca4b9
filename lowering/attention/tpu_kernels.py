"""What the two kernels for TPUs of JAX's own library share: the calls they take, their tiles, how they are traced.

Neither writes the square matrix of weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention.common import Attention

LANES: Final = 128
"""Of a TPU's vector registers: the kernels' least tile."""
_EDGES: Final = (512, 256, 128)
"""Tile edges, best first; one has to divide the number of rows, one the number of columns."""
_BYTES_OF_A_ROW: Final = 1024
"""Of queries, keys or values: tiles of longer rows outgrow a v5e's and a v5p's memory for a kernel."""


def takes(of: Attention) -> bool:
    """Whether a kernel can compute this call: no bias and no dropout, whole tiles, short enough rows."""
    widest = max(of.query.shape[-1], of.value.shape[-1])
    return (
        of.platform == "tpu"
        and not of.partitioned  # XLA does not split a kernel over a mesh
        and of.bias is None
        and of.rng is None
        and of.dtype in (np.dtype(np.float32), np.dtype(jnp.bfloat16))
        and all(extent % LANES == 0 for extent in of.shape[2:])
        and widest * of.dtype.itemsize <= _BYTES_OF_A_ROW
    )


def edges(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    of_rows, of_columns = (next(edge for edge in _EDGES if extent % edge == 0) for extent in (rows, columns))
    return of_rows, of_columns


@contextlib.contextmanager
def tracing(of: Attention) -> Iterator[None]:
    """The kernels index with 32 bits, and compute float32 in full where float32 is what they are given."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        if of.dtype == np.float32:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield
