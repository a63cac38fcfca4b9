"""The layers: a module imports its own folder and what lies below, and only the libraries its layer may load."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import source_tree
from source_tree import Import

FRONTS = ("xla_amp.pytorch", "xla_amp.jax", "xla_amp.stablehlo", "xla_amp.tools")
ENGINES = ("xla_amp.lazy", "xla_amp.backends.torch_xla")
NAME_TABLES = {
    "xla_amp.jax",
    "xla_amp.stablehlo",
}  # `__init__` files that load their public names when they are first used
PEERS = {0, 1, 9}  # layers of single files, which may import each other; fronts and deeper layers are folders


def problems(module: str, imported: list[Import], known: dict[str, str]) -> list[str]:
    """What is wrong with the imports of `module`, one line each."""
    placed = source_tree.layer(module)
    if placed is None:
        return [f"{module}: no row of LAYERS in scripts/source_tree.py names it"]
    level, family = placed
    found = []
    for item in imported:
        target = source_tree.resolve(item.name, known)
        where = f"{known.get(module, module)}:{item.line}"
        if target is None:
            top = item.name.partition(".")[0]
            allowed = source_tree.THIRD_PARTY.get(level)
            if item.runtime and allowed is not None and top not in sys.stdlib_module_names | allowed:
                found.append(f"{where}: layer {level} may not load {top}")
            continue
        if target == module or target in source_tree.LOADED_BY_NAME.get(module, ()):
            continue
        below = source_tree.layer(target)
        if below is None:
            continue  # reported where that module is checked
        if module in NAME_TABLES and below[1] == "xla_amp.tools":
            continue
        inside = below[1] == family or (below[0] == level and level in PEERS)
        if family == "xla_amp.lowering" and not inside and target not in source_tree.LOWERING_IMPORTS:
            found.append(f"{where}: lowering may not import {target}")
        elif below[0] >= level and not inside:
            found.append(f"{where}: {module} (layer {level}) may not import {target} (layer {below[0]})")
    return found


def test_every_module_imports_downwards():
    known = source_tree.modules()
    found = [line for name, path in known.items() for line in problems(name, source_tree.file_imports(path), known)]
    assert found == []


def engine_imports(module: str, imported: list[Import], known: dict[str, str]) -> list[str]:
    """Imports by which a front bypasses the engine protocol (`xla_amp.backends.base`), one line each."""
    if module in NAME_TABLES or not f"{module}.".startswith(tuple(f"{front}." for front in FRONTS)):
        return []
    return [
        f"{known.get(module, module)}:{item.line}: {module} may not import {item.name}, only the engine protocol"
        for item in imported
        if f"{item.name}.".startswith(tuple(f"{engine}." for engine in ENGINES))
    ]


def test_fronts_use_the_engine_protocol_only():
    known = source_tree.modules()
    found = [
        line for name, path in known.items() for line in engine_imports(name, source_tree.file_imports(path), known)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("xla_amp.pytorch.autocast.casting", "from xla_amp.lazy.ops import codegen", 1),
        ("xla_amp.pytorch.optim.syncfree", "def f():\n    import xla_amp.backends.torch_xla", 1),
        ("xla_amp.jax.autocast", "if TYPE_CHECKING:\n    from xla_amp.lazy.interop import arrays", 1),
        ("xla_amp.tools.overflow.on_pytorch", "sys.modules.get('xla_amp.lazy.capture.compiled_step')", 1),
        ("xla_amp.stablehlo.io", "from xla_amp.backends import base, devices", 0),
        ("xla_amp.jax", "PUBLIC = {'to_jax': 'xla_amp.lazy.interop.arrays'}", 0),
    ],
)
def test_the_protocol_check_can_fail(module, source, found):
    imported = list(source_tree.imports(source, package=module.rpartition(".")[0]))
    assert len(engine_imports(module, imported, KNOWN)) == found


def dependencies(files: dict[str, list[Import]], known: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports while it is loaded, in functions, or by a name that it contains."""
    return {
        name: {
            target
            for item in imported
            if item.runtime and (target := source_tree.resolve(item.name, known)) not in (None, name)
        }
        for name, imported in files.items()
    }


def test_no_module_imports_itself_through_others():
    known = source_tree.modules()
    edges = dependencies({name: source_tree.file_imports(path) for name, path in known.items()}, known)
    for name, targets in source_tree.LOADED_BY_NAME.items():
        assert set(targets) <= edges[name], f"LOADED_BY_NAME: {name} does not import all of these"
        edges[name] -= set(targets)
    assert source_tree.cycles(edges) == []


