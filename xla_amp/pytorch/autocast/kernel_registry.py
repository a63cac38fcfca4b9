"""Reference-counted autocast kernels: installed while held, then removed without a trace in torch.

One `acquire` puts its new kernels into one `torch.library.Library` for each namespace.  A library is destroyed when the
last of its operations is released; the dispatcher then has its earlier kernels.  A kernel is installed for the whole
process, and the rules that it follows belong to the calling thread (`xla_amp.pytorch.autocast.cast_kernel`).
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
class _Installed:
    """The kernel of one operation."""

    library: torch.library.Library
    holders: int = 0


_lock = threading.RLock()
_installed: dict[tuple[str, str], _Installed] = {}
"""By dispatch key and operation."""
_in_use: dict[torch.library.Library, int] = {}
"""Number of held operations of each library."""


def acquire(key: str, operations: Iterable[str], make: Callable[[str, Any], cast_kernel.Kernel]) -> tuple[str, ...]:
    """Holds kernels of the operations on the dispatch key `key`, and installs those that are missing.

    Args:
        operations: names as policies write them; names that this process has no operator for are left out.
        make: makes the kernel of a name and its operator; called for operations without one.

    Returns:
        The operations, for `release`.
    """
    done: list[str] = []
    libraries: dict[str, torch.library.Library] = {}
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that its kernel is replaced, which is intended
        try:
            for name in operations:
                kernel = _installed.get((key, name))
                if kernel is None:
                    operator = cast_kernel.operator(name)
                    if operator is None:
                        continue
                    kernel = _Installed(_install(key, name, make(name, operator), libraries))
                    _installed[key, name] = kernel
                kernel.holders += 1
                done.append(name)
        except BaseException:
            release(key, done)
            raise
    return tuple(done)


def release(key: str, operations: Iterable[str]) -> None:
    """Releases the operations that one `acquire` returned."""
    with _lock:
        for name in operations:
            kernel = _installed[key, name]
            kernel.holders -= 1
            if kernel.holders == 0:
                del _installed[key, name]
                _in_use[kernel.library] -= 1
                if _in_use[kernel.library] == 0:
                    del _in_use[kernel.library]
                    del kernel  # the last reference to the library, which takes its kernels back


def is_installed(key: str, name: str) -> bool:
    """Whether this registry has a kernel of the operation on `key` now."""
    return (key, name) in _installed


def _install(
    key: str, name: str, kernel: cast_kernel.Kernel, libraries: dict[str, torch.library.Library]
) -> torch.library.Library:
    namespace, _, bare = name.rpartition("::")
    library = libraries.get(namespace)
    if library is None:
        library = torch.library.Library(namespace or "aten", "IMPL", key)
        libraries[namespace] = library
        _in_use[library] = 0
    library.impl(bare, kernel, with_keyset=True, allow_override=True)
    _in_use[library] += 1
    return library
