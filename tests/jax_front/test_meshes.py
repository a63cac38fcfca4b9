"""Programs on meshes of four devices, with axes that are explicit, distributed by the compiler, and both.

Each is compared with float32 on one device, and its results' shardings with those of the same program without autocast.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import forked
import pytest

SCRIPT = Path(__file__).with_name("programs_on_four_devices.py")
QUICK = {"explicit": ("block",)}
"""Mesh -> programs of a plain run; `test_all_programs` has the others."""
BOTH_AXES = ("explicit", "auto", "mixed", "mixed tensor")
MESHES = {
    "auto_axes": ("data", "tensor", "explicit", "mixed", "mixed tensor"),
    "explicit_axes": ("auto",),
    "shard_map over data": BOTH_AXES,
    "shard_map over model": BOTH_AXES,
}
"""Program -> its meshes, if on the others it is another program of the table."""


def _table(name: str) -> list[str]:
    """Keys of a dictionary of the script, which is not imported: it asks XLA for four devices."""
    for statement in ast.parse(SCRIPT.read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
            assert isinstance(statement.value, ast.Dict)
            return [ast.literal_eval(key) for key in statement.value.keys if key is not None]
    raise AssertionError(f"{SCRIPT.name} has no {name}")


def _check(*places: str) -> None:
    report = json.loads(forked.run(SCRIPT, *places, JAX_PLATFORMS="cpu").stdout)
    assert list(report) == list(places)
    for place, ways in report.items():
        if place.endswith("/training"):
            _check_training(ways["one"], ways["mesh"])
            continue
        for way, found in ways.items():
            label = f"{place}, autocast {way}"
            assert found["moved"] == [], label
            assert found["wide"] == [], label
            least, most = found["errors"]
            # Some rounding, and that of bfloat16: operands of float16 give a tenth, 8-bit floats five times as much.
            assert 0.0005 < least <= most < 0.02, label


def _check_training(one: dict[str, Any], split: dict[str, Any]) -> None:
    assert split["moved"] == []
    for each in (one, split):
        assert (each["scale"], each["skipped"], each["unchanged"]) == (512.0, 1, True)
        assert each["watched"][::2] == each["losses"]
    assert split["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert split["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.parametrize("mesh", sorted(QUICK))
def test_programs_on_a_mesh(mesh: str) -> None:
    _check(*(f"{mesh}/{program}" for program in QUICK[mesh]))


@pytest.mark.full
@pytest.mark.parametrize("program", [*_table("PROGRAMS"), "training"])
def test_all_programs(program: str) -> None:
    """The others on all meshes, in one process, which computes the program in float32 once."""
    meshes = MESHES.get(program, _table("MESHES"))
    _check(*(f"{mesh}/{program}" for mesh in meshes if program not in QUICK.get(mesh, ())))
