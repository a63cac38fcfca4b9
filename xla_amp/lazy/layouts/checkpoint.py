"""Checkpoints of sharded tensors: written by shard, read into any other sharding.

A checkpoint is a folder, which Orbax writes, and renames when it is complete: its files have the arrays,
``structure.pt`` all other values and a meta tensor for each array, ``digests.json`` a digest of each file.
For replicated values (one device, or processes of `xla_amp.launch`) `xla_amp.xla_model.save` is enough and needs no
Orbax.

On a mesh of several processes all of them call these functions with the same arguments, on a folder that all of them
reach; each writes and reads its own shards.

    checkpoint.save({"model": model, "optimizer": optimizer, "scaler": scaler, "step": 100}, "run/step-100")
    saving = checkpoint.save_async(...)  # goes on while the file system writes; saving.result() raises what went wrong
    step = checkpoint.load({"model": model, "optimizer": optimizer, "scaler": scaler}, "run/step-100")["step"]
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding
from torch.optim import Optimizer

from xla_amp.common import arguments, events, files
from xla_amp.engines import devices
from xla_amp.errors import DeviceError, FileError, MissingLibraryError, XlaAmpError
from xla_amp.lazy import processes
from xla_amp.lazy.base import private_api
from xla_amp.lazy.base.dtypes import TO_NUMPY
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE, is_lazy
from xla_amp.torch_common import exchange, trees
from xla_amp.training import held


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a checkpoint, each shard from its device; the folder appears when it is complete.

    What a killed save of the same name left is removed.

    Args:
        state: by name, objects with ``state_dict()`` and ``load_state_dict()`` (models, optimizers, scalers,
            schedules), or numbers, texts, bytes, tensors, NumPy arrays and containers of them.
        path: a folder that does not exist yet, e.g. ``run/step-100``.

    Raises:
        FileError: `path` exists, or cannot be written; a value could not be loaded again (the message has its type).
        DeviceError: in one of several processes with separate values (`xla_amp.xla_model.save` is for them).
        MissingLibraryError: Orbax is not installed.
    """
    _begin("save", state, path)()


_writing: list[Future[None]] = []
"""The last of `save_async`: one checkpoint is written at a time."""


def save_async(state: Mapping[str, Any], path: str | os.PathLike[str]) -> Future[None]:
    """`save` that returns when the values are on the host, and writes them while the next steps run.

    A checkpoint that is still being written is waited for first, also at the end of the program.  A failure is a
    warning, and an error of ``result()``.

    Args:
        state: as `save`.
        path: as `save`.

    Returns:
        A future: ``result()`` returns None when the folder is complete, or raises why it is not; ``done()`` waits for
        nothing.

    Raises:
        FileError: as `save`.
        DeviceError, MissingLibraryError: as `save`.
    """
    finish = _begin("save_async", state, path)

    def run() -> None:
        try:
            finish()
        except BaseException as error:
            events.warn(f"a checkpoint was not written: {error or type(error).__name__}")
            raise

    pool = ThreadPoolExecutor(1, "xla_amp-checkpoint")
    _writing[:] = [pool.submit(run)]
    pool.shutdown(wait=False)
    return _writing[0]


def _wait() -> None:
    futures.wait(_writing)


private_api.before_executors_end(_wait)  # Orbax's last steps need executors, which Python closes before any ``atexit``


# ---- writing ---------------------------------------------------------------------------------------------------------

_STRUCTURE, _FACTS = "structure.pt", "digests.json"
_FORMAT = "xla_amp checkpoint 3"
_PARTIAL = ".orbax-checkpoint-tmp"
"""What Orbax adds to the name of a folder that is not complete."""
_CHANGED_LATER = "_CHECKPOINT_METADATA"
"""Orbax's file of the time at which the folder gets its name."""


