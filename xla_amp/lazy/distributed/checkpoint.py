"""Checkpoints of sharded tensors: written by shard, read into any other sharding.

A checkpoint is a folder: the arrays, which Orbax writes, and ``structure.pt``, which holds all other values and a meta
tensor for each array.  For replicated values (one device, or processes of `xla_amp.launch`) `xla_amp.xla_model.save`
is enough and needs no Orbax.

On a mesh of several processes all of them call these functions with the same arguments, on a folder that all of them
reach; each writes and reads its own shards.

    checkpoint.save({"model": model, "optimizer": optimizer, "scaler": scaler, "step": 100}, "run/step-100")
    saving = checkpoint.save_async(...)  # goes on while the file system writes; saving.wait() raises what went wrong
    step = checkpoint.load({"model": model, "optimizer": optimizer, "scaler": scaler}, "run/step-100")["step"]
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding
from torch.optim import Optimizer
from torch.utils import _pytree

from xla_amp import config
from xla_amp.backends import devices
from xla_amp.errors import DeviceError, FileError, MissingLibraryError
from xla_amp.lazy import private_api
from xla_amp.lazy.distributed import processes
from xla_amp.lazy.dtypes import TO_NUMPY
from xla_amp.lazy.runtime import mesh
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_ARRAYS, _STRUCTURE = "arrays", "structure.pt"


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a checkpoint, each shard from its device; the folder appears when it is complete.

    Args:
        state: by name, objects with ``state_dict()`` and ``load_state_dict()`` (models, optimizers, scalers,
            schedules), or values that `torch.load` reads with ``weights_only`` (tensors, numbers, texts, containers).
        path: a folder that does not exist yet, e.g. ``run/step-100``.

    Raises:
        FileError: `path` exists, or cannot be written.
        DeviceError: in one of several processes with separate values (`xla_amp.xla_model.save` is for them).
        MissingLibraryError: Orbax is not installed.
    """
    _begin("save", state, path)()


