"""Arrays that the device shares with JAX programs.

A step hands dead arrays over to its program, which writes its results into their memory.  It does so only with arrays
that nobody but a tensor of the device holds.  An array that is lent is held by whoever asked for it; one that came from
outside may have other names for its memory (shards, views), and is never handed over.
"""

from __future__ import annotations

import jax
import numpy as np
import torch

from xla_amp.errors import DeviceError, UnsupportedDtypeError
from xla_amp.lazy import private_api
from xla_amp.lazy.dtypes import TO_TORCH
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.trace import spec
from xla_amp.lazy.runtime import mesh, pjrt
from xla_amp.lazy.tensors import tensor_io


def lend(tensor: torch.Tensor) -> jax.Array:
    """The array behind a tensor of the device, without a copy if the tensor is all of it; runs what was recorded.

    Raises:
        DeviceError: a tensor of another device.
    """
    if tensor.device.type != tensor_io.DEVICE_TYPE:
        raise DeviceError(
            f"expected a tensor of the lazy device, got one on {tensor.device}: move it with "
            "tensor.to(xla_amp.xla_device()), or without a copy with xla_amp.jax.from_torch(tensor)"
        )
    return tensor_io.array_of(tensor.detach())


def adopt(array: jax.Array) -> torch.Tensor:
    """A tensor of the device over an array that stays its owner's, without a copy.

    Raises:
        DeviceError: the array lives on another JAX device, or was donated.
        UnsupportedDtypeError: torch has no such dtype.
        TypeError: not an array, or one that is being traced.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        hint = "; inside a JAX function call torch code through xla_amp.jax.functional(module)"
        traced = isinstance(array, jax.core.Tracer)
        raise TypeError(f"expected a concrete jax.Array, got {type(array).__name__}{hint if traced else ''}")
    dtype = TO_TORCH.get(array.dtype) if isinstance(array.dtype, np.dtype) else None
    if dtype is None:
        raise UnsupportedDtypeError(f"a jax.Array of dtype {array.dtype} has no counterpart in torch")
    if array.is_deleted():
        raise DeviceError(f"the jax.Array {array.dtype}{list(array.shape)} was donated to a JAX program and is gone")
    if mesh.active is None and array.sharding.device_set != {pjrt.jax_device()}:
        places = ", ".join(sorted(map(str, array.sharding.device_set)))
        raise DeviceError(
            f"the jax.Array lives on {places}, lazy tensors live on {pjrt.jax_device()}: move it with "
            "jax.device_put(array, device)"
        )
    if array.weak_type:  # a number's dtype gives way in promotion; a tensor's does not
        with private_api.x64():
            array = jax.lax.convert_element_type(array, array.dtype)
    of = spec(tuple(array.shape), dtype)
    tensor = private_api.create_tensor(of.shape, of.dtype)
    tensor.untyped_storage()._xla_amp = buffer = Buffer(of, array=array)
    buffer.external = array
    return tensor
