"""Tensors that are there at once: values of the device that no step records."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from xla_amp.lazy import private_api
from xla_amp.lazy.dtypes import TO_NUMPY
from xla_amp.lazy.runtime import mesh, pjrt
from xla_amp.lazy.tensors.transfer import wrap


def zeros(wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor] | None:
    """Zeros of each shape and dtype, contiguous, made by one small program of their own.

    A step that makes its optimizer's state is another program than the next one, and as long to compile.  None on a
    mesh, where state made by the step is laid out with it.
    """
    if mesh.active is not None:
        return None
    structs = [(tuple(shape), TO_NUMPY[dtype]) for shape, dtype in wanted]
    with private_api.x64():
        home = jax.sharding.SingleDeviceSharding(pjrt.jax_device())
        make = jax.jit(lambda: [jnp.zeros(*struct) for struct in structs], out_shardings=home)
        return [wrap(array) for array in make()]