@pytest.mark.parametrize(
    "source",
    [
        "from xla_amp.common import types",
        "importlib.import_module('xla_amp.common.types')",
        "PUBLIC = {'Cast': 'xla_amp.common.types'}",
    ],
)
def test_the_check_of_circles_can_fail(source):
    known = {"xla_amp": "xla_amp/__init__.py", "xla_amp.common.types": "xla_amp/common/types.py"}
    files = {
        "xla_amp": list(source_tree.imports(source, "xla_amp")),
        "xla_amp.common.types": list(source_tree.imports("import xla_amp", "xla_amp")),
    }
    assert source_tree.cycles(dependencies(files, known)) == [["xla_amp", "xla_amp.common.types"]]


def test_a_cycle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert source_tree.cycles(edges) == [["a", "b", "c"]]


def extensions(module: str, source: str, known: dict[str, str]) -> list[str]:
    """How `module` puts functions or values into another, or lets others do so, without `events.Point`."""
    package = module if known.get(module, "").endswith("/__init__.py") else module.rpartition(".")[0]
    reached = ((line, name, name.rpartition(".")[0]) for line, name in source_tree.changed(source, package))
    return [f"{module}:{line}: assigns or changes {name}" for line, name, owner in reached if owner in known] + [
        f"{module}:{line}: {name} should be an events.Point" for line, name in source_tree.callbacks(source)
    ]


def test_modules_extend_each_other_by_extension_points_only():
    known = source_tree.modules()
    found = [
        line
        for name, path in known.items()
        for line in extensions(name, (source_tree.ROOT / path).read_text(encoding="utf-8"), known)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from xla_amp.common import config\nconfig.watch = print", 1),
        ("def f():\n    from ..common import config as c\n    c.depth, other = 1, 2", 1),
        ("import xla_amp.common.config\nxla_amp.common.config.count += 1", 1),
        ("from xla_amp.common import config\ndel config.watch\nconfig.TABLE['x'] = print", 2),
        ("from xla_amp.common import config\nconfig.after.append(print)", 1),
        ("after: list[Callable[[], None]] = []\nask: Callable[[], bool] | None = None", 2),
        ("from xla_amp.common import config\nconfig.point.subscribe(print)\nconfig.engine().name = ''", 0),
    ],
)
def test_the_check_of_extensions_can_fail(source, found):
    assert len(extensions("xla_amp.policy.load", source, KNOWN)) == found


def test_no_folder_of_the_package_is_crowded():
    entries = {name for name in source_tree.modules() if name.removeprefix("xla_amp.") in source_tree.ENTRIES}
    paths = [path for name, path in source_tree.modules().items() if name not in entries and "__init__" not in path]
    folders = Counter(path.rpartition("/")[0] for path in paths)
    assert [folder for folder, count in folders.items() if count > 16] == []


KNOWN = {
    name: name.replace(".", "/") + ".py"
    for name in (
        "xla_amp",
        "xla_amp.common.types",
        "xla_amp.common.loss_scaling",
        "xla_amp.common.config",
        "xla_amp.policy",
        "xla_amp.lowering.math.foreach",
        "xla_amp.backends.base",
        "xla_amp.jax.scale",
        "xla_amp.pytorch.optim.grad_scaler",
        "xla_amp.cli",
    )
}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("xla_amp.common.types", "import numpy", "layer 0 may not load numpy"),
        (
            "xla_amp.common.types",
            "from xla_amp.common import config",
            "types (layer 0) may not import xla_amp.common.config (layer 1)",
        ),
        ("xla_amp.common.loss_scaling", "from xla_amp.common.config import engine", None),
        ("xla_amp.policy.load", "if TYPE_CHECKING:\n    import torch", None),
        ("xla_amp.policy.load", "if TYPE_CHECKING:\n    import xla_amp.cli", "may not import xla_amp.cli (layer 9)"),
        (
            "xla_amp.lowering.nn.loss",
            "from xla_amp.common.config import engine",
            "lowering may not import xla_amp.common.config",
        ),
        ("xla_amp.lowering.math.foreach", "from xla_amp.common import loss_scaling", None),
        ("xla_amp.lazy.programs.execute", "def f():\n    import xla_amp.jax.scale", "may not import xla_amp.jax.scale"),
        ("xla_amp.backends.base", "import_module('xla_amp.cli')", "may not import xla_amp.cli (layer 9)"),
        (
            "xla_amp.jax.scale",
            "from xla_amp.pytorch.optim import grad_scaler",
            "may not import xla_amp.pytorch.optim.grad_scaler",
        ),
        ("xla_amp.cli", "import xla_amp", None),
        ("xla_amp.newcomer", "", "no row of LAYERS"),
    ],
)
def test_the_check_can_fail(module, source, message):
    imported = list(source_tree.imports(source, package=module.rpartition(".")[0]))
    found = problems(module, imported, KNOWN)
    if message is None:
        assert found == []
    else:
        assert len(found) == 1
        assert message in found[0]
