"""Copies on the host of small values that are on the device: uploads, and values that the host has computed too."""

from __future__ import annotations

import functools
import weakref

import jax
import numpy as np

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
