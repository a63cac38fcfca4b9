"""Keep compiled programs on the disk, for later runs: JAX's persistent cache, in a folder for what XLA starts with.

JAX names a stored program by its lowered text and options.  XLA reads flags once, when its client starts, so programs
are in a folder named by a digest of these.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from xla_amp import hardware
from xla_amp.common import arguments, config, events, files
from xla_amp.errors import FileError, PolicyError

LIMIT: Final = 2 << 30
"""Bytes by default."""
_PREFIX: Final = "programs-"
_UNUSED: Final = 60 * 24 * 3600
"""Seconds after which the folder of other flags or versions is removed."""
_KILLED: Final = 600
"""Seconds after which a file without a time of use belongs to a process that was killed while it wrote."""

_chosen: dict[str, Any] | None = None
"""JAX's options for the folder that was chosen, without the folder for what XLA starts with; None before a choice."""
_started = False
_users: Mapping[str, Any] = {}
"""JAX's options as they were before ours, while ours are set."""


def compilation_cache(path: str | os.PathLike[str] | None, *, most_bytes: int | None = LIMIT) -> None:
    """Stores compiled programs in a folder, for later compilations of this and other processes, by JAX's own cache.

    Without a call that is ``XDG_CACHE_HOME/xla_amp`` (``~/.cache/xla_amp``); ``XLA_AMP_CACHE`` names another folder, or
    ``off``.  A ``jax_compilation_cache_dir`` of yours is left as it is.  Programs of JAX that this process compiles are
    stored, too.

    A user who can write to the folder can run code in every process that reads it, so it is made for this user alone
    (0700).

    Args:
        path: the folder, created if it is missing; None stores nothing.
        most_bytes: size at which the least recently used programs are dropped, of each combination of flags and
            versions; None is no limit.

    Raises:
        FileError: the folder cannot be made or written, or other users can write it.
        PolicyError: a number is negative, or the path is empty.

    Source:
        https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    global _chosen
    arguments.require("compilation_cache(path)", path, (*arguments.PATH, type(None)), "a folder, or None")
    if most_bytes is not None and most_bytes < 0:
        raise PolicyError(
            f"compilation_cache(most_bytes={most_bytes!r}): expected a number that is not negative, or None"
        )
    if path is None:
        _chosen = {}
    elif not os.fspath(path):
        raise PolicyError(f"compilation_cache({path!r}): expected a folder, or None to store nothing")
    else:
        _chosen = {
            "jax_compilation_cache_dir": str(files.own_folder(path, f"compilation_cache({os.fspath(path)!r})")),
            "jax_compilation_cache_max_size": -1 if most_bytes is None else most_bytes,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
    if _started:
        _apply()


def is_on() -> bool:
    """Whether JAX stores programs, in our folder or in the user's."""
    return bool(jax.config.values["jax_compilation_cache_dir"])


def start() -> None:
    """Sets JAX's options; call before its client starts.

    Raises:
        FileError: ``XLA_AMP_CACHE`` names a folder that cannot be used.
    """
    global _started
    _flags()
    if _chosen is None:
        _choose()
    _started = True
    _apply()


def _choose() -> None:
    named = config.cache()
    if isinstance(named, Path):
        return compilation_cache(named)
    # Compilers of GPUs share work between processes, so either all or none may have a program stored.
    shares = config.process() is not None and jax.config.values["jax_platforms"] != "cpu"
    try:
        compilation_cache(None if named == "off" or shares else config.default_cache())
    except FileError as error:
        events.warn(f"compiled programs are not stored: {error}, in XLA_AMP_CACHE; XLA_AMP_CACHE=off stores none")
        compilation_cache(None)


def _apply() -> None:
    global _users
    for name, value in _users.items():
        jax.config.update(name, value)
    _users = {}
    if _chosen and not is_on():
        try:
            path = Path(_chosen["jax_compilation_cache_dir"], f"{_PREFIX}{_flags()}")
            own = files.own_folder(path, "the cache of compiled programs")
            _clean(own)
        except (FileError, OSError) as error:
            events.warn(f"compiled programs are not stored: {error}")
        else:
            _users = {name: jax.config.values[name] for name in _chosen}
            for name, value in {**_chosen, "jax_compilation_cache_dir": str(own)}.items():
                jax.config.update(name, value)
    jax_cache.reset_cache()  # JAX reads these options once, at its first compilation


@functools.cache
def _flags() -> str:
    """Digest of what XLA starts with, when it starts, and of what reads its files."""
    found = config.xla_environment()
    flags = found.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA takes it for the name of a file with flags
        try:
            found["XLA_FLAGS"] = Path(flags).read_text("utf-8", "replace")
        except OSError as error:
            found["XLA_FLAGS"] = str(error)
    processor = hardware.processor()
    versions = metadata.version("jax"), metadata.version("jaxlib"), config.version()
    parts = sorted(found.items()), versions, processor.name, sorted(processor.flags), processor.cores
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _clean(own: Path) -> None:
    """Removes folders that nothing uses any more, and what a killed process has written in part."""
    os.utime(own)
    now = time.time()
    for other in own.parent.glob(f"{_PREFIX}*"):
        if now - other.stat().st_mtime > _UNUSED:
            shutil.rmtree(other, ignore_errors=True)
    for file in own.glob("*-cache"):
        used = file.with_name(f"{file.name.removesuffix('-cache')}-atime")
        if not used.exists() and now - file.stat().st_mtime > _KILLED:
            file.unlink(missing_ok=True)
