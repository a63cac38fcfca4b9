"""The folder of a checkpoint: what is in it beside arrays, how it becomes complete, and what killed saves leave.

::

    run/step-100/
        arrays/            the arrays, which Orbax writes
        structure.pt       all other values, and a meta tensor for each array
        checkpoint.json    `CheckpointFacts`
    run/step-200.1f0c9a52.partial/    one that is being written, with a file `owner` that its process has locked
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from xla_amp.backends import trees
from xla_amp.common import files
from xla_amp.errors import FileError

ARRAYS, STRUCTURE, _FACTS, _OWNER = "arrays", "structure.pt", "checkpoint.json", "owner"
_FORMAT = "xla_amp checkpoint 2"
_PARTIAL = re.compile(r".+\.(all|[0-9a-f]+)\.partial")
_IDLE = 3600.0
"""Seconds without a write after which the remains of a save on another host are those of a killed one."""


class CheckpointFacts(NamedTuple):
    """What a checkpoint says about itself; empty for one of a version that wrote no such file."""

    number: int = 0
    """Of the checkpoints in one folder, in the order in which they were begun."""
    time: float = 0.0
    """Seconds since 1970."""
    structure: str = ""
    """SHA-256 of the file `STRUCTURE`."""
    arrays: Mapping[str, str] = {}
    """Digest of each array by its name (`checkpoint_digests`)."""


def read_facts(folder: Path) -> CheckpointFacts:
    """The facts of a checkpoint.

    Raises:
        FileError: they are damaged.
    """
    try:
        found = files.parsed(json.loads, (folder / _FACTS).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise ValueError(f"expected the format {_FORMAT!r}")
        facts = CheckpointFacts(**found)
        kinds: tuple[type, ...] = (int, float, str, dict)
        if len(found) != len(kinds) or not all(isinstance(*pair) for pair in zip(facts, kinds, strict=True)):
            raise ValueError(f"expected {', '.join(CheckpointFacts._fields)}")
        return facts
    except FileNotFoundError:
        return CheckpointFacts()
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{folder / _FACTS} is damaged: {error}") from error


def read_structure(folder: Path, facts: CheckpointFacts) -> dict[str, Any]:
    """The values of a checkpoint, meta tensors in place of arrays; `facts` are its own.

    Raises:
        FileError: it is damaged.
    """
    try:
        data = (folder / STRUCTURE).read_bytes()
        if facts.structure not in ("", hashlib.sha256(data).hexdigest()):
            raise ValueError("its digest is not the one from when it was written")
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
        return found
    except Exception as error:  # of a damaged file torch raises what its parts happen to raise
        raise FileError(f"{folder / STRUCTURE} is damaged: {type(error).__name__}: {error}") from error


def complete(folder: Path) -> Iterator[Path]:
    """The complete checkpoints in a folder."""
    for path in folder.glob(f"*/{STRUCTURE}"):
        if path.parent.suffix != ".partial":
            yield path.parent


# ---- values that can be read again -----------------------------------------------------------------------------------


def require_readable(structure: Mapping[str, Any]) -> None:
    """Checks that `torch.load` reads a structure with ``weights_only``, as `read_structure` does.

    Raises:
        FileError: it does not; names the first key.
    """
    # Plain tensors are read; copying them would cost memory.
    outline = trees.tree_map(lambda leaf: None if _is_plain(leaf) else leaf, structure)
    if _refusal(outline) is None:
        return
    key, value, error = _first_refused("", outline)
    kind = type(value)
    raise FileError(
        f"the value at {key or 'the top'}, a {kind.__module__}.{kind.__qualname__}, could not be loaded again, because "
        "torch.load(weights_only=True) reads tensors, numbers, texts and containers of them: save float(x) of a number "
        f"of NumPy, and the state_dict() of an object ({type(error).__name__}: {str(error).partition('. ')[0][:200]})"
    ) from error


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_quantized


def _refusal(value: Any) -> Exception | None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        return error
    return None


def _first_refused(key: str, value: Any) -> tuple[str, Any, Exception]:
    """Key, value and error of the innermost part that is refused; `value` is."""
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        parts = ((f"{key}[{name!r}]", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{key}[{index}]", part) for index, part in enumerate(value))
    for name, part in parts:
        if _refusal(part) is not None:
            return _first_refused(name, part)
    error = _refusal(value)
    assert error is not None  # noqa: S101  (the caller has seen it)
    return key, value, error


# ---- folders that are being written ----------------------------------------------------------------------------------

_mine: set[Path] = set()
"""Partial folders of this process."""


class Partial:
    """A checkpoint that is being written, in a folder beside its own.

    Args:
        target: the checkpoint.
        shared: whether several processes write it, which must find the same name.
    """

    def __init__(self, target: Path, *, shared: bool) -> None:
        self._target = target
        self.path = target.with_name(f"{target.name}.{'all' if shared else secrets.token_hex(4)}.partial")
        self._lock = -1
        self._number = 0

    def make(self, structure: Mapping[str, Any]) -> None:
        """Removes what killed saves left beside it, makes the folder and writes the structure.

        Raises:
            OSError, RuntimeError: as `torch.save`; another job is writing the same checkpoint.
        """
        parent = self.path.parent
        parent.mkdir(parents=True, exist_ok=True)
        for path in parent.glob("*.partial"):
            if _is_left(path) or (
                path == self.path and not _is_locked(path)
            ):  # all processes begin: none of them writes
                shutil.rmtree(path, ignore_errors=True)
        self.path.mkdir()
        _mine.add(self.path)
        # A lock of the process, which ends with it.  A lock of the file (flock) would live on in a loader's workers.
        self._lock = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT)
        os.write(self._lock, socket.gethostname().encode())
        _try_lock(self._lock)
        self._number = 1 + max((_number(path) for path in complete(parent)), default=0)
        torch.save(dict(structure), self.path / STRUCTURE)

    def finish(self, arrays: Mapping[str, str]) -> None:
        """Writes the facts with the digests `arrays`, and gives the folder its name.

        Raises:
            OSError: it cannot be written, or the name is taken.
        """
        digest = hashlib.sha256((self.path / STRUCTURE).read_bytes()).hexdigest()
        facts = CheckpointFacts(self._number, time.time(), digest, dict(arrays))
        text = json.dumps({"format": _FORMAT, **facts._asdict()}, indent=1)
        (self.path / _FACTS).write_text(text + "\n", encoding="utf-8")
        (self.path / _OWNER).unlink()
        self.path.rename(self._target)

    def close(self) -> None:
        """Removes the folder, if it has not got its name."""
        if self.path in _mine:
            shutil.rmtree(self.path, ignore_errors=True)
            _mine.discard(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _number(folder: Path) -> int:
    try:
        return read_facts(folder).number
    except FileError:
        return 0


def _try_lock(descriptor: int) -> bool:
    """Whether no other process holds the lock; on a file system without locks, False."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_left(path: Path) -> bool:
    """Whether a folder is what a killed save left."""
    if path in _mine or path.is_symlink() or not _PARTIAL.fullmatch(path.name):
        return False
    try:
        names = [entry.name for entry in path.iterdir()]
        if not all(name in (STRUCTURE, _FACTS, _OWNER) or name.startswith(ARRAYS) for name in names):
            return False  # not ours
        host = (path / _OWNER).read_text(encoding="utf-8", errors="replace") if _OWNER in names else ""
        if host and _is_locked(path):
            return False
        newest = max(entry.lstat().st_mtime for entry in [path, *path.rglob("*")])
        return host == socket.gethostname() or time.time() - newest > _IDLE
    except OSError:  # it is removed or renamed right now
        return False


def _is_locked(path: Path) -> bool:
    """Whether the process that writes a folder lives; asked of another process's."""
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)
