"""The private names of other libraries that the package uses, found in its sources."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Set
from typing import Any

from source_tree import nodes

PUBLIC = frozenset({"_asdict", "_fields", "_make", "_replace", "_exit", "_thread"})
"""Names with an underscore that Python documents: of named tuples, `os._exit`, the module `_thread`."""
OURS = "_xla_amp"
"""Prefix of attributes that the package adds to objects of other libraries."""
OPERATIONS = "torch.ops."
"""Below it a namespace and an operation have names of schemas."""


def is_private(part: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return part.startswith("_") and not part.startswith(("__", OURS)) and part not in PUBLIC


def uses(source: str, inherited: Set[str] = frozenset()) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each private name of another library; ``?._x`` is an attribute of an unknown object.

    A file's own names are those that it defines; no file of the package uses another's private names.

    Args:
        source: of a file of the package.
        inherited: names that ``self`` may have from base classes in other files (`defined`).
    """
    own, imported = defined(source), list(_imports(source))
    known = {"aten": "torch.ops.aten", **{name: path for name, path, _ in imported}}
    for _, path, line in imported:
        if not path.startswith("xla_amp") and any(map(is_private, path.split("."))):
            yield path, line
    inner: set[int] = set()
    for node in nodes(source):
        if id(node) in inner:
            continue
        base, parts = _chain(node, inner)
        if not parts:
            continue
        root = known.get(base.id, "") if isinstance(base, ast.Name) else ""
        full = ".".join([root, *parts])
        if root and not full.startswith((OPERATIONS, "xla_amp")):
            if any(map(is_private, full.split("."))):
                yield full, node.lineno
            continue
        members = full.split(".")[4:] if full.startswith(OPERATIONS) else parts
        for part in filter(is_private, members):
            if part not in own and not (_is_own(base) and part in inherited):
                yield f"?.{part}", node.lineno


def texts(source: str) -> Iterator[tuple[str, int]]:
    """(text, line) of each string that reads as a private name, as `vars` of an object takes it; no docstrings."""
    alone = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in alone else None
        if isinstance(text, str) and text.isidentifier() and is_private(text):
            yield text, node.lineno


def _chain(node: ast.AST, inner: set[int]) -> tuple[Any, list[str]]:
    """What a chain of attributes begins with, and their names; `inner` gets the nodes of the chain."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            following: ast.AST = node.value
        elif isinstance(node, ast.Call) and (name := _asked(node)) is not None:
            parts.insert(0, name)
            following = node.args[0]
        else:
            return node, parts
        inner.add(id(node))
        node = following


def _asked(call: ast.Call) -> str | None:
    """The attribute that ``getattr(x, "name")`` or ``hasattr`` asks for, with ``{}`` for a part that is computed."""
    if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr") and len(call.args) > 1:
        value = call.args[1]
        parts = value.values if isinstance(value, ast.JoinedStr) else [value]
        name = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        return None if name.startswith(("{}", "_{}")) else name
    return None


def _imports(source: str) -> Iterator[tuple[str, str, int]]:
    """(name in the file, dotted name, line) of each import."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for each in node.names:
                name = each.asname or each.name.partition(".")[0]
                yield name, each.name if each.asname else name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}", node.lineno


@functools.cache
def defined(source: str) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes of ``self`` or ``cls``."""
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
    return found


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
