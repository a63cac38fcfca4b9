"""Checkpoints of sharded tensors: written by shard, read into any other sharding.

A checkpoint is a folder (`checkpoint_folder`): the arrays, which Orbax writes, all other values, and a digest of each.
For replicated values (one device, or processes of `xla_amp.launch`) `xla_amp.xla_model.save` is enough and needs no
Orbax.

On a mesh of several processes all of them call these functions with the same arguments, on a folder that all of them
reach; each writes and reads its own shards.

    checkpoint.save({"model": model, "optimizer": optimizer, "scaler": scaler, "step": 100}, "run/step-100")
    saving = checkpoint.save_async(...)  # goes on while the file system writes; saving.wait() raises what went wrong
    step = checkpoint.load({"model": model, "optimizer": optimizer, "scaler": scaler}, "run/step-100")["step"]
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding
from torch.optim import Optimizer

from xla_amp.backends import devices, trees
from xla_amp.common import arguments, config
from xla_amp.errors import DeviceError, FileError, MissingLibraryError, XlaAmpError
from xla_amp.lazy import private_api
from xla_amp.lazy.distributed import checkpoint_digests, checkpoint_folder, processes
from xla_amp.lazy.dtypes import TO_NUMPY
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a checkpoint, each shard from its device; the folder appears when it is complete.

    Remains of earlier saves beside it, whose process has ended, are removed.

    Args:
        state: by name, objects with ``state_dict()`` and ``load_state_dict()`` (models, optimizers, scalers,
            schedules), or values that `torch.load` reads with ``weights_only`` (tensors, numbers, texts, containers).
        path: a folder that does not exist yet, e.g. ``run/step-100``.

    Raises:
        FileError: `path` exists, or cannot be written; a value could not be loaded again (the message has its key);
            an earlier `save_async` failed and nothing has reported it.
        DeviceError: in one of several processes with separate values (`xla_amp.xla_model.save` is for them).
        MissingLibraryError: Orbax is not installed.
    """
    _started("save", state, path).wait()


class Saving:
    """A checkpoint that is being written (`save_async`)."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, args=(finish,), name="xla_amp-checkpoint")
        self._thread.start()

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is written, or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the folder is complete.

        Raises:
            FileError: it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            self._is_reported = True
            raise self._error

    def wait_unless_reported(self) -> None:
        """`wait`, which raises an error only if it is the first to do so."""
        self._thread.join()
        if not self._is_reported:
            self.wait()


_newest: list[Saving] = []
"""The last `Saving`: one is written at a time."""


def save_async(state: Mapping[str, Any], path: str | os.PathLike[str]) -> Saving:
    """`save` that returns when the values are on the host, and writes them while the next steps run.

    A checkpoint that is still being written is waited for first; if it failed and ``wait()`` has not reported that, its
    error is raised here.  A program that ends waits for its checkpoint; if that fails, the exit status is 1.

    Args:
        state: as `save`.
        path: as `save`.

    Returns:
        An object with ``wait()`` and ``done()``.

    Raises:
        FileError: as `save`.
        DeviceError, MissingLibraryError: as `save`.
    """
    return _started("save_async", state, path)


def _started(call: str, state: Mapping[str, Any], path: str | os.PathLike[str]) -> Saving:
    while _newest:
        _newest.pop().wait_unless_reported()
    saving = Saving(_begin(call, state, path))
    _newest.append(saving)
    _finish_before_exit()
    return saving


# ---- the end of the program ------------------------------------------------------------------------------------------

_exit: list[BaseException] = []
"""Why the program must not end with status 0."""
_registered: list[bool] = []


def _finish_before_exit() -> None:
    """Registers `_at_exit` once.  Orbax's last steps need executors, which Python closes before any ``atexit``."""
    if not _registered:
        private_api.before_executors_end(_at_exit)
        _registered.append(True)
        atexit.register(_exit_status)


def _at_exit() -> None:
    while _newest:
        try:
            _newest.pop().wait_unless_reported()
        except BaseException as error:  # also a second Ctrl-C
            sys.stderr.write(f"xla_amp: a checkpoint was not written: {str(error) or type(error).__name__}\n")
            processes.fail(error)
            _exit.append(error)


