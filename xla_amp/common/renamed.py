"""Errors for public names of earlier releases, which tell what to type instead (``renamed.toml``)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path


@functools.cache
def table() -> Mapping[str, str]:
    """Full old name -> full new name, or what to use instead."""
    found: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return found


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
