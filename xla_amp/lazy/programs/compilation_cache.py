"""Keep compiled programs on the disk, for later runs: which folder, and how large it may grow."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from xla_amp.common import config, events, files
from xla_amp.errors import FileError, PolicyError
from xla_amp.lazy.programs.disk import LIMIT, Folder

_folder: Folder | None = None
_chosen = False
"""Whether `_folder` is decided: by a call, or by the environment at the first question."""
_named = False
"""Whether the user named the folder."""
_in_jax = False
"""Whether JAX's cache is in the folder."""


def compilation_cache(
    path: str | os.PathLike[str] | None, *, least_seconds: float = 0.0, most_bytes: int | None = LIMIT
) -> None:
    """Stores compiled programs in a folder, for later compilations of this and other processes.

    Without a call that is ``XDG_CACHE_HOME/xla_amp`` (``~/.cache/xla_amp``); ``XLA_AMP_CACHE`` names another folder, or
    ``off``.  The name of a stored program is a digest of all that shapes it, so a hit needs no tracing, lowering or
    compiling, and gives bitwise the same results.  Programs with functions that other processes cannot recognize, such
    as a user's JAX function, are not stored.  Programs that several processes run together are stored for each of them
    on a CPU; elsewhere they are in JAX's own cache (``jax_compilation_cache_dir``) below a folder that was named, and
    otherwise not stored.

    A user who can write to the folder can run code in every process that reads it, so it is made for this user alone
    (0700).

    Args:
        path: the folder, created if it is missing; None stores nothing.
        least_seconds: programs that compile faster are not stored; 0 stores all.
        most_bytes: size at which the least recently used programs are dropped; None is no limit.

    Raises:
        FileError: the folder cannot be made or written, or other users can write it.
        PolicyError: a number is negative.

    Source:
        https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    global _folder, _chosen, _named
    if least_seconds < 0 or (most_bytes is not None and most_bytes < 0):
        raise PolicyError(
            f"compilation_cache(least_seconds={least_seconds!r}, most_bytes={most_bytes!r}): expected numbers that are "
            "not negative"
        )
    found = None
    if path is not None:
        own = files.own_folder(path, f"compilation_cache({os.fspath(path)!r})")
        found = Folder(own, limit=most_bytes, least_seconds=least_seconds)
    _end_jax_cache()
    _folder, _chosen, _named = found, True, True


def folder() -> Folder | None:
    """Where programs are stored; None if they are not."""
    if not _chosen:
        start()
    return _folder


def start() -> None:
    """Decides by the environment, unless `compilation_cache` was called.

    Raises:
        FileError: ``XLA_AMP_CACHE`` names a folder that cannot be used.
    """
    global _folder, _chosen
    if _chosen:
        return
    named = config.cache()
    if isinstance(named, Path):
        compilation_cache(named)
        return
    _chosen = True
    path = config.default_cache() if named == "default" else None
    if path is None:
        return
    try:
        _folder = Folder(files.own_folder(path, "the cache of compiled programs"))
    except FileError as error:
        events.warn(f"compiled programs are not stored: {error}, in XLA_AMP_CACHE; XLA_AMP_CACHE=off stores none")


def start_jax_cache(*, named: bool = False) -> None:
    """Switches JAX's cache on, below the folder, unless the user has one; with `named` only in a folder of the user's.

    It is for programs that are not stored as executables.
    """
    global _in_jax
    found = folder()
    if found is None or (named and not _named) or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    _in_jax = True
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(found.least_seconds))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_compilation_cache_max_size", -1 if found.limit is None else found.limit)
    jax.config.update("jax_compilation_cache_dir", str(found.path / "jax"))
    jax_cache.reset_cache()  # JAX reads these options once, at its first compilation


def _end_jax_cache() -> None:
    global _in_jax
    if _in_jax:
        _in_jax = False
        jax.config.update("jax_compilation_cache_dir", None)
        jax_cache.reset_cache()
