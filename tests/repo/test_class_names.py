"""Names of classes and types in the package: one name has one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from source_tree import ROOT, modules

SHARED = {
    "Generator": "torch.Generator: the lazy device's, and torch's own with a metaclass that accepts both.",
    "Metrics": "Counters of an engine: the protocol, and the lazy device's.",
    "Monitor": "What `monitor` of a front returns.",
    "MonitorCallback": "`xla_amp.monitor` as a callback, of Lightning and of transformers.",
    "Read": "A value on its way to the host: the protocol, and each engine's.",
    "_Thread": "`threading.local` with what its file keeps for each thread.",
}
"""Names that several files define -> their one meaning."""


def defined(sources: dict[str, str]) -> dict[str, list[str]]:
    """Name of each class, also in functions and classes, and type alias -> its files, once for each definition."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                found[ast.unparse(node.target)].append(path)
    return found


def repeated(sources: dict[str, str]) -> dict[str, list[str]]:
    return {name: paths for name, paths in defined(sources).items() if len(paths) > 1}


def test_a_class_name_has_one_meaning():
    found = repeated({path: (ROOT / path).read_text("utf-8") for path in modules().values()})
    assert {name: paths for name, paths in found.items() if name not in SHARED} == {}
    assert [name for name in SHARED if name not in found] == [], "a row without a repeated name"


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("class Row: pass", "class Row: pass", ["Row"]),
        ("class Row: pass", "def f():\n    class Row: pass", ["Row"]),
        ("class A:\n    class Row: pass\nclass Row: pass", "", ["Row"]),
        ("class Row: pass", "class OtherRow(Row): pass", []),
        ("Row: TypeAlias = int", "class Row: pass", ["Row"]),
        ("from b import Row", "class Row: pass", []),
    ],
)
def test_the_check_can_fail(first: str, second: str, names: list[str]):
    assert list(repeated({"a.py": first, "b.py": second})) == names
