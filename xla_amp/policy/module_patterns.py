"""Rules for a part of a model: ``module:<path>``, where the path is the one that ``named_modules`` gives.

``module:*.attention`` reaches what runs in a module of that name, its submodules included: every operation of a class
that computes (`COMPUTES`).  ``module:*.attention.softmax`` ends in an operation and reaches that one there; as a module
may also be called ``softmax``, it reaches that module too.
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from xla_amp.policy import op_catalog
from xla_amp.types import Cast, OperationClass

PREFIX: Final = "module:"

COMPUTES: Final[frozenset[OperationClass]] = frozenset(
    {
        "contraction",
        "convolution",
        "recurrent",
        "reduction",
        "transcendental",
        "normalization",
        "loss",
        "activation",
        "elementwise",
        "pooling",
        "interpolation",
        "linear_algebra",
        "fourier",
    }
)
"""What a rule for a whole module reaches.  Operations that only move, compare, order or draw values stay with the
other rules; a pattern can still name them."""


class Place(NamedTuple):
    """One pattern, read."""

    modules: re.Pattern[str]
    """Modules of which every computing operation is meant."""
    ends: re.Pattern[str]
    """Modules of which `operations` are meant."""
    operations: frozenset[str]


def is_place(pattern: str) -> bool:
    """Whether `pattern` names modules."""
    return pattern.startswith(PREFIX)


@functools.lru_cache(maxsize=1024)
def place(pattern: str) -> Place:
    """`pattern` read; whether modules of that name exist shows only when a model runs."""
    path = pattern.removeprefix(PREFIX)
    for parts in (2, 1):  # an overload is written with a dot of its own
        modules, *tail = path.rsplit(".", parts)
        operation = op_catalog.canonical(".".join(tail))
        found = () if len(tail) < parts or op_catalog.is_glob(operation) else op_catalog.catalogued(operation)
        if found and (parts == 1 or found == (operation,)):
            return Place(op_catalog.glob(path), op_catalog.glob(modules), frozenset(found))
    return Place(op_catalog.glob(path), op_catalog.glob(path), frozenset())


def _fits(pattern: re.Pattern[str], path: str) -> bool:
    # "*.attention" also means one at the top, where no dot precedes it.
    return bool(pattern.match(path) or pattern.match(f".{path}"))


@functools.lru_cache(maxsize=16384)
def reaches(pattern: str, operation: str, path: str) -> bool:
    """Whether `pattern` means `operation` where it runs in the module at `path`; the model itself is ``""``."""
    where = place(pattern)
    names_around = path.split(".") if path else []
    around = [".".join(names_around[:depth]) for depth in range(len(names_around), -1, -1)]
    if operation in where.operations and any(_fits(where.ends, module) for module in around):
        return True
    return _computes(operation) and any(_fits(where.modules, module) for module in around)


def _computes(operation: str) -> bool:
    return op_catalog.catalogue().classes.get(operation) in COMPUTES


@functools.cache
def _computing() -> frozenset[str]:
    unruled = op_catalog.catalogue().no_rule
    return frozenset(n for n in op_catalog.catalogue().classes if _computes(n) and op_catalog.packet(n) not in unruled)


def operations(pattern: str) -> frozenset[str]:
    """Operations that `pattern` reaches in the modules that it means."""
    return _computing() | place(pattern).operations


def problem(pattern: str, cast: Cast) -> str | None:
    """What is wrong with a rule for a place, or None."""
    if not pattern.removeprefix(PREFIX).strip():
        return f'{pattern!r} names no module; write its path, e.g. "module:*.attention" or "module:*.attention.softmax"'
    if cast in ("fp32_out", "fp32_append") and not place(pattern).operations:
        return (
            f"cast {cast!r} for {pattern!r}: most operations of a module have no `dtype` argument; end the pattern in "
            f'one that has, e.g. "{pattern}.softmax", or give it "fp32"'
        )
    return None
