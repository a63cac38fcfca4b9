"""Public names of packages: those that load without PyTorch, and the error for a name that a package does not have."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable


def importable(public: Iterable[str], needs_torch: Iterable[str]) -> list[str]:
    """The public names of a package that can be loaded here: without PyTorch not those that need it.

    So ``from xla_amp import *``, ``help`` and `inspect.getmembers` work in an environment for JAX.  Asked for by name,
    each says what to install.
    """
    try:
        without = importlib.util.find_spec("torch") is None
    except ImportError:
        without = True
    left_out = frozenset(needs_torch) if without else frozenset()
    return [name for name in public if name not in left_out]


def missing(package: str, name: str, public: Iterable[str]) -> AttributeError:
    """The error for a name that a package (its full name) does not have; `public` are the names that it has."""
    return AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(public)}")