def _exit_status() -> None:
    if _exit and processes.world_size() == 1:  # several leave together, also with status 1
        processes.exit_failed()


# ---- writing ---------------------------------------------------------------------------------------------------------


def _begin(call: str, state: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[], None]:
    """Copies the values to the host and starts to write them; the result finishes the checkpoint."""
    _check_arguments(call, state, path)
    orbax = _orbax()
    _one_value(call)
    named = f"checkpoint.{call}({str(path)!r})"
    target = Path(path).absolute()
    if os.path.lexists(target):
        raise FileError(f"{named}: it exists; give each checkpoint a separate name")
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

    try:
        structure = trees.tree_map(detach, {name: _state_of(value) for name, value in state.items()})
        checkpoint_folder.require_readable(structure)
    except FileError as error:
        raise FileError(f"{named}: {error}") from error.__cause__
    except RecursionError:
        raise FileError(f"{named}: a value is nested too deeply") from None
    first, number = processes.ordinal() == 0, next(_numbers)
    partial = checkpoint_folder.Partial(target, shared=mesh.spans_processes())

    @contextlib.contextmanager
    def removed_on_errors() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if first:
                partial.close()
            if isinstance(error, XlaAmpError | jax.errors.JaxRuntimeError) or not isinstance(error, Exception):
                raise
            # Orbax and TensorStore raise errors of many classes for a full disk.
            raise FileError(f"{named}: {_reason(error)}") from error

    with removed_on_errors():
        with _together(f"{number}/begin"):
            if first:
                partial.make(structure)
        digests = checkpoint_digests.start(arrays)
        with private_api.x64():
            writer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())
            writer.save(partial.path / checkpoint_folder.ARRAYS, args=orbax.args.PyTreeSave({"arrays": arrays}))
        arrays.clear()

    def finish() -> None:
        with removed_on_errors():
            with _together(f"{number}/written"), writer:
                writer.wait_until_finished()
                texts = checkpoint_digests.texts(digests)
            with _together(f"{number}/end"):
                if first:
                    partial.finish(texts)
                    partial.close()

    return finish


_numbers = itertools.count()


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


