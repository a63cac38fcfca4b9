"""SPMD: tensors are sharded over a mesh of the devices of one or all processes, and XLA inserts the collectives.

Xu et al. 2021, "GSPMD: General and Scalable Parallelization for ML Computation Graphs"; the names are torch_xla's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import torch
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from xla_amp.common import arguments
from xla_amp.engines import base, devices
from xla_amp.errors import DeviceError
from xla_amp.lazy import processes
from xla_amp.lazy.base import private_api
from xla_amp.lazy.base.dtypes import to_numpy
from xla_amp.lazy.graph.trace import Buffer, Instruction, Spec, assign, instruction_cache, record, trace
from xla_amp.lazy.processes import same_values
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lazy.programs import mesh as meshes
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.torch_common import trees

Axis: TypeAlias = str | Sequence[str] | None
"""The mesh axes that one tensor dimension is split over: one, several, or none."""


def make_mesh(axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of the devices of this process, or of all processes of its job.

    All processes make the same mesh.  Neighbours along the last axes are closest: on a TPU, as its interconnect is.  An
    axis that crosses hosts or TPU slices needs JAX's own mesh, which serves everywhere where this one does:
    ``jax.sharding.Mesh(mesh_utils.create_hybrid_device_mesh(...), names)``.

    Args:
        axes: extent of each axis by name, ``{"data": 4, "model": 2}``; their product is the number of devices.  None
            is one axis, ``"data"``, over all of them.

    Raises:
        DeviceError: their product is another number.
        EngineError: the process uses torch_xla.
    """
    base.require_lazy("make_mesh()", "torch_xla.distributed.spmd.Mesh")
    devices.engine().device()
    found = all_devices()
    axes = {"data": len(found)} if axes is None else axes
    _check_axes(axes)
    if math.prod(axes.values()) != len(found):
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of a CPU"
        where = f" of {processes.world_size()} processes" if processes.world_size() > 1 else ""
        raise DeviceError(
            f"make_mesh({dict(axes)}): expected extents whose product is the number of devices{where}, {len(found)}, "
            f"got {math.prod(axes.values())}{hint if found[0].platform == 'cpu' else ''}"
        )
    shape = tuple(axes.values())
    return Mesh(mesh_utils.create_device_mesh(shape, found, allow_split_physical_axes=True), tuple(axes))


def _check_axes(axes: Any) -> None:
    call = f"make_mesh(axes={axes!r})"
    arguments.require(call, axes, Mapping, 'extents by name such as {"data": 4, "model": 2}')
    for axis, extent in axes.items():
        arguments.require(call, axis, str, "names of axes that are texts")
        arguments.require(call, extent, int, f"a number of devices for {axis!r}")
    if not axes:
        raise DeviceError('make_mesh(axes={}): expected an axis such as {"data": 4}; leave axes out for one over all')


def all_devices() -> Sequence[jax.Device]:
    """The devices of this process, or of all processes of its job: those of a mesh."""
    platform = pjrt.jax_device().platform
    return jax.devices(platform) if processes.world_size() > 1 else jax.local_devices(backend=platform)


def mark_sharding(tensor: torch.Tensor, mesh: Mesh, spec: Sequence[Axis]) -> torch.Tensor:
    """Splits `tensor` over the devices of `mesh`, now and whenever it is written to; returns it.

    The first call replicates all other tensors on the mesh.  State that an optimizer makes for a parameter (tensors of
    the parameter's shape) gets the parameter's sharding.  On a mesh of several processes all of them call it, with
    equal values: `global_batch` makes a tensor of values that each process has a part of.  A tensor that the step
    computes is split from here on in the step.

    Args:
        tensor: a parameter, buffer, batch or result on the lazy device that is not a view.
        mesh: from `make_mesh`; one per process.
        spec: for each dimension the mesh axis (or axes) that it is split over, or None; trailing dimensions may be left
            out.

    Raises:
        ValueError: an unknown or repeated axis, more entries than dimensions, or an extent that does not divide.
        DeviceError: a tensor of another device, a view, or another mesh than before.
        EngineError: the process uses torch_xla, or the processes have different values.
    """
    base.require_lazy("mark_sharding()", "torch_xla.distributed.spmd.mark_sharding")
    arguments.require("mark_sharding(tensor)", tensor, torch.Tensor, "a tensor of the device")
    arguments.require("mark_sharding(mesh=...)", mesh, Mesh, "a mesh from xla_amp.make_mesh")
    if tensor.device.type != DEVICE_TYPE:
        raise DeviceError(f"mark_sharding() expects a tensor on {DEVICE_TYPE!r}, got one on {tensor.device}")
    layout = NamedSharding(mesh, _partition("mark_sharding", tuple(tensor.shape), mesh, spec))
    buffer = tensor_io.buffer_of(tensor)
    if tuple(tensor.shape) != buffer.spec.shape or not tensor.is_contiguous():
        raise DeviceError(
            f"mark_sharding() expects a tensor that owns its values, got a view of shape {list(tensor.shape)} into "
            f"{buffer.spec}; mark the base, or a clone()"
        )
    start(mesh)
    with trace.lock:
        if buffer.number >= 0 and not _is_input(buffer):
            assign(buffer, _constrained(buffer.number, buffer.spec, layout))
        elif meshes.spans_processes():
            _compare_once(buffer, layout)
        meshes.set_sharding(buffer, layout)
    return tensor


