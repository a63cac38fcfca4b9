"""Errors for public names of earlier releases, which tell what to type instead (``renamed.toml``)."""

from __future__ import annotations

import functools
import importlib.util
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path


@functools.cache
def table(section: str = "names") -> Mapping[str, str]:
    """A section of the table: old name -> new name, or what to use instead; in ``names`` both are full names."""
    found: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return found[section]


def attribute(owner: str, name: str) -> AttributeError:
    """The error for an attribute that an object does not have; the table's section `owner` has earlier ones."""
    instead = f"write {table(owner)[name]}" if name in table(owner) else "there is no such attribute"
    return AttributeError(f"{owner}.{name}: {instead}")


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


def missing(package: str, name: str, public: Iterable[str]) -> AttributeError | ImportError:
    """The error for a name that a package does not have.

    Args:
        package: full name.
        name: what was asked for.
        public: the names that it has.

    Returns:
        For a row of the table an `ImportError` that tells the new name: ``from package import name`` would replace the
        text of an `AttributeError`.
    """
    old = f"{package}.{name}"
    if old in table():
        return ImportError(f"{old} -> {table()[old]}", name=package)
    return AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(public)}")
