"""SPMD in one process: tensors are sharded over a mesh of its devices, and XLA inserts the collectives.

Xu et al. 2021, "GSPMD: General and Scalable Parallelization for ML Computation Graphs"; the names are torch_xla's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from xla_amp.backends import base, devices
from xla_amp.errors import DeviceError
from xla_amp.lazy.distributed import processes
from xla_amp.lazy.runtime import mesh as meshes
from xla_amp.lazy.runtime import pjrt
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

Axis: TypeAlias = str | Sequence[str] | None
"""The mesh axes that one tensor dimension is split over: one, several, or none."""


def make_mesh(axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of this process's devices.

    Args:
        axes: extent of each axis by name, ``{"data": 4, "model": 2}``; their product is the number of devices.  None
            is one axis, ``"data"``, over all of them.

    Raises:
        DeviceError: their product is another number.
        EngineError: the process uses torch_xla.
    """
    base.require_lazy("make_mesh()", "torch_xla.distributed.spmd.Mesh")
    devices.engine().device()
    if processes.world_size() > 1:
        raise DeviceError(
            f"make_mesh(): this is one of {processes.world_size()} processes, each of which trains on one device; a "
            "mesh has the devices of one process: start one, or set XLA_AMP_ALONE=1"
        )
    local = jax.local_devices(backend=pjrt.jax_device().platform)
    axes = {"data": len(local)} if axes is None else axes
    if math.prod(axes.values()) != len(local):
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of a CPU"
        raise DeviceError(
            f"make_mesh({dict(axes)}): expected extents whose product is the number of devices, {len(local)}, got "
            f"{math.prod(axes.values())}{hint if local[0].platform == 'cpu' else ''}"
        )
    return Mesh(np.array(local).reshape(tuple(axes.values())), tuple(axes))


def mark_sharding(tensor: torch.Tensor, mesh: Mesh, spec: Sequence[Axis]) -> torch.Tensor:
    """Splits `tensor` over the devices of `mesh`, now and whenever it is written to; returns it.

    The first call replicates all other tensors on the mesh.  State that an optimizer makes for a parameter (tensors of
    the parameter's shape) gets the parameter's sharding.

    Args:
        tensor: a parameter, buffer or batch on the lazy device that is not a view.
        mesh: from `make_mesh`; one per process.
        spec: for each dimension the mesh axis (or axes) that it is split over, or None; trailing dimensions may be left
            out.

    Raises:
        ValueError: an unknown or repeated axis, more entries than dimensions, or an extent that does not divide.
        DeviceError: a tensor of another device, a view, or another mesh than before.
        EngineError: the process uses torch_xla.

    Example:
        >>> weight = torch.ones(8, 4, device=xla_amp.xla_device())         # doctest: +SKIP
        >>> mark_sharding(weight, make_mesh({"data": 8}), ("data", None))  # doctest: +SKIP
    """
    base.require_lazy("mark_sharding()", "torch_xla.distributed.spmd.mark_sharding")
    if tensor.device.type != DEVICE_TYPE:
        raise DeviceError(f"mark_sharding() expects a tensor on {DEVICE_TYPE!r}, got one on {tensor.device}")
    layout = NamedSharding(mesh, _partition(tensor, mesh, spec))
    buffer = tensor_io.buffer_of(tensor)
    if tuple(tensor.shape) != buffer.spec.shape or not tensor.is_contiguous():
        raise DeviceError(
            f"mark_sharding() expects a tensor that owns its values, got a view of shape {list(tensor.shape)} into "
            f"{buffer.spec}; mark the base, or a clone()"
        )
    if meshes.active is None:
        register_optimizer_step_post_hook(_shard_state)
    meshes.use(mesh)
    meshes.set_sharding(buffer, layout)
    return tensor


def _partition(tensor: torch.Tensor, mesh: Mesh, spec: Sequence[Axis]) -> PartitionSpec:
    if isinstance(spec, str) or len(spec) > tensor.dim():
        raise ValueError(
            f"mark_sharding(spec={spec!r}): expected at most one entry per dimension of shape {list(tensor.shape)}, "
            'e.g. ("data", None)'
        )
    named: list[str] = []
    for extent, entry in zip(tensor.shape, spec, strict=False):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.shape or axis in named:
                what = "repeats" if axis in named else "does not know"
                raise ValueError(f"mark_sharding(spec={spec!r}): {what} the axis {axis!r}; axes: {list(mesh.shape)}")
            named.append(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if extent % parts:
            raise ValueError(
                f"mark_sharding(spec={spec!r}): an extent of {extent} does not divide over {parts} devices; pad the "
                f"tensor of shape {list(tensor.shape)}, or leave that dimension whole"
            )
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in spec))


def sharding_of(tensor: torch.Tensor) -> PartitionSpec | None:
    """The sharding that `mark_sharding` gave the tensor, or None."""
    base.require_lazy("sharding_of()")
    layout = meshes.sharding_of(tensor_io.buffer_of(tensor))
    return None if layout is None else layout.spec


def _shard_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or parameter.device.type != DEVICE_TYPE:
            continue
        layout = meshes.sharding_of(tensor_io.buffer_of(parameter))
        if layout is None:
            continue
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.device.type == DEVICE_TYPE:
                buffer = tensor_io.buffer_of(value)
                if meshes.sharding_of(buffer) is None:
                    meshes.set_sharding(buffer, layout)
