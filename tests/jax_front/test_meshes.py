"""Programs on meshes of four devices, with axes that are explicit, distributed by the compiler, and both.

Each is compared with float32 on one device, and its results' shardings with those of the same program without autocast.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
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
    run = forked.run(SCRIPT, *places, environment={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
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


FILES = {
    "explicit": (
        "autocast_functions exact_reads precision_report",
        "autocast_contracts autocast_composition autocast_models contraction_primitives",
        "jax_monitor jax_names jax_overflow loss_scale module_scopes",
        "optax_wrapper parity_with_flax program_requests",
    ),
    "auto": ("autocast_contracts jax_overflow loss_scale",),
    "mixed": ("autocast_contracts autocast_composition jax_overflow loss_scale",),
}
"""Mesh -> files that run on it, in a process for each text: all on explicit axes, a sample on the others."""
OWN_PROCESSES = {"autocast_targets", "meshes"}
"""Files whose programs run in processes or on devices that the mesh does not reach."""


def test_every_file_runs_on_an_explicit_mesh() -> None:
    files = {path.stem.removeprefix("test_") for path in SCRIPT.parent.glob("test_*.py")}
    assert {name for group in FILES["explicit"] for name in group.split()} == files - OWN_PROCESSES


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "names"), [(mesh, names) for mesh, groups in FILES.items() for names in groups])
def test_files_of_this_folder(mesh: str, names: str) -> None:
    """`conftest` enters the mesh for each test, and has what is left out, with reasons."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=280"),
            *(SCRIPT.with_name(f"test_{name}.py") for name in names.split()),
        ],
        env={**os.environ, "JAX_FRONT_MESH": mesh},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
