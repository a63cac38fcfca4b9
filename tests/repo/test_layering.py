"""The layers: a module imports its own folder and what lies below, and only the libraries its layer may load."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import source_tree
from source_tree import Import

FRONTS = ("xla_amp.pytorch.", "xla_amp.jax.", "xla_amp.stablehlo.", "xla_amp.tools.")
ENGINES = ("xla_amp.lazy.", "xla_amp.engines.torch_xla.")
NAME_TABLES = {"xla_amp.jax"}  # `__init__` files that load public names of upper layers when they are first used
# Layers of single files, which may import each other; fronts and deeper layers are folders.
PEERS = {0, 1, len(source_tree.LAYERS) - 1}
KNOWN = source_tree.modules()
SOURCES = {module: (source_tree.ROOT / path).read_text("utf-8") for module, path in KNOWN.items()}


def problems(module: str, source: str) -> Iterator[str]:
    """What is wrong with the imports of `module`, and with how it extends other modules."""
    package = source_tree.package_of(module)
    if source_tree.layer(module) is None:
        yield "no row of LAYERS in scripts/source_tree.py names it"
        return
    for item in source_tree.imports(source, package):
        if wrong := import_problem(module, item):
            yield f"line {item.line}: {wrong}"
    for line, name in source_tree.changed(source, package):
        if name.rpartition(".")[0] in KNOWN:
            yield f"line {line}: assigns or changes {name}"
    for line, name in source_tree.callbacks(source):
        yield f"line {line}: {name} should be an events.Point"


def import_problem(module: str, item: Import) -> str | None:
    level, family = source_tree.layer(module)
    is_front = f"{module}.".startswith(FRONTS) and module not in NAME_TABLES
    if is_front and f"{item.name}.".startswith(ENGINES):
        return f"may not import {item.name}, only the engine protocol (xla_amp.engines.base)"
    target = source_tree.resolve(item.name, KNOWN)
    if target is None:
        top = item.name.partition(".")[0]
        allowed = source_tree.THIRD_PARTY.get(level)
        refused = item.runtime and allowed is not None and top not in sys.stdlib_module_names | allowed
        return f"layer {level} may not load {top}" if refused else None
    below = source_tree.layer(target)
    if target == module or below is None:
        return None  # a module without a layer is reported where it is checked
    if module in NAME_TABLES and below[1] == "xla_amp.tools":
        return None
    inside = below[1] == family or (below[0] == level and level in PEERS)
    if family == "xla_amp.lowering" and not inside and target not in source_tree.LOWERING_IMPORTS:
        return f"lowering may not import {target}"
    if below[0] >= level and not inside:
        return f"layer {level} may not import {target} (layer {below[0]})"
    return None


def test_every_module_imports_downwards_and_extends_others_by_extension_points_only():
    assert [f"{name}: {problem}" for name, source in SOURCES.items() for problem in problems(name, source)] == []


def dependencies(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports while it is loaded, in functions, or by a name that it contains."""
    return {
        name: {
            target
            for item in source_tree.imports(source, source_tree.package_of(name))
            if item.runtime and (target := source_tree.resolve(item.name, KNOWN)) not in (None, name)
        }
        for name, source in sources.items()
    }


def test_no_module_imports_itself_through_others():
    assert source_tree.cycles(dependencies(SOURCES)) == []


def room_of(module: str, package: str) -> str:
    """The folder or file directly in `package` that `module` is in; empty for modules elsewhere, and for its face."""
    return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else ""