class Saving:
    """A checkpoint that is being written (`save_async`)."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(finish,), name="xla_amp-checkpoint")
        self._thread.start()  # no daemon: Python waits for it at exit

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is written, or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the folder is there.

        Raises:
            FileError: it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


_newest: list[Saving] = []
"""The last `Saving`: one is written at a time."""


def save_async(state: Mapping[str, Any], path: str | os.PathLike[str]) -> Saving:
    """`save` that returns when the values are on the host, and writes them while the next steps run.

    A checkpoint that is still being written is waited for first; if it failed, its error is raised here.

    Args:
        state: as `save`.
        path: as `save`.

    Returns:
        An object with ``wait()`` and ``done()``.

    Raises:
        FileError: `path` exists, or the checkpoint before could not be written.
        DeviceError, MissingLibraryError: as `save`.
    """
    while _newest:
        _newest.pop().wait()
    saving = Saving(_begin("save_async", state, path))
    _newest.append(saving)
    return saving


def _begin(call: str, state: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[], None]:
    """Copies the values to the host and starts to write them; the result finishes the checkpoint."""
    orbax = _orbax()
    _one_value(call)
    target = Path(path).absolute()
    if target.exists():
        raise FileError(f"checkpoint.{call}({str(path)!r}): it exists; give each checkpoint a separate name")
    arrays: dict[str, jax.Array] = {}
    written: dict[Any, torch.Tensor] = {}

    def detach(value: Any) -> Any:
        if not _is_lazy(value):
            return value
        storage = value.untyped_storage()
        key = (storage.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in written:  # of tied weights only the first is written; the file has one meta tensor for all
            written[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if value.numel():  # Orbax writes no empty arrays
                arrays[str(len(arrays))] = _twin(tensor_io.array_of(value.detach()))
        return written[key]

    structure = _pytree.tree_map(detach, {name: _state_of(value) for name, value in state.items()})
    first, together = processes.ordinal() == 0, mesh.spans_processes()
    number = next(_numbers)
    partial = target.with_name(f"{target.name}.{'all' if together else os.getpid()}.partial")
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was ended
            partial.mkdir(parents=True)
            torch.save(structure, partial / _STRUCTURE)
        _meet(f"{number}/begin")
        with private_api.x64():
            writer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())
            writer.save(partial / _ARRAYS, args=orbax.args.PyTreeSave({"arrays": arrays}))
    except (OSError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise FileError(f"checkpoint.{call}({str(path)!r}): {error}") from error

    def finish() -> None:
        try:
            with writer:
                writer.wait_until_finished()
            _meet(f"{number}/written")
            if first:
                partial.rename(target)
            _meet(f"{number}/end")
        except OSError as error:
            raise FileError(f"checkpoint.{call}({str(path)!r}): {error}") from error
        finally:
            if first:
                shutil.rmtree(partial, ignore_errors=True)

    return finish


_numbers = itertools.count()


def _twin(array: jax.Array) -> jax.Array:
    """The array as another object: a reference to `array` would keep the next step from reusing its memory."""
    if mesh.spans_processes() and array.sharding.device_set != mesh.default_placement().device_set:
        with private_api.x64():
            array = mesh.put(array)
    shards = [shard.data for shard in array.addressable_shards]
    twin: jax.Array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return twin


def _meet(what: str) -> None:
    """Waits for all processes of the mesh; on any thread."""
    client = private_api.coordinator()
    if not mesh.spans_processes() or client is None:
        return
    try:
        client.wait_at_barrier(f"xla_amp/checkpoint/{what}", 1000 * config.timeout())
    except Exception as error:
        raise FileError(f"another process did not write its part of the checkpoint: {error}") from error


def load(state: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint into objects; their tensors keep their current shardings, whatever those at `save` were.

    An optimizer's state gets the shardings of its parameters: mark those first.

    Args:
        state: by name, what to read into: objects with ``load_state_dict()``, or tensors (overwritten).  The
            result has the values for other objects and names.
        path: what `save` wrote.

    Returns:
        The checkpoint's values that were not read into an object.

    Raises:
        FileError: there is no complete checkpoint.
        KeyError: the checkpoint lacks a name.
        DeviceError: in one of several processes with separate values.
        MissingLibraryError: Orbax is not installed.
    """
    orbax = _orbax()
    devices.engine().device()
    _one_value("load")
    folder = Path(path).absolute()
    if not (folder / _STRUCTURE).is_file():
        raise FileError(f"checkpoint.load({str(path)!r}): there is no complete checkpoint")
    structure: dict[str, Any] = torch.load(folder / _STRUCTURE, map_location="cpu", weights_only=True)
    if missing := [name for name in state if name not in structure]:
        raise KeyError(f"checkpoint.load({str(path)!r}): it holds {list(structure)}, and nothing named {missing}")
    leaves, tree = _pytree.tree_flatten_with_path(structure)
    layouts = {name: _layouts(value) for name, value in state.items()}
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    marked: dict[int, Any] = {}
    for keys, leaf in leaves:
        if _is_array(leaf) and id(leaf) not in marked:
            where: Any = keys
            find: Callable[[tuple[Any, ...], torch.Tensor], Any] = layouts.get(where[0].key, _unsharded)
            layout = find(where[1:], leaf)
            home = mesh.default_placement()
            sharding = layout or (SingleDeviceSharding(home) if isinstance(home, jax.Device) else home)
            with private_api.x64():
                shape, dtype = tuple(leaf.shape), TO_NUMPY[leaf.dtype]
                wanted[str(len(marked))] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            marked[id(leaf)] = layout
    with private_api.x64(), orbax.PyTreeCheckpointer() as reader:
        arguments = {
            name: orbax.ArrayRestoreArgs(sharding=struct.sharding, dtype=struct.dtype)
            for name, struct in wanted.items()
        }
        arrays = reader.restore(
            folder / _ARRAYS, orbax.args.PyTreeRestore({"arrays": wanted}, restore_args={"arrays": arguments})
        )["arrays"]
    read = dict(zip(marked, map(transfer.wrap, (arrays[name] for name in wanted)), strict=True))
    for key, layout in marked.items():
        if layout is not None:
            mesh.set_sharding(tensor_io.buffer_of(read[key]), layout)
    values = [_read(leaf, read) for _, leaf in leaves]
    loaded: dict[str, Any] = _pytree.tree_unflatten(values, tree)
    for name, value in state.items():
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(loaded.pop(name))
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(loaded.pop(name))
    return loaded


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    found = [path.parent for path in Path(folder).glob(f"*/{_STRUCTURE}") if path.parent.suffix != ".partial"]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _is_lazy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def _is_array(leaf: Any) -> bool:
    """Whether the arrays of a checkpoint hold the value of this leaf of its structure."""
    return isinstance(leaf, torch.Tensor) and leaf.is_meta and leaf.numel() > 0


def _read(leaf: Any, read: Mapping[int, torch.Tensor]) -> Any:
    """The value of a leaf of a checkpoint's structure; `read` has those that are arrays, by the leaf's id."""
    if _is_array(leaf):
        return read[id(leaf)]
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=DEVICE_TYPE)
    return leaf


def _unsharded(where: tuple[Any, ...], leaf: torch.Tensor) -> None:
    return None


def _layouts(value: Any) -> Callable[[tuple[Any, ...], torch.Tensor], Any]:
    """Function that returns the sharding of a tensor of `value`'s state: of its path and a tensor of its shape."""
    if isinstance(value, Optimizer):
        numbered = [parameter for group in value.param_groups for parameter in group["params"]]

        def parameter_layout(where: tuple[Any, ...], leaf: torch.Tensor) -> Any:
            parameter = numbered[where[1].key] if where[0].key == "state" else None
            if parameter is None or not _is_lazy(parameter) or parameter.shape != leaf.shape:
                return None
            return mesh.sharding_of(tensor_io.buffer_of(parameter))

        return parameter_layout
    present, _ = _pytree.tree_flatten_with_path(_state_of(value))
    layouts = {where: mesh.sharding_of(tensor_io.buffer_of(tensor)) for where, tensor in present if _is_lazy(tensor)}
    return lambda where, leaf: layouts.get(where)


def _one_value(call: str) -> None:
    if processes.world_size() > 1 and not mesh.is_partitioned():
        raise DeviceError(
            f"checkpoint.{call}(): each of {processes.world_size()} processes has whole values; use "
            "xla_amp.xla_model.save() on all of them (the first one writes) and torch.load(), or lay the model out "
            "first (xla_amp.shard, xla_amp.mark_sharding)"
        )


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise MissingLibraryError(
            "sharded checkpoints need Orbax: pip install 'xla-amp[checkpoint]' (orbax-checkpoint)"
        ) from error
