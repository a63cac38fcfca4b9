"""The mesh of devices that a program runs on (SPMD), and the shardings of buffers over it.

With a mesh every array is on all its devices, replicated unless its buffer has another sharding.  XLA partitions the
program by the shardings of its inputs and inserts the collectives.  A value that overwrites another one gets its
sharding, so a training step keeps all shardings.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xla_amp.common import events
from xla_amp.errors import DeviceError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.programs import pjrt

AXIS = "replica"
"""The only axis of a mesh of processes."""
active: Mesh | None = None
replicas = False
"""Whether each process of the mesh has separate values (`xla_amp.lazy.processes`)."""
_shardings: weakref.WeakKeyDictionary[Buffer, NamedSharding] = weakref.WeakKeyDictionary()


@events.Point
def ended() -> Sequence[str]:  # type: ignore[empty-body]
    """Asks for what processes have told that ended; a single process has no listener."""


def use(mesh: Mesh) -> None:
    """Makes `mesh` the mesh of this process, which has only one; processes that were replicas form one program.

    Raises:
        DeviceError: another mesh is in use, its devices are of another platform, or it leaves out a process.
    """
    global active, replicas
    if active is not None and active != mesh and not replicas:
        raise DeviceError(
            f"this process lays its values out over {describe(active)} and cannot change to {describe(mesh)}; use one "
            "mesh with all the axes"
        )
    platform = mesh.devices.flat[0].platform
    if platform != pjrt.jax_device().platform:
        raise DeviceError(
            f"the mesh is made of {platform} devices and lazy tensors live on {pjrt.jax_device().platform}; make it "
            "with xla_amp.make_mesh()"
        )
    if replicas:
        absent = {device.process_index for device in active.devices.flat} - {  # type: ignore[union-attr]
            device.process_index for device in mesh.devices.flat
        }
        if absent:
            raise DeviceError(
                f"the mesh {describe(mesh)} has no device of the processes {sorted(absent)}, which run the same "
                "program; make it with xla_amp.make_mesh()"
            )
    active, replicas = mesh, False


def use_processes() -> None:
    """Makes every process a replica: one device of each process, separate values, the same program."""
    global active, replicas
    chosen = {device.process_index: device for device in reversed(jax.devices(pjrt.jax_device().platform))}
    active = Mesh(np.array([chosen[index] for index in sorted(chosen)]), (AXIS,))
    replicas = True
    local = jax.local_devices(backend=pjrt.jax_device().platform)
    if len(local) > 1 and pjrt.platform() != "cpu":
        events.warn(
            f"this process trains on one of its {len(local)} {local[0].platform} devices; start one process for each",
        )


def is_partitioned() -> bool:
    """Whether XLA partitions programs over the mesh; False without a mesh and for replicas."""
    return active is not None and not replicas


def describe(mesh: Mesh) -> str:
    """``{'data': 4, 'model': 2}``."""
    return str(dict(mesh.shape))


def spans_processes() -> bool:
    """Whether XLA partitions programs over devices of several processes: all of them must run each program."""
    return is_partitioned() and not default_placement().is_fully_addressable


def put(value: np.ndarray | jax.Array) -> jax.Array:
    """Puts a value of this process on the device or the mesh; call with 64-bit types enabled.

    On a mesh of several processes the value must be the same in all of them.
    """
    if spans_processes():
        return spread(value, NamedSharding(active, PartitionSpec()))  # type: ignore[arg-type]
    if not replicas:
        placed: jax.Array = jax.device_put(_local(value), default_placement())
        return placed
    local = jax.device_put(value, pjrt.jax_device())
    return jax.make_array_from_single_device_arrays(local.shape, default_placement(), [local])


def spread(value: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array over a mesh of several processes, from a value that each has whole; nothing is sent."""
    whole = _local(value)
    # `jax.device_put` would compare the value in all processes with a separate program, at each upload.
    array: jax.Array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    return array


def _local(value: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """The value as this process has it."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if not value.is_fully_replicated:
            raise DeviceError(f"this process has only a part of a value of shape {list(value.shape)}")
        part: jax.Array = value.addressable_shards[0].data
        return part
    return value


def default_placement() -> jax.Device | NamedSharding:
    """Device or sharding of a value whose buffer has no sharding."""
    return pjrt.jax_device() if active is None else NamedSharding(active, PartitionSpec())


def set_sharding(buffer: Buffer, sharding: NamedSharding) -> None:
    """Sets the sharding of a buffer, for its present array and later ones."""
    _shardings[buffer] = sharding
    if isinstance(buffer.array, jax.Array):
        buffer.store(_moved(buffer.array, sharding))


def _moved(array: jax.Array, where: NamedSharding) -> jax.Array:
    with private_api.x64():  # otherwise int64 becomes int32
        if spans_processes() and (array.is_fully_addressable or array.is_fully_replicated):
            return spread(array, where)
        moved: jax.Array = jax.device_put(array, where)
        return moved


def sharding_of(buffer: Buffer) -> NamedSharding | None:
    """The sharding of the buffer (`set_sharding`), or None."""
    return _shardings.get(buffer)


def move_to_mesh(buffers: Iterable[Buffer]) -> None:
    """Moves arrays from before the mesh to the mesh."""
    devices = default_placement().device_set  # called with a mesh only
    for buffer in buffers:
        if isinstance(buffer.array, jax.Array) and buffer.array.sharding.device_set != devices:
            with private_api.x64():
                buffer.store(put(buffer.array))


def output_shardings(targets: Sequence[Buffer], overwritten: int) -> tuple[jax.sharding.Sharding | None, ...]:
    """The sharding of each target, None if XLA may choose; the first `overwritten` ones keep their sharding."""
    return tuple(
        sharding_of(buffer) or (buffer.array.sharding if index < overwritten else None)
        for index, buffer in enumerate(targets)
    )


def ended_peers() -> str:
    """Suffix for device errors that names peers that have ended; empty for a single process."""
    if not ended.listeners:
        return ""
    gone = [name for names in ended() for name in names]
    if gone:
        return f" ({' and '.join(gone)})"
    return " (another process has ended or left, if this is about a connection)"
