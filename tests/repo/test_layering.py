"""The layers: a module imports its own folder and what lies below, and only the libraries its layer may load."""

from __future__ import annotations

import sys

import pytest
import source_tree
from source_tree import Import

PEERS = {0, 1, 6}  # layers of single files, which may import each other; fronts and deeper layers are folders


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
        if target == module:
            continue
        below = source_tree.layer(target)
        if below is None:
            continue  # reported where that module is checked
        inside = below[1] == family or (below[0] == level and level in PEERS)
        if family == "xla_amp.lowering" and not inside:
            found.append(f"{where}: lowering is a leaf, it may not import {target}")
        elif below[0] >= level and not inside:
            found.append(f"{where}: {module} (layer {level}) may not import {target} (layer {below[0]})")
    return found


def test_every_module_imports_downwards():
    known = source_tree.modules()
    found = [line for name, path in known.items() for line in problems(name, source_tree.file_imports(path), known)]
    assert found == []


KNOWN = {
    name: name.replace(".", "/") + ".py"
    for name in (
        "xla_amp",
        "xla_amp.vocab",
        "xla_amp.scale",
        "xla_amp.config",
        "xla_amp.policy",
        "xla_amp.lowering.amp",
        "xla_amp.engines.base",
        "xla_amp.jax.scale",
        "xla_amp.pytorch.grad_scaler",
        "xla_amp.cli",
    )
}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("xla_amp.vocab", "import tomllib", None),
        ("xla_amp.vocab", "import numpy", "layer 0 may not load numpy"),
        ("xla_amp.vocab", "from xla_amp import config", "vocab (layer 0) may not import xla_amp.config (layer 1)"),
        ("xla_amp.scale", "from xla_amp.config import engine", None),
        ("xla_amp.policy.load", "from . import resolve", None),
        ("xla_amp.policy.load", "import torch", "layer 2 may not load torch"),
        ("xla_amp.policy.load", "if TYPE_CHECKING:\n    import torch", None),
        ("xla_amp.policy.load", "if TYPE_CHECKING:\n    import xla_amp.cli", "may not import xla_amp.cli (layer 6)"),
        ("xla_amp.lowering.loss", "from xla_amp.lowering.amp import update_scale", None),
        ("xla_amp.lowering.loss", "from xla_amp.vocab import CASTS", "lowering is a leaf"),
        ("xla_amp.lowering.loss", "import torch", "layer 3 may not load torch"),
        ("xla_amp.engines.jax.cut", "from ..base import Engine", None),
        ("xla_amp.engines.jax.cut", "def f():\n    import xla_amp.jax.scale", "may not import xla_amp.jax.scale"),
        ("xla_amp.engines.base", "import_module('xla_amp.cli')", "may not import xla_amp.cli (layer 6)"),
        ("xla_amp.engines.base", "MODULES = {'x': 'xla_amp.cli'}", "may not import xla_amp.cli (layer 6)"),
        ("xla_amp.jax.scale", "from xla_amp.pytorch import grad_scaler", "may not import xla_amp.pytorch.grad_scaler"),
        ("xla_amp.jax.scale", "from xla_amp import autocast", "may not import xla_amp (layer 6)"),
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
