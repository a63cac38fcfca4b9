"""Exchange arrays with JAX without a copy.

A step donates dead arrays to its program, which writes results into their memory.  It donates only arrays that nothing
but a lazy tensor references.  The caller of `to_jax` holds such a reference.  Memory of an array from outside may be
reachable in other ways (shards, views), so such an array is never donated.
"""

from __future__ import annotations

import jax
import numpy as np
import torch

from xla_amp.common import arguments
from xla_amp.engines import base
from xla_amp.errors import DeviceError, UnsupportedDtypeError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.base.dtypes import TO_TORCH
from xla_amp.lazy.graph.trace import Buffer, spec
from xla_amp.lazy.programs import mesh, pjrt
from xla_amp.lazy.tensors import transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE, array_of
from xla_amp.lazy.torch_integration.device import device


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The array that holds a lazy tensor's value now, without a copy.

    Recorded operations are dispatched first, without waiting for them.  A step never overwrites the array while there
    is a reference to it: the tensor gets another array.  (Hold the array itself, not only a shard of it.)  A tensor
    that is a view of a part of its buffer gets a copy.  64-bit dtypes are kept, also if JAX has them switched off.

    Args:
        tensor: on the lazy device; gradients do not flow through.

    Raises:
        DeviceError: a tensor of another device.
        EngineError: the process uses torch_xla.

    Example:
        >>> import torch, xla_amp
        >>> to_jax(torch.ones(2, device=xla_amp.xla_device())) + 1
        Array([2., 2.], dtype=float32)
    """
    arguments.require("to_jax(tensor)", tensor, torch.Tensor, "a tensor of the device")
    base.require_lazy("to_jax()", "jax.numpy.asarray(tensor.cpu().numpy())")
    if tensor.device.type != DEVICE_TYPE:
        raise DeviceError(
            f"expected a tensor of the lazy device, got one on {tensor.device}: move it with "
            "tensor.to(xla_amp.xla_device()), or take its memory with jax.dlpack.from_dlpack(tensor)"
        )
    return array_of(tensor.detach())


def from_jax(array: jax.Array) -> torch.Tensor:
    """A lazy tensor over a JAX array, without a copy.

    The array stays valid and unchanged: writing to the tensor gives the tensor another array.  Do not donate the array
    to a JAX program while the tensor needs it.

    Args:
        array: on the device that the tensors live on.  Weakly typed arrays (made of Python numbers) are copied.

    Raises:
        DeviceError: the array is on another device, or was donated.
        UnsupportedDtypeError: torch has no such dtype.
        TypeError: not an array, or a tracer.
        EngineError: the process uses torch_xla.

    Example:
        >>> import jax.numpy as jnp
        >>> from_jax(jnp.arange(3.0)).sum().item()
        3.0
    """
    base.require_lazy("from_jax()", "torch.from_numpy(numpy.array(array)).to(xla_amp.xla_device())")
    device()
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
        devices = ", ".join(sorted(map(str, array.sharding.device_set)))
        raise DeviceError(
            f"the jax.Array lives on {devices}, lazy tensors live on {pjrt.jax_device()}: move it with "
            "jax.device_put(array, device)"
        )
    if array.weak_type:  # its dtype yields in promotion, a tensor's does not
        with private_api.x64():
            array = jax.lax.convert_element_type(array, array.dtype)
    buffer = Buffer(spec(tuple(array.shape), dtype), array=array)
    buffer.external = array
    return transfer.tensor_over(buffer)
