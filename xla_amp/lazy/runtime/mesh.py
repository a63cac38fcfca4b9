"""Several devices as one: values laid out over a mesh, one program for all of them (SPMD).

While a mesh is in use every array lives on all its devices, whole on each unless its buffer asks for something else.
XLA partitions the program after the shardings of its inputs and puts the collectives in; what overwrites a value gets
that value's sharding, so that a training step leaves everything where it was.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xla_amp.errors import DeviceError
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.runtime import pjrt

AXIS = "replica"
"""The only axis of a mesh of processes."""
active: Mesh | None = None
replicas = False
"""Whether the mesh is made of processes that each have values of their own (`processes`)."""
ended: Callable[[], Sequence[str]] | None = None
"""Names the processes that are known to have ended, where there are several (`processes`)."""
_CERTAINTY = 1.0
"""Seconds until the system shows that a process whose connections are closed has ended."""
_shardings: weakref.WeakKeyDictionary[Buffer, NamedSharding] = weakref.WeakKeyDictionary()


def use(mesh: Mesh) -> None:
    """Lays everything from now on out over `mesh`; a process has one.

    Raises:
        DeviceError: another one is in use, or it has devices of another platform.
    """
    global active
    if active is not None and active != mesh:
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
    active = mesh


def use_processes() -> None:
    """Makes every process a replica: one device of each, values of their own, the same program."""
    global active, replicas
    chosen = {device.process_index: device for device in reversed(jax.devices(pjrt.jax_device().platform))}
    active = Mesh(np.array([chosen[index] for index in sorted(chosen)]), (AXIS,))
    replicas = True


def is_partitioned() -> bool:
    """Whether XLA splits programs over the devices of the mesh: not without one, nor among processes."""
    return active is not None and not replicas


def describe(mesh: Mesh) -> str:
    """``{'data': 4, 'model': 2}``."""
    return str(dict(mesh.shape))


def put(value: np.ndarray | jax.Array) -> jax.Array:
    """A value of this process on the device or the mesh (with 64-bit types enabled)."""
    if not replicas:
        return jax.device_put(value, default_placement())
    local = jax.device_put(value, pjrt.jax_device())
    return jax.make_array_from_single_device_arrays(local.shape, default_placement(), [local])  # type: ignore[arg-type]


def default_placement() -> jax.Device | NamedSharding:
    """Where a value goes that nobody has laid out."""
    return pjrt.jax_device() if active is None else NamedSharding(active, PartitionSpec())


def set_sharding(buffer: Buffer, sharding: NamedSharding) -> None:
    """Gives a buffer a sharding: its array now, and whatever it gets later."""
    _shardings[buffer] = sharding
    if isinstance(buffer.array, jax.Array):
        buffer.array = _moved(buffer.array, sharding)


def _moved(array: jax.Array, where: jax.Device | NamedSharding) -> jax.Array:
    with private_api.x64():  # without it int64 becomes int32 on the way
        return jax.device_put(array, where)


def sharding_of(buffer: Buffer) -> NamedSharding | None:
    """The sharding of the buffer (`set_sharding`), or None."""
    return _shardings.get(buffer)


def move_to_mesh(buffers: Iterable[Buffer]) -> None:
    """Puts values from before the mesh on it."""
    devices = default_placement().device_set  # type: ignore[union-attr]  # called with a mesh only
    for buffer in buffers:
        if isinstance(buffer.array, jax.Array) and buffer.array.sharding.device_set != devices:
            with private_api.x64():
                buffer.array = put(buffer.array)


def output_shardings(targets: Sequence[Buffer], overwritten: int) -> tuple[jax.sharding.Sharding | None, ...]:
    """The sharding of each target, None where XLA may choose; the first `overwritten` ones keep what they have."""
    return tuple(
        sharding_of(buffer) or (buffer.array.sharding if index < overwritten else None)
        for index, buffer in enumerate(targets)
    )


def ended_peers() -> str:
    """To be said after an error of the device: which other processes have ended; empty for one process."""
    if ended is None:
        return ""
    until = time.monotonic() + _CERTAINTY
    while not (gone := ended()) and time.monotonic() < until:
        time.sleep(0.05)
    if gone:
        return f" ({' and '.join(gone)} has ended)"
    return " (another process has ended or left, if this is about a connection)"
