"""Patterns for a part of a model: ``module:<path>``, with a path as ``named_modules`` gives it.

``module:*.attention`` matches every operation of a computing class (`COMPUTES`) that runs in a module of that name or
in its submodules.  ``module:*.attention.softmax`` ends in an operation and matches only that operation there.  A module
may also be called ``softmax``, so it matches such a module too.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from xla_amp.common.types import OPERATION_CLASSES, Cast
from xla_amp.policy import op_catalog

PREFIX: Final = "module:"

COMPUTES: Final = frozenset(OPERATION_CLASSES) - {"comparison", "indexing", "sorting", "data_movement", "random"}
"""Classes that a rule for a whole module reaches.  Operations that only move, compare, sort or draw values follow the
other rules, unless a pattern names them."""


class ModulePattern(NamedTuple):
    """One parsed pattern."""

    modules: re.Pattern[str]
    """Paths of modules in which every computing operation matches."""
    operation_modules: re.Pattern[str]
    """Paths of modules in which `operations` match."""
    operations: frozenset[str]
    depth: int
    """Number of names in the path, without the operation."""


def joined(outer: str, inner: str) -> str:
    """Path of the module at `inner` in the module at `outer`; either may be ``""``."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def is_no_place(scope: str) -> bool:
    """Whether a name scope is a class of a library (``eqx.nn.Linear``) or the subscripts of an einsum (``ij,jk->ik``).

    These are no places in the model: paths leave them out.
    """
    return scope.startswith("eqx.nn.") or "," in scope or "->" in scope


def spelled(pattern: str) -> str:
    """`pattern` as reports show it: a path with slashes names modules, so ``*/router`` is ``module:*.router``."""
    return PREFIX + pattern.removeprefix(PREFIX).replace("/", ".") if "/" in pattern else pattern


def is_module_pattern(pattern: str) -> bool:
    """Whether `pattern` names modules."""
    return pattern.startswith(PREFIX)


@functools.lru_cache(maxsize=1024)
def parse(pattern: str) -> ModulePattern:
    """Parses `pattern`; whether modules of that name exist is known only when a model runs."""
    path = pattern.removeprefix(PREFIX)
    for parts in (2, 1):  # an operation with an overload has two parts
        modules, *tail = path.rsplit(".", parts)
        operation = op_catalog.canonical(".".join(tail))
        found = () if len(tail) < parts or op_catalog.is_glob(operation) else _named(operation)
        if found and (parts == 1 or found == (operation,)):
            return ModulePattern(
                op_catalog.glob(path), op_catalog.glob(modules), frozenset(found), modules.count(".") + 1
            )
    return ModulePattern(op_catalog.glob(path), op_catalog.glob(path), frozenset(), path.count(".") + 1)


def _named(operation: str) -> tuple[str, ...]:
    """Operations of a name of ATen, jaxpr or StableHLO."""
    return tuple(dict.fromkeys((*op_catalog.catalogued(operation), *op_catalog.native(operation))))


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    """Whether a pattern names the module at `path` or one around it."""
    names = path.split(".") if path else []
    around = (".".join(names[:depth]) for depth in range(len(names), -1, -1))
    # "*.attention" also matches at the top level, where no dot precedes it.
    return any(pattern.match(each) or pattern.match(f".{each}") for each in around)


@functools.lru_cache(maxsize=16384)
def reaches(pattern: str, operation: str, path: str) -> bool:
    """Whether `pattern` matches `operation` where it runs in the module at `path`; the model itself is ``""``."""
    parsed = parse(pattern)
    if operation in parsed.operations and _matches(parsed.operation_modules, path):
        return True
    return _computes(operation) and _matches(parsed.modules, path)


_Value = TypeVar("_Value")


def innermost(matches: Sequence[tuple[str, _Value]]) -> list[_Value]:
    """Of (pattern, value) that reach one operation: if all patterns are plain paths, those of the innermost module.

    ``module:decoder.linear`` also reaches the products of ``decoder.head``; ``module:decoder.head.linear`` wins there.
    Globs have no order: they must agree.
    """
    if any(op_catalog.is_glob(pattern) for pattern, _ in matches):
        return [value for _, value in matches]
    depths = [(parse(pattern).depth, value) for pattern, value in matches]
    most = max(depth for depth, _ in depths)
    return [value for depth, value in depths if depth == most]


def selects(pattern: str, path: str) -> bool:
    """Whether `pattern`, with or without ``module:``, names the module at `path` or one around it."""
    return _matches(op_catalog.glob(pattern.removeprefix(PREFIX).replace("/", ".")), path)


def nearest(pattern: str, paths: Iterable[str]) -> str:
    """What to write instead of a pattern that matched nothing, for the end of an error."""
    known = sorted(path for path in paths if path)
    if not known:
        return "; the program names no modules"
    wanted = pattern.removeprefix(PREFIX).removeprefix("*.")
    tails = {".".join(path.split(".")[start:]): path for path in known for start in range(path.count(".") + 1)}
    close = difflib.get_close_matches(wanted, tails, n=1, cutoff=0.6)
    shown = [tails[close[0]]] if close else known[:6]
    rest = ", ..." if not close and len(known) > 6 else ""
    return f"; {'nearest module' if close else 'modules of the program'}: {', '.join(shown)}{rest}"


def _computes(operation: str) -> bool:
    return op_catalog.catalogue().classes.get(operation) in COMPUTES


@functools.cache
def _computing_operations() -> frozenset[str]:
    catalogue = op_catalog.catalogue()
    return frozenset(n for n in catalogue.classes if _computes(n) and op_catalog.packet(n) not in catalogue.no_rule)


def operations(pattern: str) -> frozenset[str]:
    """Operations that `pattern` matches inside its modules."""
    return _computing_operations() | parse(pattern).operations


def problem(pattern: str, cast: Cast) -> str | None:
    """What is wrong with a rule for modules, or None."""
    if not pattern.removeprefix(PREFIX).strip(" ."):
        return f'{pattern!r} names no module; write its path, e.g. "module:*.attention" or "module:*.attention.softmax"'
    if cast in _SOME_OPERATIONS and not parse(pattern).operations:
        return (
            f"cast {cast!r} for {pattern!r}: most operations of a module cannot follow it; end the pattern in one that "
            f'can, e.g. "{pattern}.{_SOME_OPERATIONS[cast]}", or give it "fp32"'
        )
    return op_catalog.unfit(parse(pattern).operations, cast) or None


_SOME_OPERATIONS: Final[dict[Cast, str]] = {
    "fp32_out": "softmax",
    "fp32_append": "norm",
    "fp32_inside": "softmax",
    "low_fp32_out": "linear",
}
"""Casts that not every operation can follow -> one that can."""
