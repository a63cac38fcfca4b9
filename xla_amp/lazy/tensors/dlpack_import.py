"""Exchange memory with torch's CPU and CUDA tensors, without a copy where the device is the same."""

from __future__ import annotations

import jax
import torch

from xla_amp.lazy import private_api
from xla_amp.lazy.programs import mesh, pjrt
from xla_amp.lazy.tensors import transfer

_SHARED = {"cpu": "cpu", "cuda": "gpu"}
"""torch device type -> platform on which JAX can use its memory."""


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of another torch device is in the memory of the lazy device."""
    if mesh.active is not None or _SHARED.get(tensor.device.type) != pjrt.platform():
        return False
    return tensor.device.type == "cpu" or tensor.device.index == pjrt.jax_device().local_hardware_id


def from_memory(tensor: torch.Tensor) -> jax.Array:
    """The memory of a tensor for which `shares_memory` is true as an array, through DLPack.

    XLA copies misaligned CPU memory.
    """
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    with private_api.x64():
        array: jax.Array = jax.dlpack.from_dlpack(source)
        return array


def copy_to_device(tensor: torch.Tensor, dtype: torch.dtype) -> jax.Array:
    """A copy of another torch device's tensor on the lazy device; from the same GPU without a copy to the host."""
    if tensor.device.type != "cpu" and shares_memory(tensor):
        return from_memory(tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format))
    return transfer.upload(tensor.to("cpu", dtype))
