"""Windows of a buffer: the elements that a tensor views, read as its dtype, in code that JAX traces or runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xla_amp.lowering.tensor import strided


def read(
    value: Any, shape: tuple[int, ...], strides: Sequence[int], offset: int, dtype: np.dtype, starts: Any = None
) -> Any:
    """The elements of a window.

    Args:
        value: of the whole buffer, of any shape and dtype.
        shape: of the window.
        strides: of the window, in elements of `dtype`.
        offset: of its first element, likewise.
        dtype: of the window; the buffer's bits are read as this dtype (`torch.Tensor.view`).
        starts: `strided.starts` as data of the program, instead of `offset`.
    """
    return strided.read(retype(value, dtype), shape, strides, offset, starts)  # maybe a `Permuted`


def retype(x: Any, dtype: np.dtype) -> Any:
    """The bits of `x` as `dtype`, flat if it has another dtype."""
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "c" or dtype.kind == "c":
        return _retype_complex(x, dtype)
    x = x.reshape(-1)
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(-1, dtype.itemsize // x.dtype.itemsize)
    x = x.astype(np.uint8) if x.dtype == np.bool_ else x
    if dtype == np.bool_:
        return jax.lax.bitcast_convert_type(x, np.uint8).reshape(-1) != 0
    return jax.lax.bitcast_convert_type(x, dtype).reshape(-1)


def _retype_complex(x: Any, dtype: np.dtype) -> Any:
    if x.dtype.kind == "c":
        pairs = jax.numpy.stack([x.real, x.imag], axis=-1).reshape(-1)
        return retype(pairs, dtype)
    part = np.dtype(np.float32 if dtype == np.complex64 else np.float64)
    pairs = retype(x, part).reshape(-1, 2)
    return jax.lax.complex(pairs[:, 0], pairs[:, 1])
