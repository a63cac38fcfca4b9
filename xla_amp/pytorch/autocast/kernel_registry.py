"""Autocast kernels that are there only as long as somebody needs them, and leave torch as it was.

What one `acquire` installs stands in one library per namespace; each operation counts its holders, and a library whose
last operation was let go is destroyed, after which the dispatcher has again what it had before.  Kernels are of the
process, what they do is of the calling thread (`xla_amp.pytorch.autocast.cast_kernel`).
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xla_amp.pytorch.autocast import cast_kernel


@dataclasses.dataclass(eq=False, slots=True)
class _Held:
    """One operation's kernel."""

    library: torch.library.Library
    holders: int = 0


_lock = threading.RLock()
_held: dict[tuple[str, str], _Held] = {}
_needed: dict[torch.library.Library, int] = {}
"""Library -> how many of its operations have holders."""


def acquire(key: str, operations: Iterable[str], make: Callable[[str, Any], cast_kernel.Kernel]) -> tuple[str, ...]:
    """Makes sure that the operations have kernels on the dispatch key `key`.

    Args:
        operations: names as policies write them; those that this process does not have are left out.
        make: the kernel of a name and its operator, taking the key set first; called for operations that have none yet.

    Returns:
        The operations, for `release`.
    """
    done: list[str] = []
    libraries: dict[str, torch.library.Library] = {}
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once, that its own kernel is replaced: that is what this is for
        try:
            for name in operations:
                held = _held.get((key, name))
                if held is None:
                    operator = cast_kernel.operator(name)
                    if operator is None:
                        continue
                    held = _held[key, name] = _Held(_install(key, name, make(name, operator), libraries))
                held.holders += 1
                done.append(name)
        except BaseException:
            release(key, done)
            raise
    return tuple(done)


def release(key: str, operations: Iterable[str]) -> None:
    """Lets go of what one `acquire` returned."""
    with _lock:
        for name in operations:
            held = _held[key, name]
            held.holders -= 1
            if held.holders == 0:
                del _held[key, name]
                _needed[held.library] -= 1
                if _needed[held.library] == 0:
                    del _needed[held.library]
                    held.library._destroy()


def holds(key: str, name: str) -> bool:
    """Whether the operation has a kernel of ours on `key` now."""
    return (key, name) in _held


def _install(
    key: str, name: str, kernel: cast_kernel.Kernel, libraries: dict[str, torch.library.Library]
) -> torch.library.Library:
    namespace, _, bare = name.rpartition("::")
    library = libraries.get(namespace)
    if library is None:
        library = libraries[namespace] = torch.library.Library(namespace or "aten", "IMPL", key)
        _needed[library] = 0
    library.impl(bare, kernel, with_keyset=True, allow_override=True)
    _needed[library] += 1
    return library
