"""Digests of arrays, computed where they are: the same for any sharding, dtype by dtype to the last bit.

A digest is two sums, modulo 2**32, of the words of 32 bits of an array, each mixed with its position.  Words are the
bits of the elements; those of less than 32 bits take one each.  The mixing has an inverse, so every change of a single
word changes both sums; a change of several is missed with a probability of about 2**-64.  It finds damage, not forgery.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xla_amp.lazy import private_api

_WORD = 32


def start(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Starts to compute the digest of each array; one that other processes have parts of has none."""
    with private_api.x64():
        return {name: _on(_mesh_of(array))(array) for name, array in arrays.items() if _is_covered(array)}


def texts(digests: Mapping[str, jax.Array]) -> dict[str, str]:
    """What `start` returned, as 16 hexadecimal digits each; waits for the device."""
    return {name: "".join(f"{int(word):08x}" for word in np.asarray(each)) for name, each in digests.items()}


def _is_covered(array: jax.Array) -> bool:
    """Whether this process has the whole array, and the platform the bits of its numbers.

    A sum over processes, beside the step that runs, can wait for ever on XLA:CPU.  TPUs compute float64 with pairs of
    float32.
    """
    device: Any = next(iter(array.sharding.device_set))
    return array.is_fully_addressable and (device.platform != "tpu" or array.dtype not in (np.float64, np.complex128))


def _mesh_of(array: jax.Array) -> Mesh | None:
    found = getattr(array.sharding, "mesh", None)
    return found if isinstance(found, Mesh) else None


@functools.cache
def _on(mesh: Mesh | None) -> Any:
    """`_digest`, compiled for arrays on a mesh: every process gets the result."""
    return jax.jit(_digest, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def _digest(array: jax.Array) -> jax.Array:
    words = _words(array)
    position, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        steps = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        position += steps * jnp.uint32(stride % 2**_WORD)
        stride *= words.shape[dim]
    one = _mixed(words ^ _mixed(position))
    other = _mixed(one + position)
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in (one, other)])


def _mixed(value: jax.Array) -> jax.Array:
    """Each word spread over all bits, so that the sum of two differences is random (MurmurHash3's mixing)."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def _words(array: jax.Array) -> jax.Array:
    """The bits of an array as words; numbers of several words become another dimension."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_words(lax.real(array)), _words(lax.imag(array))], -1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = min(array.dtype.itemsize * 8, _WORD)
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
