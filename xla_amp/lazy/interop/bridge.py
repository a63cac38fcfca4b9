"""Between JAX and torch's lazy device: arrays both ways without a copy, functions both ways in one program.

=======================  =======================================================================================
`to_jax`, `from_jax`      a tensor's array, an array's tensor
`from_torch`              a tensor of another torch device in the same memory
`functional`              a torch module as a pure JAX function (`xla_amp.lazy.interop.functional`)
`torch_function`          a JAX function as a differentiable torch operation (`xla_amp.lazy.interop.torch_function`)
=======================  =======================================================================================

Importing this module loads torch.
"""

from __future__ import annotations

import jax
import torch

from xla_amp.backends import base
from xla_amp.errors import DeviceError
from xla_amp.lazy import to_device
from xla_amp.lazy.interop import shared_arrays
from xla_amp.lazy.interop.functional import TorchFunction, functional
from xla_amp.lazy.interop.torch_function import torch_function
from xla_amp.lazy.tensors import dlpack
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration.device import device

__all__ = ["TorchFunction", "from_jax", "from_torch", "functional", "to_jax", "torch_function"]


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The array that holds a lazy tensor's value now, without a copy.

    What was recorded runs first, without waiting for it.  A step never overwrites the array while somebody holds it:
    the tensor then gets another one.  (Hold the array itself, not only a shard of it.)  A tensor that is a view of
    another one's part gets an array of its own.  64-bit dtypes stay what they are, also where JAX has them switched
    off.

    Args:
        tensor: on the lazy device, or on torch_xla's, which is waited for; gradients do not flow through.

    Raises:
        DeviceError: a tensor of another device.
        EngineError: torch_xla's platform shares no memory with JAX.

    Example:
        >>> import torch, xla_amp
        >>> to_jax(torch.ones(2, device=xla_amp.xla_device())) + 1
        Array([2., 2.], dtype=float32)
    """
    if isinstance(tensor, torch.Tensor) and tensor.device.type == "xla":
        from xla_amp.backends.torch_xla import dlpack

        return dlpack.to_jax(tensor)
    return shared_arrays.lend(tensor)


def from_jax(array: jax.Array) -> torch.Tensor:
    """A tensor over a JAX array, without a copy: on the lazy device, or on torch_xla's where that is in use.

    The array stays valid and unchanged: writing to the tensor gives the tensor another one.  Do not donate the array
    to a JAX program while the tensor needs it.

    Args:
        array: on the device that the tensors live on.  Weakly typed arrays (made of Python numbers) are copied.

    Raises:
        DeviceError: the array is elsewhere, or was donated.
        UnsupportedDtypeError: torch has no such dtype.
        TypeError: not a concrete array.
        EngineError: torch_xla's platform shares no memory with JAX.

    Example:
        >>> import jax.numpy as jnp
        >>> from_jax(jnp.arange(3.0)).sum().item()
        3.0
    """
    if base.select().DEVICE_TYPE != DEVICE_TYPE:
        from xla_amp.backends.torch_xla import dlpack

        return dlpack.from_jax(array)
    device()
    return shared_arrays.adopt(array)


def from_torch(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor over the memory of a tensor of another torch device.

    A CUDA tensor is taken over where it is if the lazy device is the same GPU; a CPU tensor if the lazy device is the
    CPU (XLA copies where memory is not aligned to 64 bytes).  Elsewhere the value is copied, as by
    ``tensor.to(device)``.  Do not write to the original while the lazy tensor needs its value.

    Raises:
        DeviceError: a tensor without memory (``meta``).
        EngineError: the process uses torch_xla.
    """
    base.require_lazy("from_torch()", "tensor.to(xla_amp.xla_device())")
    device()
    if tensor.device.type == DEVICE_TYPE:
        return tensor
    if tensor.device.type == "meta":
        raise DeviceError("from_torch() expects a tensor that has values, got one on meta")
    if not dlpack.beside(tensor):
        return to_device(tensor.cpu())
    result = shared_arrays.adopt(dlpack.from_memory(tensor))
    return result.requires_grad_() if tensor.requires_grad and tensor.is_leaf else result
