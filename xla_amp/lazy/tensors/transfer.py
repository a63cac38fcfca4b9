"""Create tensors from host values, arrays and memory of other devices, and copy values to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from xla_amp.common import events, interrupts
from xla_amp.errors import DeviceError, StepFailedError
from xla_amp.lazy.base import dtypes, forks, private_api
from xla_amp.lazy.base.dtypes import TO_NUMPY, TO_TORCH, to_numpy, to_torch
from xla_amp.lazy.graph.trace import Buffer, spec
from xla_amp.lazy.programs import mesh, pjrt
from xla_amp.lazy.programs.metrics import metrics


@events.Point
def downloaded() -> None:
    """After Python has waited for a value."""


@interrupts.deferred
def upload(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor's values on the device (contiguous, same dtype); the tensor may change afterwards."""
    # On the CPU JAX may use the given memory without a copy, so it gets a private copy.
    forks.check()
    private = to_numpy(tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())
    metrics.host_to_device += 1
    with private_api.x64():
        array = mesh.put(private)
    if not private.ndim or dtypes.is_kept(private):  # optimizers store rates in tensors and read them
        dtypes.keep(array, private)
    return array


def download(array: jax.Array) -> torch.Tensor:
    """A copy of a device array as a CPU tensor; waits for the value.

    Raises:
        DeviceError: this process has only a part of it.
    """
    forks.check()
    if not array.is_fully_addressable and not array.is_fully_replicated:
        raise DeviceError(
            f"a tensor of shape {list(array.shape)} is split over several processes, of which each has a part: call "
            "xla_amp.full_tensor(tensor) on all of them and read that; xla_amp.checkpoint.save() writes it by part"
        )
    metrics.host_waits()
    metrics.device_to_host += 1
    try:
        value = np.array(array, copy=True)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises either when a connection is lost
        if not mesh.ended.listeners:
            raise
        raise StepFailedError(f"{error}{mesh.ended_peers()}") from error
    downloaded()
    return to_torch(value)


def tensor_over(buffer: Buffer) -> torch.Tensor:
    """A new tensor that is all of `buffer`, which no other storage has."""
    tensor = private_api.create_tensor(buffer.spec.shape, buffer.spec.dtype)
    storage: Any = tensor.untyped_storage()
    storage._xla_amp = buffer
    return tensor


def wrap(array: jax.Array) -> torch.Tensor:
    """A device array as a tensor on the lazy device, without a copy."""
    return tensor_over(Buffer(spec(array.shape, TO_TORCH[np.dtype(array.dtype)]), array=array))


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the CPU tensor on the lazy device.  Records nothing, so a loader's thread may call it at any time."""
    result = wrap(upload(tensor))
    return result.requires_grad_() if tensor.requires_grad else result


@interrupts.deferred
def zeros(wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor] | None:
    """Contiguous zeros of each shape and dtype, made without a program.

    A first step that records the creation of its optimizer's state would be another program than the next step, and as
    long to compile.  Returns None on a mesh, where the step lays out the state with its parameters.
    """
    if mesh.active is not None:
        return None
    structs = [(tuple(shape), TO_NUMPY[dtype]) for shape, dtype in wanted]
    home = pjrt.jax_device()
    with private_api.x64():
        # JAX may use NumPy's memory, which a program cannot overwrite, so only copies of its arrays are given away.
        sources = {struct: jax.device_put(np.zeros(*struct), home) for struct in dict.fromkeys(structs)}
        return [wrap(jax.device_put(sources[struct], home, may_alias=False)) for struct in structs]


def copy_to_device(tensor: torch.Tensor, dtype: torch.dtype) -> jax.Array:
    """A copy of another torch device's tensor on the lazy device; from the same GPU without a copy to the host."""
    if tensor.device.type != "cuda" or pjrt.platform() != "gpu" or mesh.active is not None:
        return upload(tensor.to("cpu", dtype))
    if tensor.device.index != pjrt.jax_device().local_hardware_id:
        return upload(tensor.to("cpu", dtype))
    copied = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    with private_api.x64():
        array: jax.Array = jax.dlpack.from_dlpack(copied.resolve_conj().resolve_neg())
        return array
