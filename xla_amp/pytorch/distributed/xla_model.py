"""Functions of ``torch_xla.core.xla_model`` for both engines, under the same names.

On torch_xla, `torch_xla.launch` starts the processes; on the lazy device, `xla_amp.launch` or torchrun does.  A single
process has world size 1: collectives scale, and reduce nothing.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from xla_amp.common import arguments
from xla_amp.engines import base, devices
from xla_amp.errors import DeviceError
from xla_amp.pytorch.device import kind
from xla_amp.pytorch.device import xla_device as xla_device
from xla_amp.pytorch.device import xla_device_hw as xla_device_hw
from xla_amp.pytorch.distributed import gradients
from xla_amp.pytorch.distributed.xm_collectives import Groups
from xla_amp.torch_common import exchange
from xla_amp.torch_common.trees import tree_map
from xla_amp.training import held

__all__ = [
    "add_step_closure",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_world_size",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimizer_step",
    "rendezvous",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xrt_world_size",
]

# ---- devices ---------------------------------------------------------------------------------------------------------


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """XLA devices of this process, as strings; of one kind (``"TPU"``) if asked."""
    device = devices.engine().device()
    found = [str(device)] if devkind is None or kind(devkind) == xla_device_hw(device) else []
    return found[:max_devices]


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the XLA device."""
    return devices.is_xla(tensor.device.type)


def get_memory_info(device: Any = None) -> dict[str, int]:
    """Memory of the device in bytes: ``bytes_used``, and ``bytes_limit``, which is 0 if the platform has none.

    On a platform that does not count (XLA:CPU) the bytes of live arrays are counted.

    Raises:
        DeviceError: the platform counts nothing.
    """
    engine = devices.engine()
    engine.device()
    stats = engine.memory_stats()
    if "bytes_in_use" not in stats:
        raise DeviceError(f"get_memory_info(): XLA does not count memory on the platform {engine.platform()!r}")
    return {"bytes_used": stats["bytes_in_use"], "bytes_limit": stats.get("bytes_limit", 0)}


# ---- processes -------------------------------------------------------------------------------------------------------


def xrt_world_size(defval: int = 1) -> int:
    """Number of processes."""
    return base.processes().world_size()


get_world_size = xrt_world_size


def get_ordinal(defval: int = 0) -> int:
    """Rank of this process, from 0."""
    return base.processes().ordinal()


def get_local_ordinal(defval: int = 0) -> int:
    """Rank of this process on its host, from 0."""
    return base.processes().local_ordinal()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this process is the first, of its host or of all."""
    return (get_local_ordinal() if local else get_ordinal()) == 0


def master_print(*args: Any, fd: IO[str] | None = None, local: bool = False, flush: bool = False) -> None:
    """``print`` on the first process only; to standard output unless `fd` is given."""
    if is_master_ordinal(local):
        stream = sys.stdout if fd is None else fd
        stream.write(" ".join(map(str, args)) + "\n")
        if flush:
            stream.flush()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for all processes at `tag` and returns the payload of each."""
    return base.processes().rendezvous(tag, payload, replicas)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """``reduce_fn`` of the list of all processes' data, which travel as `torch.save` writes them.

    Args:
        tag: the same in all processes.
        data: numbers, texts, bytes, tensors, NumPy arrays and scalars, and lists, tuples, sets and dictionaries of
            them.
        reduce_fn: of a list, in the order of ranks.

    Raises:
        TypeError: data of another type, which is named.
    """
    return reduce_fn(list(map(exchange.decode, rendezvous(tag, exchange.encode(data, f"mesh_reduce({tag!r})")))))


# ---- steps -----------------------------------------------------------------------------------------------------------


