"""Names of PyTorch/XLA that `xla_amp.xla_model` does not have, for scripts written for torch_xla.

One module stands for several of torch_xla's: ``from xla_amp import torch_xla``, ``import xla_amp.torch_xla as xr``
(``torch_xla.runtime``), ``as xs`` (``distributed.spmd``), ``as pl`` (``distributed.parallel_loader``), ``as met``
(``debug.metrics``).  docs/migration.md has the table.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from jax.sharding import Mesh as _JaxMesh

from xla_amp.backends import base
from xla_amp.common import config
from xla_amp.errors import DeviceError
from xla_amp.lazy.capture.compiled_step import compile as _compile
from xla_amp.lazy.distributed import launch as _launching
from xla_amp.lazy.distributed import spmd
from xla_amp.pytorch.data.loader import MpDeviceLoader
from xla_amp.pytorch.distributed import xla_model

__all__ = [
    "Mesh",
    "MpDeviceLoader",
    "compile",
    "device",
    "device_type",
    "global_ordinal",
    "launch",
    "local_ordinal",
    "manual_seed",
    "mark_sharding",
    "metrics_report",
    "sync",
    "use_spmd",
    "world_size",
]

device = xla_model.xla_device
sync = xla_model.mark_step
manual_seed = xla_model.set_rng_state
world_size = xla_model.get_world_size
global_ordinal = xla_model.get_ordinal
local_ordinal = xla_model.get_local_ordinal
metrics_report = base.metrics.report

_Function = TypeVar("_Function", bound=Callable[..., Any])


def device_type() -> str:
    """``"CPU"``, ``"CUDA"`` or ``"TPU"``; starts the device."""
    return xla_model.xla_device_hw(xla_model.xla_device())


@overload
def compile(f: _Function, full_graph: bool = False) -> _Function: ...
@overload
def compile(f: None = None, full_graph: bool = False) -> Callable[[_Function], _Function]: ...
def compile(f: Callable[..., Any] | None = None, full_graph: bool = False) -> Any:
    """`xla_amp.compile` of a step, as a function or a decorator.

    Args:
        f: the step.
        full_graph: raise where the step cannot be replayed.
    """
    return _compile(f, strict=full_graph)


def launch(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> None:
    """Runs ``fn(index, *args)`` in one process for each device of this machine; `xla_amp.launch` takes the number.

    With one device it runs in this process, and so it does under torchrun, which has made the processes.

    Args:
        fn: importable by name.
        args: picklable.
        start_method: ``"spawn"``.
        debug_single_process: use one device, in this process.

    Raises:
        ValueError: another `start_method`.
        DeviceError: the platform has no device.
    """
    if start_method != "spawn":
        raise ValueError(f"launch(start_method={start_method!r}): expected 'spawn'; XLA does not survive a fork")
    base.require_lazy("xla_amp.torch_xla.launch()", "torch_xla.launch")
    if config.process() is not None:
        fn(xla_model.get_local_ordinal(), *args)
        return
    count = 1 if debug_single_process else _devices_here()
    if count == 1:
        fn(0, *args)
    else:
        _launching.launch(fn, count, args)


def _devices_here() -> int:
    """Devices of this machine, counted in another process: this one must not take them from those to be started."""
    program = (
        "import jax\nfrom xla_amp.lazy.programs import pjrt\n"
        "print(len(jax.local_devices(backend=pjrt.jax_device().platform)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"launch(): counting the devices failed: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.split()[-1])


def use_spmd(auto: bool = False) -> None:
    """Does nothing: the first `mark_sharding` makes this an SPMD program.

    Raises:
        ValueError: `auto`.
    """
    if auto:
        raise ValueError("use_spmd(auto=True): nothing chooses shardings; xla_amp.shard(model, recipe=...) has recipes")


def Mesh(  # torch_xla's name, of a class there
    device_ids: Sequence[int] | np.ndarray, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None
) -> _JaxMesh:
    """The mesh of `xla_amp.make_mesh`, with torch_xla's arguments.

    Args:
        device_ids: 0 to n-1 in this order, as ``np.arange(n)``; which device is where is chosen by the interconnect.
        mesh_shape: extent of each axis.
        axis_names: of each axis; None is ``"axis_0"``, ``"axis_1"``, ...

    Raises:
        ValueError: the devices are in another order, or the arguments have different lengths.
        DeviceError: the extents do not fit the number of devices.
    """
    names = [f"axis_{index}" for index in range(len(mesh_shape))] if axis_names is None else list(axis_names)
    if list(np.ravel(device_ids)) != list(range(np.size(device_ids))):
        raise ValueError(
            f"Mesh(device_ids={list(np.ravel(device_ids))}): expected 0 to n-1 in order, np.arange(n); for another "
            "order pass a jax.sharding.Mesh to mark_sharding"
        )
    if len(names) != len(mesh_shape) or len(set(names)) != len(names):
        raise ValueError(f"Mesh(mesh_shape={tuple(mesh_shape)}, axis_names={names}): expected one name for each axis")
    return spmd.make_mesh(dict(zip(names, map(int, mesh_shape), strict=True)))


def mark_sharding(
    t: torch.Tensor, mesh: _JaxMesh, partition_spec: Sequence[str | int | Sequence[str | int] | None]
) -> torch.Tensor:
    """`xla_amp.mark_sharding`, whose axes may also be numbers."""

    def named(entry: Any) -> Any:
        if isinstance(entry, int):
            return mesh.axis_names[entry]
        return tuple(map(named, entry)) if isinstance(entry, (tuple, list)) else entry

    return spmd.mark_sharding(t, mesh, [named(entry) for entry in partition_spec])


def __dir__() -> list[str]:
    return __all__
