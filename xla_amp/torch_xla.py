"""Names of PyTorch/XLA that `xla_amp.xla_model` does not have, for scripts written for torch_xla.

One module stands for several of torch_xla's: ``from xla_amp import torch_xla``, ``import xla_amp.torch_xla as xr``
(``torch_xla.runtime``), ``as xs`` (``distributed.spmd``), ``as pl`` (``distributed.parallel_loader``), ``as xmp``
(``distributed.xla_multiprocessing``), ``as met`` (``debug.metrics``), ``as xp`` (``debug.profiler``), ``as xu``
(``utils.utils``), ``as test_utils`` (``test.test_utils``).  docs/lists/names.md has the table.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast, overload

import jax
import numpy as np
import torch
from jax.profiler import StepTraceAnnotation as StepTrace
from jax.profiler import TraceAnnotation as Trace
from jax.sharding import Mesh as _JaxMesh

from xla_amp.common import config
from xla_amp.common import torch_xla_names as _names
from xla_amp.engines import base
from xla_amp.errors import DeviceError
from xla_amp.lazy.capture.compiled_step import compile as _compile
from xla_amp.lazy.layouts import spmd
from xla_amp.lazy.processes import launch as _launching
from xla_amp.lazy.programs import mesh as _meshes
from xla_amp.pytorch.data.loader import DeviceLoader
from xla_amp.pytorch.distributed import xla_model
from xla_amp.pytorch.distributed.script_helpers import (
    SampleGenerator,
    close_summary_writer,
    get_summary_writer,
    now,
    print_test_update,
    print_training_update,
    write_to_summary,
)

__all__ = [
    "Mesh",
    "MpDeviceLoader",
    "SampleGenerator",
    "StepTrace",
    "Trace",
    "addressable_device_count",
    "addressable_runtime_device_count",
    "close_summary_writer",
    "compile",
    "device",
    "device_count",
    "device_type",
    "get_summary_writer",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_count",
    "is_bf16_supported",
    "is_spmd",
    "launch",
    "local_device_count",
    "local_ordinal",
    "manual_seed",
    "mark_sharding",
    "metrics_report",
    "now",
    "print_test_update",
    "print_training_update",
    "process_count",
    "process_index",
    "short_metrics_report",
    "spawn",
    "start_server",
    "sync",
    "use_spmd",
    "using_pjrt",
    "world_size",
    "write_to_summary",
]

device = xla_model.xla_device
sync = xla_model.mark_step
manual_seed = xla_model.set_rng_state
world_size = xla_model.get_world_size
global_ordinal = xla_model.get_ordinal
local_ordinal = xla_model.get_local_ordinal
metrics_report = base.metrics.report
process_index = xla_model.get_ordinal
process_count = xla_model.get_world_size

_Function = TypeVar("_Function", bound=Callable[..., Any])


def device_type() -> str:
    """``"CPU"``, ``"CUDA"`` or ``"TPU"``; starts the device."""
    return xla_model.xla_device_hw(xla_model.xla_device())


def short_metrics_report(counter_names: Sequence[str] = (), metric_names: Sequence[str] = ()) -> str:
    """One line a counter of `xla_amp.metrics`: those named, or all."""
    wanted = {*counter_names, *metric_names}
    return "\n".join(f"{name}: {count}" for name, count in base.metrics().items() if not wanted or name in wanted)


def start_server(port: int) -> Any:
    """`jax.profiler.start_server`; keep the result as long as profiles are to be taken."""
    return jax.profiler.start_server(port)


def using_pjrt() -> bool:
    """True."""
    return True


is_bf16_supported = using_pjrt


def is_spmd() -> bool:
    """Whether this is an SPMD program: a tensor has been marked."""
    return _meshes.is_partitioned()


def global_runtime_device_count() -> int:
    """The number of devices of all processes: those of `xla_amp.make_mesh`."""
    xla_model.xla_device()
    return len(spmd.all_devices())


def addressable_runtime_device_count() -> int:
    """The number of devices of this process."""
    return sum(device.process_index == jax.process_index() for device in spmd.all_devices())


global_device_count = global_runtime_device_count
addressable_device_count = local_device_count = device_count = addressable_runtime_device_count


class MpDeviceLoader(DeviceLoader):
    """`xla_amp.DeviceLoader` with torch_xla's arguments.

    Args:
        loader: an iterable of batches.
        device: where they go; None is the XLA device.
        device_prefetch_size: batches on the device ahead of the one in use.
        loader_prefetch_size: ignored; one thread reads the loader and uploads.
        host_to_device_transfer_threads: ignored.

    Raises:
        ValueError: `input_sharding`, or `batches_per_execution` other than 1.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any = None,
        *,
        device_prefetch_size: int = 2,
        loader_prefetch_size: int = 16,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
        batches_per_execution: int = 1,
    ) -> None:
        if input_sharding is not None:
            raise ValueError(
                "MpDeviceLoader(input_sharding=...): xla_amp.shard(model, mesh) splits batches; for other layouts call "
                "xla_amp.global_batch or mark_sharding on the batch"
            )
        if batches_per_execution != 1:
            raise ValueError(
                f"MpDeviceLoader(batches_per_execution={batches_per_execution}): each request for a batch ends the "
                "step; iterate over the loader and pass several batches to one step"
            )
        super().__init__(loader, device, device_prefetch_size)


@overload
def compile(f: _Function, full_graph: bool = False) -> _Function: ...
@overload
def compile(f: None = None, full_graph: bool = False) -> _Block: ...
def compile(f: Callable[..., Any] | None = None, full_graph: bool = False) -> Any:
    """`xla_amp.compile` of a step, as a function or a decorator; without a step, also a ``with`` block: one program.

    Args:
        f: the step.
        full_graph: raise where the step cannot be replayed.
    """
    return _Block(full_graph) if f is None else _compile(f, strict=full_graph)


class _Block:
    """``compile()`` without a step: a decorator, or a block of code that `sync` begins and ends."""

    def __init__(self, full_graph: bool) -> None:
        self._full_graph = full_graph

    def __call__(self, f: _Function) -> _Function:
        return cast(_Function, _compile(f, strict=self._full_graph))

    def __enter__(self) -> None:
        if self._full_graph:
            raise TypeError("with torch_xla.compile(full_graph=True): a block is recorded; write it above a function")
        sync()

    def __exit__(self, *_: object) -> None:
        sync()


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


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """`launch`, with the arguments of ``xmp.spawn``.

    Args:
        fn: importable by name.
        args: picklable.
        nprocs: 1 to run in this process; None for one process for each device; another number as `xla_amp.launch`.
        join: True.
        daemon: ignored.
        start_method: ``"spawn"``.

    Raises:
        ValueError: another `start_method`, or ``join=False``.
    """
    if not join:
        raise ValueError("spawn(join=False): expected True; start the processes by torchrun to go on beside them")
    if nprocs in (None, 1) or config.process() is not None or start_method != "spawn":
        launch(fn, args, start_method, debug_single_process=nprocs == 1)
    else:
        _launching.launch(fn, int(nprocs or 1), args)


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


def __getattr__(name: str) -> object:
    raise _names.missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__