def _begin(call: str, state: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[], None]:
    """Copies the values to the host and starts to write them; the result finishes the checkpoint."""
    _check_arguments(call, state, path)
    orbax = _orbax()
    _one_value(call)
    _wait()
    named = f"checkpoint.{call}({str(path)!r})"
    target = Path(path).absolute()
    if os.path.lexists(target):
        raise FileError(f"{named}: it exists; give each checkpoint a separate name")
    if "[" in str(target):
        raise FileError(f"{named}: Orbax finds no files in a folder whose path has a '['; choose another name")
    arrays: dict[str, jax.Array] = {}
    written: dict[Any, torch.Tensor] = {}

    def detach(value: Any) -> Any:
        if not is_lazy(value):
            return value
        key = held.part(value)
        if key not in written:  # of tied weights only the first is written; the file has one meta tensor for all
            written[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if value.numel():  # Orbax writes no empty arrays
                arrays[str(len(arrays))] = _twin(tensor_io.array_of(value.detach()))
        return written[key]

    structure = trees.tree_map(detach, {name: _state_of(value) for name, value in state.items()})
    try:
        rest = exchange.encode(structure, named)
    except TypeError as error:
        raise FileError(f"{error} (of an object its state_dict())") from error

    def partial() -> Iterator[Path]:
        return target.parent.glob(f"{glob.escape(target.name)}{_PARTIAL}*")

    def remove_partial() -> None:
        for folder in partial() if processes.ordinal() == 0 else ():
            shutil.rmtree(folder, ignore_errors=True)

    def complete() -> None:
        """In the first process, before the folder gets its name."""
        [folder] = partial()
        (folder / _STRUCTURE).write_bytes(rest)
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        names = [name for name in names if name != _CHANGED_LATER]
        facts = {"format": _FORMAT, "time": time.time_ns(), "files": _digests(folder, names)}
        (folder / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def removed_on_errors() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            remove_partial()
            if isinstance(error, XlaAmpError | jax.errors.JaxRuntimeError) or not isinstance(error, Exception):
                raise
            # Orbax and TensorStore raise errors of many classes for a full disk.
            raise FileError(f"{named}: {_reason(error)}") from error

    with removed_on_errors(), private_api.x64():
        remove_partial()  # of a save that was killed
        options = orbax.options.AsyncOptions(
            post_finalization_callback=complete, create_directories_asynchronously=False
        )
        writer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler(), async_options=options)
        writer.save(target, args=orbax.args.PyTreeSave({"arrays": arrays}))
        arrays.clear()

    def finish() -> None:
        with removed_on_errors(), writer:
            writer.wait_until_finished()

    return finish


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the files in a folder by name; empty for one that is not there."""

    def digest(name: str) -> str:
        if not (folder / name).is_file():
            return ""
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _check_arguments(call: str, state: object, path: object) -> None:
    arguments.require(f"checkpoint.{call}(state)", state, Mapping, 'objects by name such as {"model": model}')
    arguments.require(f"checkpoint.{call}(path=...)", path, arguments.PATH, "a folder such as 'run/step-100'")


def _reason(error: Exception) -> str:
    """An error as text, without the options that TensorStore adds."""
    return f"{type(error).__name__}: {str(error).partition(' [tensorstore_spec')[0]}"


def _twin(array: jax.Array) -> jax.Array:
    """The array as another object: a reference to `array` would keep the next step from reusing its memory."""
    if mesh.spans_processes() and array.sharding.device_set != mesh.default_placement().device_set:
        with private_api.x64():
            array = mesh.put(array)
    shards = [shard.data for shard in array.addressable_shards]
    twin: jax.Array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return twin


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(state: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint into objects; their tensors keep their current shardings, whatever those at `save` were.

    All files are compared with their digests and read first: a damaged checkpoint changes no object.

    An optimizer's state gets the shardings of its parameters: mark those first.

    Args:
        state: by name, what to read into: objects with ``load_state_dict()``, or tensors (overwritten).  The
            result has the values for other objects and names.
        path: what `save` wrote.

    Returns:
        The checkpoint's values that were not read into an object.

    Raises:
        FileError: there is no complete checkpoint, or it is damaged.
        KeyError: the checkpoint lacks a name.
        RuntimeError: an object rejects its part, such as another shape; those before it are loaded.
        DeviceError: in one of several processes with separate values.
        MissingLibraryError: Orbax is not installed.
    """
    _check_arguments("load", state, path)
    orbax = _orbax()
    devices.engine().device()
    _one_value("load")
    folder, call = Path(path).absolute(), f"checkpoint.load({str(path)!r})"
    structure = _undamaged(folder, call)
    if missing := [name for name in state if name not in structure]:
        raise KeyError(f"{call}: it holds {list(structure)}, and nothing named {missing}")
    leaves, tree = trees.tree_flatten_with_path(structure)
    layouts = {name: _layouts(value) for name, value in state.items()}
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    marked: dict[int, Any] = {}
    for where, leaf in leaves:
        if _is_array(leaf) and id(leaf) not in marked:
            find: Callable[[Any, torch.Tensor], Any] = layouts.get(getattr(where[0], "key", ""), _unsharded)
            layout = find(where[1:], leaf)
            home = mesh.default_placement()
            sharding = layout or (SingleDeviceSharding(home) if isinstance(home, jax.Device) else home)
            name = str(len(marked))
            with private_api.x64():
                shape, dtype = tuple(leaf.shape), TO_NUMPY[leaf.dtype]
                wanted[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            marked[id(leaf)] = layout
    try:
        with private_api.x64(), orbax.PyTreeCheckpointer() as reader:
            item = {"arrays": wanted}
            placed = orbax.checkpoint_utils.construct_restore_args(item)
            arrays = reader.restore(folder, orbax.args.PyTreeRestore(item, restore_args=placed))["arrays"]
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:  # of a damaged file Orbax and TensorStore raise what their parts happen to raise
        raise FileError(f"{call}: its arrays cannot be read: {_reason(error)}") from error
    read = dict(zip(marked, map(transfer.wrap, (arrays[name] for name in wanted)), strict=True))
    del arrays
    for key, layout in marked.items():
        if layout is not None:
            mesh.set_sharding(tensor_io.buffer_of(read[key]), layout)
    values = [_read(leaf, read) for _, leaf in leaves]
    loaded: dict[str, Any] = trees.tree_unflatten(values, tree)
    del read, values
    for name, value in state.items():
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(loaded.pop(name))
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(loaded.pop(name))
    return loaded


def _undamaged(folder: Path, call: str) -> dict[str, Any]:
    """The values of a checkpoint, meta tensors in place of arrays; reads every file, each process some of them."""
    written = _read_facts(folder, call)["files"]
    found = _digests(folder, sorted(written)[processes.ordinal() :: processes.world_size()])
    changed = [name for name, digest in found.items() if digest != written[name]]
    texts = processes.rendezvous("checkpoint", json.dumps(changed).encode())
    if changed := [name for text in texts for name in json.loads(text)]:
        raise FileError(f"{call}: damaged: {', '.join(changed[:4])} is not what was written; load an earlier one")
    structure: dict[str, Any] = exchange.decode((folder / _STRUCTURE).read_bytes())
    return structure


def _read_facts(folder: Path, call: str) -> dict[str, Any]:
    """The file `_FACTS` of a checkpoint.

    Raises:
        FileError: the folder is no complete checkpoint, or the file is damaged.
    """
    file = folder / _FACTS
    if _PARTIAL in folder.name or not file.is_file():
        raise FileError(f"{call}: there is no complete checkpoint of this version")
    try:
        facts = files.parsed(json.loads, file.read_text(encoding="utf-8"))
        if facts["format"] != _FORMAT or not isinstance(facts["time"], int) or _STRUCTURE not in facts["files"]:
            raise ValueError(f"expected the format {_FORMAT!r}")
        return dict(facts)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FileError(f"{call}: {file} is damaged: {error}") from error


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a folder that was saved last, or None.

    Each checkpoint has the time at which it was written, so copies do not matter.  One whose time cannot be read is
    left out.
    """
    arguments.require("checkpoint.latest(folder)", folder, arguments.PATH, "a folder such as 'run'")
    found = []
    for path in Path(folder).glob(f"*/{_FACTS}"):
        with contextlib.suppress(FileError):
            found.append((_read_facts(path.parent, "checkpoint.latest()")["time"], path.parent))
    return max(found, default=(None, None))[1]


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


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
            is_state = len(where) > 1 and getattr(where[0], "key", None) == "state"
            parameter = numbered[where[1].key] if is_state and where[1].key < len(numbered) else None
            if parameter is None or not is_lazy(parameter) or parameter.shape != leaf.shape:
                return None
            return mesh.sharding_of(tensor_io.buffer_of(parameter))

        return parameter_layout
    present, _ = trees.tree_flatten_with_path(_state_of(value))
    layouts = {where: mesh.sharding_of(tensor_io.buffer_of(tensor)) for where, tensor in present if is_lazy(tensor)}
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