def _is_input(buffer: Buffer) -> bool:
    """Whether the trace has read the buffer's array and not written to the buffer."""
    pairs = zip(trace.parameters, trace.parameter_numbers, strict=True)
    return any(held is buffer and number == buffer.number for held, number in pairs)


def start(mesh: Mesh) -> None:
    """Makes `mesh` the mesh of this process; on one of several processes, they draw the same random numbers now on."""
    if meshes.active is not None and not meshes.replicas:
        return meshes.use(mesh)
    if meshes.replicas:
        execute.flush()  # with the collectives of separate processes
    meshes.use(mesh)
    _shard_optimizer_state()
    if meshes.spans_processes():
        same_values.one_stream()
    return None


@functools.cache
def _shard_optimizer_state() -> None:
    register_optimizer_step_post_hook(_shard_state)


_compared: set[tuple[Spec, NamedSharding]] = set()
"""Kinds of tensors that were compared between the processes before they were split."""


def _compare_once(buffer: Buffer, layout: NamedSharding) -> None:
    """Once split, values that were not the same in all processes cannot be told from those of `global_batch`."""
    kind = (buffer.spec, layout)
    if kind in _compared or not isinstance(buffer.array, jax.Array) or not buffer.array.is_fully_replicated:
        return
    with private_api.x64():
        same_values.compare([meshes.put(buffer.array)])
    _compared.add(kind)


def constrain(tensor: torch.Tensor, mesh: Mesh, spec: Sequence[Axis]) -> None:
    """Splits a result of the step along its first dimensions; XLA chooses for those that `spec` leaves out."""
    with trace.lock:
        buffer = tensor_io.buffer_of(tensor)
        whole = tensor.numel() == buffer.spec.size and tensor.is_contiguous()  # a linear layer's result is a view
        if buffer.number >= 0 and whole and not _is_input(buffer):
            free = [PartitionSpec.UNCONSTRAINED] * (tensor.dim() - len(spec))
            layout = NamedSharding(mesh, PartitionSpec(*spec, *free))
            assign(buffer, _constrained(buffer.number, buffer.spec, layout, tuple(tensor.shape)))


def _constrained(number: int, value_spec: Spec, layout: NamedSharding, shape: tuple[int, ...] | None = None) -> int:
    """The value `number` with a layout (of its elements in `shape`), as an operation of the step."""
    seen = value_spec.shape if shape is None else shape
    key = (value_spec, layout, seen)
    instruction = _constraints.get(key)
    if instruction is None:

        def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
            return [jax.lax.with_sharding_constraint(inputs[0].reshape(seen), layout).reshape(value_spec.shape)]

        instruction = _constraints[key] = Instruction("mark_sharding", emit, (value_spec,), 1)
    return record(instruction, number)


_constraints: dict[tuple[Spec, NamedSharding, tuple[int, ...]], Instruction] = instruction_cache()