def circles_of_rooms(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The rooms that import each other, through whatever files, in each package."""
    found = []
    parts = [name.split(".") for name in edges]
    for package in sorted({".".join(each[:depth]) for each in parts for depth in range(1, len(each))}):
        rooms: dict[str, set[str]] = {}
        for name, targets in edges.items():
            inside = {room_of(target, package) for target in targets} - {"", room := room_of(name, package)}
            if room:
                rooms.setdefault(room, set()).update(inside)
        found += [[f"{package}.{room}" for room in circle] for circle in source_tree.cycles(rooms)]
    return found


def test_no_room_imports_itself_through_others():
    edges = dependencies(SOURCES)
    for table in NAME_TABLES:  # names that it gives users; nothing is loaded for it
        edges[table] = {target for target in edges[table] if source_tree.layer(target)[1] != "xla_amp.tools"}
    assert circles_of_rooms(edges) == []


def test_a_circle_of_rooms_is_found_though_no_files_import_each_other():
    sources = {"xla_amp.lazy.graph.tape": "import xla_amp.lazy.ops.rnn", "xla_amp.lazy.ops.rnn": ""}
    below = {"xla_amp.lazy.ops.sparse": "import xla_amp.lazy.graph.trace", "xla_amp.lazy.graph.trace": ""}
    edges = dependencies({**sources, **below})
    assert source_tree.cycles(edges) == []
    assert circles_of_rooms(edges) == [["xla_amp.lazy.graph", "xla_amp.lazy.ops"]]


def test_each_room_begins_with_its_sentence_on_the_page_of_the_architecture():
    page = (source_tree.ROOT / "docs/architecture.md").read_text("utf-8")
    told = {
        (path, int(level)): idea for level, path, idea in re.findall(r"^\| (\d+) \| `(\S+)/` \| (.+) \|$", page, re.M)
    }
    rooms = {name: path for name, path in KNOWN.items() if path.endswith("/__init__.py")}
    assert told == {
        (path.removesuffix("/__init__.py"), source_tree.layer(name)[0]): (
            ast.get_docstring(ast.parse(SOURCES[name])).partition("\n")[0]
        )
        for name, path in rooms.items()
    }
    assert [idea for idea in told.values() if not idea.endswith(".")] == []


def test_a_circle_is_found():
    sources = {"xla_amp.errors": "import xla_amp.common.types", "xla_amp.common.types": "PUBLIC = 'xla_amp.cli'"}
    assert source_tree.cycles(dependencies({**sources, "xla_amp.cli": "from xla_amp import errors"})) == [
        ["xla_amp.cli", "xla_amp.common.types", "xla_amp.errors"]
    ]


def test_no_folder_of_the_package_is_crowded():
    paths = [path for name, path in KNOWN.items() if name.removeprefix("xla_amp.") not in source_tree.ENTRIES]
    folders = Counter(path.rpartition("/")[0] for path in paths if "__init__" not in path)
    assert [folder for folder, count in folders.items() if count > 16] == []


@pytest.mark.parametrize(
    ("module", "source", "messages"),
    [
        ("xla_amp.common.types", "import numpy", ["layer 0 may not load numpy"]),
        ("xla_amp.policy.load", "if TYPE_CHECKING:\n    import torch", []),
        ("xla_amp.policy.load", "if TYPE_CHECKING:\n    import xla_amp.cli", ["xla_amp.cli (layer 15)"]),
        ("xla_amp.lowering.nn.loss", "from xla_amp.common.config import engine", ["lowering may not import"]),
        ("xla_amp.lazy.programs.execute", "def f():\n    import xla_amp.jax", ["xla_amp.jax (layer 12)"]),
        ("xla_amp.engines.base", "import_module('xla_amp.cli')", ["xla_amp.cli (layer 15)"]),
        ("xla_amp.cli", "import xla_amp", []),
        ("xla_amp.newcomer", "", ["no row of LAYERS"]),
        ("xla_amp.pytorch.autocast.casting", "from xla_amp.lazy.ops import codegen", ["engine protocol"]),
        ("xla_amp.jax.api", "if TYPE_CHECKING:\n    from xla_amp.lazy.interop import arrays", ["engine protocol"]),
        ("xla_amp.tools.monitor.on_jax", "get('xla_amp.lazy.capture')", ["engine protocol"]),
        ("xla_amp.stablehlo.io", "from xla_amp.engines import base, devices", []),
        ("xla_amp.jax", "PUBLIC = {'to_jax': 'xla_amp.lazy.interop.arrays'}", []),
        ("xla_amp.policy.load", "from xla_amp.common import config\nconfig.watch = print", ["assigns"]),
        ("xla_amp.policy.load", "from xla_amp.common import config\ndel config.watch", ["assigns"]),
        ("xla_amp.policy.load", "from xla_amp.common import config\nconfig.T['x'].append(1)", ["assigns"]),
        ("xla_amp.policy.load", "after: list[Callable[[], None]] = []", ["events.Point"]),
        ("xla_amp.policy.load", "from xla_amp.common import config\nconfig.point.subscribe(print)", []),
    ],
)
def test_problems_are_found(module, source, messages):
    found = list(problems(module, source))
    assert len(found) == len(messages)
    assert all(message in problem for message, problem in zip(messages, found, strict=True))
