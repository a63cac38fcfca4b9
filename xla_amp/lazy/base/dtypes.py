"""Convert between torch and NumPy dtypes, share memory with NumPy arrays, and keep copies of small values."""

from __future__ import annotations

import functools
import weakref

import jax
import ml_dtypes
import numpy as np
import torch

TO_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
}
TO_TORCH: dict[np.dtype, torch.dtype] = {numpy: torch_ for torch_, numpy in TO_NUMPY.items()}

# NumPy lacks these types, so tensors are viewed as integers of the same size.
_BITS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a NumPy array of the same dtype, sharing its memory."""
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return tensor.numpy()
    return tensor.view(bits).numpy().view(TO_NUMPY[tensor.dtype])


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A writable NumPy array as a CPU tensor of the same dtype, sharing its memory."""
    dtype = TO_TORCH[array.dtype]
    bits = _BITS.get(dtype)
    if bits is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(TO_NUMPY[bits])).view(dtype)


# ---- copies on the host ----------------------------------------------------------------------------------------------


copies: dict[int, tuple[weakref.ref[jax.Array], np.ndarray]] = {}
"""id of an array -> the array and the host's copy, while the array exists; read by `host_eval`."""
_SMALL = 1 << 20
"""Bytes up to which a copy of integers and booleans is kept: masks, lengths and labels, which programs read."""


def is_kept(value: np.ndarray) -> bool:
    """Whether the host keeps a copy of such a value: small integers and booleans."""
    return value.dtype.kind in "biu" and value.nbytes <= _SMALL


def keep(array: jax.Array, value: np.ndarray) -> None:
    """Keeps `value`, which is that of `array`, as long as `array` exists."""
    key = id(array)
    # No function of Python: one could raise for a signal there, which would be lost, and at interpreter exit the
    # module's names are deleted before the last array.
    copies[key] = (weakref.ref(array, functools.partial(copies.pop, key)), value)
