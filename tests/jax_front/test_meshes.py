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

import forked
import pytest

SCRIPT = Path(__file__).with_name("programs_on_four_devices.py")
QUICK = {
    "explicit": ("block", "auto_axes", "shard_map over model", "training"),
    "mixed": ("perceptron", "scan of checkpoint"),
}
"""Mesh -> programs of a plain run; `test_all_programs` has all of them on each mesh."""


def _table(name: str) -> list[str]:
    """Keys of a dictionary of the script, which is not imported: it asks XLA for four devices."""
    for statement in ast.parse(SCRIPT.read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
            assert isinstance(statement.value, ast.Dict)
            return [ast.literal_eval(key) for key in statement.value.keys if key is not None]
    raise AssertionError(f"{SCRIPT.name} has no {name}")


def _check(mesh: str, *programs: str) -> None:
    run = forked.run(SCRIPT, mesh, *programs, environment={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert list(report) == list(programs)
    training = report.pop("training", None)
    for program, ways in report.items():
        for way, found in ways.items():
            label = f"{program} on the mesh {mesh!r}, autocast {way}"
            assert found["moved"] == [], label
            assert found["wide"] == [], label
            least, most = found["errors"]
            # Some rounding, and that of bfloat16: operands of float16 give a tenth, 8-bit floats five times as much.
            assert 0.0005 < least <= most < 0.02, label
    if training is not None:
        one, split = training["one"], training["mesh"]
        assert split["moved"] == []
        for each in (one, split):
            assert (each["scale"], each["skipped"], each["unchanged"]) == (512.0, 1, True)
            assert each["watched"][::2] == each["losses"]
        assert split["losses"] == pytest.approx(one["losses"], rel=1e-3)
        assert split["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.parametrize("mesh", sorted(QUICK))
def test_programs_on_a_mesh(mesh: str) -> None:
    _check(mesh, *QUICK[mesh])


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("mesh", _table("MESHES"))
def test_all_programs(mesh: str, part: int) -> None:
    _check(mesh, *[*_table("PROGRAMS"), "training"][part::3])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "autocast_arguments_jax",
        "autocast_composition",
        "autocast_contracts",
        "autocast_functions",
        "contraction_primitives",
        "loss_scale",
    ],
)
def test_files_of_this_folder_on_an_explicit_mesh(name: str) -> None:
    """`conftest` enters the mesh for each test, and has what is left out, with reasons."""
    path = SCRIPT.with_name(f"test_{name}.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=280", path],
        env={**os.environ, "JAX_FRONT_MESH": "explicit"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