class _Closures:
    """Closures that wait for the end of the step, and those that run on the thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[..., Any], tuple[Any, ...], bool]] = []
        self.running: list[Future[Any]] = []

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for closure, args, beside in waiting:
            if beside:
                self.running.append(_worker().submit(closure, *args))
            else:
                closure(*args)
        done, self.running = [f for f in self.running if f.done()], [f for f in self.running if not f.done()]
        for future in done:
            future.result()  # an exception of a closure surfaces here


_closures = _Closures()


@functools.cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="xla_amp-step-closure")


def mark_step(wait: bool = False) -> None:
    """Ends the step: runs what was recorded as one XLA program, then the step closures.

    Args:
        wait: also wait until the device has finished.
    """
    devices.engine().sync(wait)
    _closures.run()


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Calls ``closure(*args)`` at the end of the step (`mark_step`), when its tensors have values.

    Args:
        closure: e.g. a function that logs a loss.
        args: its arguments, tensors of this step among them.
        run_async: call it on a separate thread, one closure after the other, so that the loop does not wait; a later
            `mark_step` raises its exception.
    """
    arguments.require_function("add_step_closure(closure)", closure)
    _closures.waiting.append((closure, tuple(args), run_async))


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Runs what was recorded and waits until the device has finished."""
    mark_step(wait=True)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Reduces the gradients over all processes and steps the optimizer.

    Args:
        optimizer: any optimizer.
        barrier: end the step here (`mark_step`), where no `DeviceLoader` does.
        optimizer_args: keyword arguments of ``optimizer.step``, e.g. ``{"found_inf": flag}``.
        groups: as `all_reduce`.
        pin_layout: as `all_reduce`.
        dtype: as `reduce_gradients`.

    Returns:
        What ``optimizer.step`` returns.
    """
    gradients.reduce_gradients(optimizer, groups, pin_layout, dtype=dtype)
    result = optimizer.step(**dict(optimizer_args or {}))
    if barrier:
        mark_step()
    return result


# ---- random numbers and files ----------------------------------------------------------------------------------------


def set_rng_state(seed: int | torch.Tensor, device: Any = None) -> None:
    """Seeds the device's random generator, or restores a state from `get_rng_state`."""
    engine = devices.engine()
    if isinstance(seed, torch.Tensor):
        engine.set_rng_state(seed)
    else:
        arguments.require("set_rng_state(seed)", seed, int, "a number, or a state from get_rng_state")
        engine.manual_seed(int(seed))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the device's random generator, for `set_rng_state`."""
    return devices.engine().get_rng_state()


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` with XLA tensors stored as CPU tensors, so that the file loads anywhere; waits for the device.

    A file at a path is replaced when the new one is complete: a process that is ended earlier leaves the old one.

    Args:
        data: any pytree: tensors in nested containers, e.g. a ``state_dict()``.
        file_or_path: as `torch.save` takes it.
        master_only: only the first process writes.
        global_master: the first of all processes instead of the first of each host.
    """
    if not hasattr(file_or_path, "write"):
        arguments.require("save(file_or_path)", file_or_path, arguments.PATH, "a path or an open file")
    if master_only and not is_master_ordinal(local=not global_master):
        return
    if not isinstance(file_or_path, str | os.PathLike):
        torch.save(_to_cpu(data), file_or_path)
        return
    partial = f"{os.fspath(file_or_path)}.{os.getpid()}.partial"
    try:
        torch.save(_to_cpu(data), partial)
        os.replace(partial, file_or_path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _to_cpu(data: Any) -> Any:
    copies: dict[Any, torch.Tensor] = {}  # one CPU tensor per XLA tensor, so that tied weights stay tied
    parameters: dict[int, torch.nn.Parameter] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_xla_tensor(value):
            return value
        key = held.part(value)
        if key not in copies:
            copies[key] = value.detach().cpu()
        if not isinstance(value, torch.nn.Parameter):
            return copies[key]
        if id(value) not in parameters:
            parameters[id(value)] = torch.nn.Parameter(copies[key], value.requires_grad)
        return parameters[id(value)]

    return tree_map(move, data)


def send_cpu_data_to_device(data: Any, device: Any) -> Any:
    """A pytree with its CPU tensors on `device`."""
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, data)
