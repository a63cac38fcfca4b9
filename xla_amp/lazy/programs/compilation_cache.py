"""Switch on JAX's persistent compilation cache, which reads programs that another process has compiled."""

from __future__ import annotations

import os

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from xla_amp import files
from xla_amp.errors import PolicyError


def compilation_cache(
    path: str | os.PathLike[str] | None, *, least_seconds: float = 0.0, most_bytes: int | None = None
) -> None:
    """Stores compiled programs in a folder, for later compilations of this and other processes.

    The folder is JAX's cache (``jax_compilation_cache_dir``), so it also stores programs of JAX code.  A program from
    the cache gives bitwise the same results.  ``XLA_AMP_CACHE`` names a folder without a call.

    A user who can write to the folder can run code in every process that reads it, so it is made for this user alone
    (0700).

    Args:
        path: the folder, created if it is missing; None switches the cache off.
        least_seconds: programs that compile faster are not stored; 0 stores all.
        most_bytes: size at which the least recently used programs are dropped; None is no limit.

    Raises:
        FileError: the folder cannot be made or written, or other users can write it.
        PolicyError: a number is negative.

    Source:
        https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    if least_seconds < 0 or (most_bytes is not None and most_bytes < 0):
        raise PolicyError(
            f"compilation_cache(least_seconds={least_seconds!r}, most_bytes={most_bytes!r}): expected numbers that are "
            "not negative"
        )
    folder = None if path is None else files.own_folder(path, f"compilation_cache({os.fspath(path)!r})")
    if folder is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(least_seconds))
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        jax.config.update("jax_compilation_cache_max_size", -1 if most_bytes is None else most_bytes)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax_cache.reset_cache()  # JAX reads these options once, at its first compilation