class _together:
    """Ends when all processes of the mesh have come to its end; the error of one is an error in all.  On any thread."""

    def __init__(self, what: str) -> None:
        self._key = f"xla_amp/checkpoint/{what}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        client = private_api.coordinator()
        if not mesh.spans_processes() or client is None:
            return
        milliseconds, rank = 1000 * config.timeout(), processes.ordinal()
        try:
            client.key_value_set(f"{self._key}/{rank}", f"process {rank}: {error}" if error else "")
            if rank == 0:
                ranks = range(processes.world_size())
                texts = [client.blocking_key_value_get(f"{self._key}/{each}", milliseconds) for each in ranks]
                client.key_value_set(self._key, next(filter(None, texts), ""))
            text = client.blocking_key_value_get(self._key, milliseconds)
        except Exception as late:
            text = str(late)
        if text and error is None:
            raise FileError(f"another process did not write its part of the checkpoint: {text}")


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(state: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint into objects; their tensors keep their current shardings, whatever those at `save` were.

    All values are read and compared with their digests first, and an object that rejects its part gives all objects
    their old values back.  A checkpoint of an earlier version has no digests and is not compared.

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
        DeviceError: in one of several processes with separate values.
        MissingLibraryError: Orbax is not installed.
    """
    _check_arguments("load", state, path)
    orbax = _orbax()
    devices.engine().device()
    _one_value("load")
    folder, call = Path(path).absolute(), f"checkpoint.load({str(path)!r})"
    if not (folder / checkpoint_folder.STRUCTURE).is_file():
        raise FileError(f"{call}: there is no complete checkpoint")
    facts = checkpoint_folder.read_facts(folder)
    structure = checkpoint_folder.read_structure(folder, facts)
    if missing := [name for name in state if name not in structure]:
        raise KeyError(f"{call}: it holds {list(structure)}, and nothing named {missing}")
    leaves, tree = trees.tree_flatten_with_path(structure)
    layouts = {name: _layouts(value) for name, value in state.items()}
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    marked: dict[int, Any] = {}
    keys: dict[str, str] = {}
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
            marked[id(leaf)], keys[name] = layout, trees.keystr(where)
    try:
        with private_api.x64(), orbax.PyTreeCheckpointer() as reader:
            restored = {
                name: orbax.ArrayRestoreArgs(sharding=struct.sharding, dtype=struct.dtype)
                for name, struct in wanted.items()
            }
            arrays = reader.restore(
                folder / checkpoint_folder.ARRAYS,
                orbax.args.PyTreeRestore({"arrays": wanted}, restore_args={"arrays": restored}),
            )["arrays"]
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:  # of a damaged file Orbax and TensorStore raise what their parts happen to raise
        raise FileError(f"{call}: its arrays cannot be read: {_reason(error)}") from error
    if facts.arrays:
        found = checkpoint_digests.texts(checkpoint_digests.start({name: arrays[name] for name in wanted}))
        changed = [keys[name] for name, digest in found.items() if facts.arrays.get(name, digest) != digest]
        if changed:
            raise FileError(f"{call}: damaged: {', '.join(changed[:4])} is not what was written; load an earlier one")
    read = dict(zip(marked, map(transfer.wrap, (arrays[name] for name in wanted)), strict=True))
    del arrays
    for key, layout in marked.items():
        if layout is not None:
            mesh.set_sharding(tensor_io.buffer_of(read[key]), layout)
    values = [_read(leaf, read) for _, leaf in leaves]
    loaded: dict[str, Any] = trees.tree_unflatten(values, tree)
    del read, values
    _apply(state, loaded)
    return loaded


def _apply(state: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """Gives objects and tensors their parts of `loaded`, which then has the others; on an error all keep their own."""
    before: dict[str, Any] = {}
    try:
        for name, value in state.items():
            if hasattr(value, "load_state_dict"):
                before[name] = trees.tree_map(_kept, value.state_dict())
                value.load_state_dict(loaded.pop(name))
            elif isinstance(value, torch.Tensor):
                before[name] = _kept(value)
                with torch.no_grad():
                    value.copy_(loaded.pop(name))
    except BaseException:
        for name, old in before.items():
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(old)
            else:
                with torch.no_grad():
                    state[name].copy_(old)
        raise


def _kept(value: Any) -> Any:
    """The value as it is now; an array of the device is referred to, not copied."""
    if _is_lazy(value):
        array, layout = tensor_io.array_of(value.detach()), mesh.sharding_of(tensor_io.buffer_of(value))
        held = transfer.wrap(array)
        if layout is not None:
            mesh.set_sharding(tensor_io.buffer_of(held), layout)
        return held
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a folder that was saved last, or None.

    Each checkpoint has the next number of its folder, so copies and clocks do not matter.  One whose
    number cannot be read is left out.  Those of an earlier version have none: they come before the others, by the time
    of their folder.
    """
    arguments.require("checkpoint.latest(folder)", folder, arguments.PATH, "a folder such as 'run'")

    def order(path: Path) -> tuple[int, float]:
        facts = checkpoint_folder.read_facts(path)
        return facts.number, facts.time or path.stat().st_mtime

    found = []
    for path in checkpoint_folder.complete(Path(folder)):
        try:
            found.append((order(path), path))
        except OSError:  # damaged, or removed by a program that keeps the last few
            continue
    return max(found, default=(None, None))[1]


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
            is_state = len(where) > 1 and getattr(where[0], "key", None) == "state"
            parameter = numbered[where[1].key] if is_state and where[1].key < len(numbered) else None
            if parameter is None or not _is_lazy(parameter) or parameter.shape != leaf.shape:
                return None
            return mesh.sharding_of(tensor_io.buffer_of(parameter))

        return parameter_layout
    present, _ = trees.tree_flatten_with_path(_state_of(value))
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
