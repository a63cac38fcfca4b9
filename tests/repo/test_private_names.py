"""Private names of torch, JAX and CPython: each has a row with a reason, exists in this version, and is used."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import inspect
import pkgutil
import platform
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import private_names
import pytest
import torch
from packaging.requirements import Requirement
from source_tree import ROOT, modules

ROWS = tomllib.loads((ROOT / "xla_amp" / "private_names.toml").read_text("utf-8"))["private"]
NAMES = {name: row for row in ROWS for name in row["names"]}
OBJECTS = (
    torch.nn.Module(),
    torch.nn.Parameter(torch.zeros(1)),
    torch.optim.SGD([torch.zeros(1)]),
    torch.amp.GradScaler("cpu"),
)
"""Whose attributes a string may name."""
ELSEWHERE = ("xla_amp/integrations/", "xla_amp/backends/torch_xla/")
"""Files that use names of frameworks, which the table is not about."""


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


def rows_of(use: str) -> set[str]:
    """The names of the table that a use is covered by."""
    if use.startswith("?."):
        return {name for name in NAMES if name.endswith(use[1:])}
    return {name for name in NAMES if f"{use}.".startswith(f"{name}.")}


def is_on_the_way(use: str) -> bool:
    """Whether a name is a module in which names of the table are, or an operation of ATen under `torch`."""
    root, _, last = use.rpartition(".")
    return any(name.startswith(f"{use}.") for name in NAMES) or (root == "torch" and hasattr(torch.ops.aten, last))


def is_an_attribute(text: str) -> bool:
    """Whether a string is a name of torch's objects, and of no operation of ATen."""
    return any(hasattr(each, text) for each in OBJECTS) and not hasattr(torch.ops.aten, text)


def test_the_sources_use_what_the_table_has_and_nothing_else() -> None:
    used: set[str] = set()
    unknown = []
    sources = {path: (ROOT / path).read_text("utf-8") for path in modules().values() if not path.startswith(ELSEWHERE)}
    inherited = frozenset[str]().union(*map(private_names.defined, sources.values()))
    for path, source in sources.items():
        named = [(f"?.{text}", line) for text, line in private_names.texts(source) if is_an_attribute(text)]
        for use, line in [*private_names.uses(source, inherited), *named]:
            covered = rows_of(use)
            used |= covered
            if not covered and not is_on_the_way(use):
                unknown.append(f"{path}:{line}: {use} has no row in xla_amp/private_names.toml")
    assert unknown == []
    assert sorted(set(NAMES) - used) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._gone()", ["torch._C._gone"]),
        ("from jax._src import core\ncore.gone(1)", ["jax._src.core", "jax._src.core.gone"]),
        ("from torch.utils._pytree import tree_map as m", ["torch.utils._pytree.tree_map"]),
        ("import torch\ngetattr(torch._C, '_gone', None)", ["torch._C._gone"]),
        ("import torch\ngetattr(torch._C, f'_gone_{kind}_too')", ["torch._C._gone_{}_too"]),
        ("def f(x):\n    return x._gone.public", ["?._gone"]),
        ("class A:\n    def f(self):\n        self._mine = 1\n    def g(self, x):\n        return x._mine", []),
        ("from xla_amp.lazy import trace\ntrace.lock._gone()", ["?._gone"]),
        ("aten = torch.ops.aten\naten._to_copy.default._schema", ["?._schema"]),
        ("import os, xla_amp.lazy\nos._exit(1)\nx._xla_amp\nx.__dict__\nx._replace(a=1)", []),
    ],
)
def test_uses_are_found(source: str, expected: list[str]) -> None:
    assert sorted({name for name, _ in private_names.uses(source)}) == expected


def test_strings_that_name_attributes_are_found() -> None:
    source = '"""_buffers"""\nNAMES = ("_modules", "modules", "_no name")\ndef f(x):\n    vars(x)["_a"]'
    assert list(private_names.texts(source)) == [("_modules", 2), ("_a", 4)]
    assert is_an_attribute("_modules")
    assert not is_an_attribute("_to_copy")
