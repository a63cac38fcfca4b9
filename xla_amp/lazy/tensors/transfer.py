"""Create tensors from host values and arrays, and copy values between the host and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from xla_amp.common import interrupts
from xla_amp.errors import DeviceError, StepFailedError
from xla_amp.lazy import private_api
from xla_amp.lazy.dtypes import TO_NUMPY, TO_TORCH, to_numpy, to_torch
from xla_amp.lazy.graph import host_copies
from xla_amp.lazy.graph.trace import Buffer, Spec, spec
from xla_amp.lazy.programs import mesh, pjrt, recompile_reasons
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.torch_integration import forks


@interrupts.deferred
def upload(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor's values on the device (contiguous, same dtype); the tensor may change afterwards."""
    # On the CPU JAX may use the given memory without a copy, so it gets a private copy.
    forks.check()
    private = to_numpy(tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())
    metrics.host_to_device += 1
    with private_api.x64():
        array = mesh.put(private)
    if not private.ndim or host_copies.is_kept(private):  # optimizers store rates in tensors and read them
        host_copies.keep(array, private)
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
    metrics.host_syncs += 1
    recompile_reasons.host_waits()
    metrics.device_to_host += 1
    try:
        value = np.array(array, copy=True)
    except jax.errors.JaxRuntimeError as error:
        if not mesh.ended.listeners:
            raise
        raise StepFailedError(f"{error}{mesh.ended_peers()}") from error
    return to_torch(value)


def wrap(array: jax.Array, value_spec: Spec | None = None) -> torch.Tensor:
    """A device array as a tensor on the lazy device, without a copy; `value_spec` is its spec if it is known."""
    if value_spec is None:
        value_spec = spec(array.shape, TO_TORCH[np.dtype(array.dtype)])
    tensor = private_api.create_tensor(value_spec.shape, value_spec.dtype)
    storage: Any = tensor.untyped_storage()
    storage._xla_amp = Buffer(value_spec, array=array)
    return tensor


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
        sources = {struct: jax.device_put(np.zeros(*struct), home) for struct in structs}
        return [wrap(jax.device_put(sources[struct], home, may_alias=False)) for struct in structs]
