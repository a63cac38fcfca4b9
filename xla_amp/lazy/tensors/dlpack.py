"""Tensors of torch's own devices that lie in memory which the lazy device can use: the same GPU's, or the host's."""

from __future__ import annotations

import jax
import torch

from xla_amp.lazy import private_api
from xla_amp.lazy.runtime import mesh, pjrt
from xla_amp.lazy.tensors import transfer

_BESIDE = {"cpu": "cpu", "cuda": "gpu"}
"""torch device type -> platform on which JAX can use its memory."""


def beside(tensor: torch.Tensor) -> bool:
    """Whether a tensor of another torch device lies in memory of the device that lazy tensors live on."""
    if mesh.active is not None or _BESIDE.get(tensor.device.type) != pjrt.platform():
        return False
    return tensor.device.type == "cpu" or tensor.device.index == pjrt.jax_device().local_hardware_id


def from_memory(tensor: torch.Tensor) -> jax.Array:
    """The memory of a `beside` tensor as an array, by way of DLPack (XLA copies misaligned CPU memory)."""
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    with private_api.x64():
        return jax.dlpack.from_dlpack(source)


def arrive(tensor: torch.Tensor, dtype: torch.dtype) -> jax.Array:
    """A copy of another torch device's tensor on ours; from the same GPU it does not pass through the host."""
    if tensor.device.type != "cpu" and beside(tensor):
        return from_memory(tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format))
    return transfer.upload(tensor.to("cpu", dtype))
