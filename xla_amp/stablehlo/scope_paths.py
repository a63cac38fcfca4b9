"""Paths of modules in a StableHLO program, from the name scopes in its locations, as rules for modules name them.

JAX writes ``jit(step)/transpose(jvp(encoder))/layer_0/dot_general``; the path is ``encoder.layer_0``.  A function that
is called has the path of the call before the paths inside it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Final

from xla_amp.policy import module_patterns
from xla_amp.stablehlo import ir, locations, surgery

_WRAPPED: Final = re.compile(r"^[a-z_]+\((.*)\)$")
_CALLS: Final = re.compile(
    r"^(checkpoint|rematted_computation|closed_call|core_call|eval_jaxpr|remat\d?|custom_[jv][jv]p_call|pjit)$"
)
_PARTS: Final = {"while": re.compile(r"^(body|cond)$"), "cond": re.compile(r"^branch_\d+_fun$")}
"""Segments that JAX writes for loops and branches -> what follows them."""


def own_path(operation: Any, location: locations.Location | None = None) -> str | None:
    """Path in the location of an operation; None if the location has no name.

    `location`: of the operation, where it is known.
    """
    name = (location or locations.of(operation)).name
    return None if name is None else _path(name)


@functools.lru_cache(maxsize=4096)
def _path(name: str) -> str:
    """The path in the name of a location."""
    parts: list[str] = []
    segments = name.split("/")[:-1]
    for index, segment in enumerate(segments):
        inner, function = segment, False
        while match := _WRAPPED.match(inner):
            function = function or inner.startswith(("jit(", "pjit("))
            inner = match.group(1)
        before = segments[index - 1] if index else ""
        after = segments[index + 1] if index + 1 < len(segments) else ""
        control = (before in _PARTS and _PARTS[before].match(inner)) or (inner in _PARTS and _PARTS[inner].match(after))
        if inner and not (function or control or _CALLS.match(inner) or module_patterns.is_no_place(inner)):
            parts.append(inner)
    return ".".join(parts)


def has_names(module: Any) -> bool:
    """Whether a location of the program has a name; text that was printed without locations has none."""
    return any(own_path(operation) is not None for operation in ir.operations(module.operation))


class ModulePaths:
    """Paths of the operations of a module, whose functions have been cloned for their calls."""

    def __init__(self, module: Any) -> None:
        self._functions: dict[str, str] = {}
        for name, path, _ in calls(module):
            self._functions.setdefault(name, path)
        self.seen: set[str] = set()
        """Paths that `of` has returned."""

    def of(self, operation: Any, function: str | None = None, location: locations.Location | None = None) -> str:
        """Path of an operation in a function, by default in the one that contains it; `location` as for `own_path`."""
        name = function if function is not None else enclosing(operation)
        path = module_patterns.joined(self._functions.get(name, ""), own_path(operation, location) or "")
        self.seen.add(path)
        return path


def calls(module: Any) -> Iterator[tuple[str, str, Any]]:
    """(function, path of the call, call) for each call, a caller's calls after the calls of the caller."""
    functions = ir.functions(module)
    waiting = [(name, "") for name, function in functions.items() if not ir.is_private(function)]
    yield from ((name, "", None) for name, _ in waiting)
    seen = set(waiting)
    while waiting:
        caller, base = waiting.pop(0)
        for operation in ir.operations(ir.functions(module)[caller]):
            if operation.name != "func.call":
                continue
            path = module_patterns.joined(base, own_path(operation) or "")
            yield operation.attributes[surgery.CALLEE].value, path, operation
            callee = operation.attributes[surgery.CALLEE].value  # a clone, perhaps
            if (callee, path) not in seen:
                seen.add((callee, path))
                waiting.append((callee, path))


def enclosing(operation: Any) -> str:
    """Name of the function that contains an operation; empty outside of functions."""
    while operation is not None and operation.name != "func.func":
        operation = surgery.parent(operation)
    return "" if operation is None else surgery.name_of(operation)
