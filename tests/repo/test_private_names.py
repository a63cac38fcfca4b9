"""Private names of torch, JAX and CPython: each has a row with a reason, exists in this version, and is used."""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.metadata
import inspect
import pkgutil
import platform
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from source_tree import ROOT, modules, nodes

TABLE = tomllib.loads((ROOT / "xla_amp" / "private_names.toml").read_text("utf-8"))
ROWS = TABLE["private"]
NAMES = {name: row for row in ROWS for name in row["names"]}
OBJECTS = (
    torch.nn.Module(),
    torch.nn.Parameter(torch.zeros(1)),
    torch.optim.SGD([torch.zeros(1)]),
    torch.amp.GradScaler("cpu"),
)
"""Whose attributes a string may name."""
PUBLIC = frozenset({"_asdict", "_fields", "_make", "_replace", "_exit", "_thread"})
"""Names with an underscore that Python documents: of named tuples, `os._exit`, the module `_thread`."""
ELSEWHERE = ("xla_amp/integrations/", "xla_amp/engines/torch_xla/")
"""Files that use names of frameworks, which the table is not about."""
SOURCES = {path: (ROOT / path).read_text("utf-8") for path in modules().values() if not path.startswith(ELSEWHERE)}


def found(name: str) -> bool:
    """Whether a private name exists, as an attribute or in the Python source of the class or function that has it."""
    holder, _, last = name.rpartition(".")
    try:
        owner = _resolved(holder)
        if hasattr(owner, last):
            return True
        if isinstance(owner, ModuleType):
            return importlib.util.find_spec(name) is not None
    except (AttributeError, ImportError):
        return False
    try:
        return re.search(rf"\b{last}\b", inspect.getsource(owner)) is not None
    except (OSError, TypeError):
        return False


def _resolved(holder: str) -> Any:
    if holder == "libc10":
        return ctypes.CDLL(str(next(Path(torch.__path__[0], "lib").glob("*c10.*"))))
    if "(" in holder or holder.startswith("torch.ops"):
        root = holder.partition(".")[0]
        return eval(holder, {root: importlib.import_module(root)})
    return pkgutil.resolve_name(holder)


def is_for_this_version(row: dict[str, Any]) -> bool:
    wanted = Requirement(row["versions"])
    version = platform.python_version() if wanted.name == "python" else importlib.metadata.version(wanted.name)
    return wanted.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    row = NAMES[name]
    if is_for_this_version(row):
        assert found(name), f"{name} is gone. It is for: {row['why']} Without it {row['without']}."


@pytest.mark.parametrize("name", ["torch._C._gone", "torch._gone.name", "torch.Tensor._gone", "jax.jit(abs)._gone"])
def test_a_name_that_is_gone_is_found(name: str) -> None:
    assert not found(name)


def test_the_page_tells_the_number() -> None:
    text = (ROOT / "docs" / "limits.md").read_text("utf-8")
    [number] = re.findall(r"uses (\d+)\s+private\s+names\s+of\s+torch,\s+JAX\s+and\s+CPython", text)
    assert int(number) == len(NAMES) == sum(len(row["names"]) for row in ROWS)


@pytest.mark.parametrize("row", TABLE["trick"], ids=lambda row: row["word"])
def test_a_trick_is_where_its_row_says_and_the_plain_form_was_measured(row: dict[str, str]) -> None:
    assert re.search(rf"\b{row['word']}\b", SOURCES[row["file"]])
    assert re.search(r"\d", row["plain"])


def used(source: str) -> set[str]:
    """Names with a private part that a file takes from other libraries; ``?._x`` is one of an unknown object."""
    imported = {"aten": "torch.ops.aten"}
    names = []
    for node in nodes(source):
        for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            path = f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name
            root = path if each.asname or isinstance(node, ast.ImportFrom) else path.partition(".")[0]
            imported[each.asname or root.rpartition(".")[2]] = root
            names.append(path)
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            full = f"{imported.get(root, '?')}.{rest}"
            here = not re.fullmatch(r"[\w.]+", full) or full.startswith(("torch.ops.", "xla_amp."))
            names.append(f"?.{node.attr}" if here else full)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names.append(f"?.{ast.unparse(node.args[1]).strip(QUOTES).partition('.')[0]}")
        elif isinstance(node, ast.Constant) and str(node.value).startswith("_"):
            names += [f"?.{node.value}" for each in OBJECTS if hasattr(each, node.value)]
    return {name for name in names if any(map(is_private, name.split("."))) and not name.startswith("xla_amp.")}


QUOTES = "f'"
"""Around the name that ``getattr`` asks for."""


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith(("__", "_xla_amp", "_{")) and part not in PUBLIC


def defined(source: str) -> Iterator[str]:
    """Names of functions, classes, variables and attributes of ``self`` that a file defines."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_the_sources_use_what_the_table_has_and_nothing_else() -> None:
    own = {name for source in SOURCES.values() for name in defined(source)}
    own |= {re.split(r"::|\.", name)[1] for name in torch._C._dispatch_get_all_op_names()}
    own |= {part for name in NAMES for part in name.split(".")}

    def is_known(name: str) -> bool:
        root, _, part = name.rpartition(".")
        if root in ("?", "torch") and part in own:
            return True
        return any(f"{name}.".startswith(f"{row}.") or f"{row}.".startswith(f"{name}.") for row in NAMES)

    everywhere = {(path, name) for path, source in SOURCES.items() for name in used(source)}
    assert sorted(each for each in everywhere if not is_known(each[1])) == []
    words = {word for source in SOURCES.values() for word in re.findall(r"\w+", source)}
    assert [name for name in NAMES if name.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._gone()", {"torch._C", "torch._C._gone"}),
        ("from jax._src import core\ncore.gone(1)", {"jax._src.core", "jax._src.core.gone"}),
        ("from torch.utils._pytree import tree_map as m", {"torch.utils._pytree.tree_map"}),
        ("import torch\ngetattr(torch._C, '_gone', None)", {"torch._C", "?._gone"}),
        ("def f(x):\n    return x._gone.public", {"?._gone"}),
        ("from xla_amp.lazy import trace\ntrace.lock._gone()", {"?._gone"}),
        ("aten = torch.ops.aten\naten._to_copy.default._schema", {"?._to_copy", "?._schema"}),
        ("import os, xla_amp.lazy\nos._exit(1)\nx._xla_amp\nx.__dict__\nx._replace(a=1)", set()),
        ('"""_of_no_object"""\nvars(x)["_modules"]', {"?._modules"}),
    ],
)
def test_uses_are_found(source: str, expected: set[str]) -> None:
    assert used(source) == expected