def global_batch(batch: Any, mesh: Mesh, spec: Sequence[Axis]) -> Any:
    """Tensors over the whole mesh, of which each process gives its part: the rows that its devices get.

    In one process, or over axes that lie within each process, it is the same as an upload and `mark_sharding`.

    Args:
        batch: CPU tensors of this process in any containers; e.g. rows 0 to 7 in process 0 and 8 to 15 in process 1.
            Processes that hold the same part (their devices differ in other axes only) give the same values.
        mesh: from `make_mesh`.
        spec: as `mark_sharding`: ``("data",)`` joins the processes' rows.  Dimensions that it leaves out keep their
            extents.

    Returns:
        The same containers with tensors on the lazy device; a dimension that is split over processes has the sum of
        their extents.

    Raises:
        ValueError: as `mark_sharding`.
        DeviceError: a tensor that is not on the CPU, or another mesh than before.

    Example:
        >>> x, y = global_batch((x, y), mesh, ("data",))  # doctest: +SKIP
    """
    base.require_lazy("global_batch()")
    arguments.require("global_batch(mesh=...)", mesh, Mesh, "a mesh from xla_amp.make_mesh")
    start(mesh)

    def spread(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cpu":
            raise DeviceError(f"global_batch() expects tensors on the CPU, got one on {value.device}")
        # A process's part of several: JAX checks what it joins.
        extents = (mesh.size,) * value.dim() if meshes.spans_processes() else tuple(value.shape)
        layout = NamedSharding(mesh, _partition("global_batch", extents, mesh, spec))
        with private_api.x64():
            local = to_numpy(value.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())
            array = jax.make_array_from_process_local_data(layout, local)
        metrics.host_to_device += 1
        result = transfer.wrap(array)
        meshes.set_sharding(tensor_io.buffer_of(result), layout)
        return result

    return trees.tree_map(spread, batch)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that every device has whole, to be read on the host; of several processes, all call it.

    Reading a tensor that is split over processes (``.cpu()``, ``print``) raises: a process has only a part of it.

    Raises:
        DeviceError: a tensor of another device.

    Example:
        >>> full_tensor(logits).cpu()  # doctest: +SKIP
    """
    base.require_lazy("full_tensor()")
    arguments.require("full_tensor(tensor)", tensor, torch.Tensor, "a tensor of the device")
    if tensor.device.type != DEVICE_TYPE:
        raise DeviceError(f"full_tensor() expects a tensor on {DEVICE_TYPE!r}, got one on {tensor.device}")
    with torch.no_grad(), trace.lock:
        layout = meshes.default_placement()
        if not meshes.is_partitioned() or not isinstance(layout, NamedSharding):
            return tensor.detach().clone()
        number, value_spec = tensor_io.read(tensor)
        result = tensor_io.new_tensor(value_spec, _constrained(number, value_spec, layout))
        meshes.set_sharding(tensor_io.buffer_of(result), layout)
        return result


def _partition(call: str, shape: tuple[int, ...], mesh: Mesh, spec: Sequence[Axis]) -> PartitionSpec:
    if isinstance(spec, str) or not isinstance(spec, Sequence) or len(spec) > len(shape):
        raise ValueError(
            f"{call}(spec={spec!r}): expected at most one entry per dimension of shape {list(shape)}, "
            'e.g. ("data", None)'
        )
    named: list[str] = []
    for extent, entry in zip(shape, spec, strict=False):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.shape or axis in named:
                what = "repeats" if axis in named else "does not know"
                raise ValueError(f"{call}(spec={spec!r}): {what} the axis {axis!r}; axes: {list(mesh.shape)}")
            named.append(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if extent % parts:
            others = [dim for dim, size in enumerate(shape) if size % parts == 0 and size >= parts]
            where = f"split dimension {' or '.join(map(str, others))}, " if others else ""
            raise ValueError(
                f"{call}(spec={spec!r}): an extent of {extent} does not divide over {parts} devices; {where}pad "
                f"the tensor of shape {list(shape)} (a batch: drop_last=True or xla_amp.pad_to_bucket), or leave that "
                "dimension whole"
            )
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in spec))


def _shard_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not meshes.is_partitioned():
        return  # the mesh of a step that was exported
    for parameter, state in optimizer.state.items():
        if not tensor_io.is_lazy(parameter):
            continue
        layout = meshes.sharding_of(tensor_io.buffer_of(parameter))
        if layout is None:
            continue
        for value in state.values():
            if tensor_io.is_lazy(value) and value.shape == parameter.shape:
                buffer = tensor_io.buffer_of(value)
                if meshes.sharding_of(buffer) is None:
                    meshes.set_sharding(buffer, layout)
