"""Two processes under Lightning, Fabric, Accelerate and transformers' Trainer train as one does with both batches."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

pytestmark = [pytest.mark.full, pytest.mark.processes]

TOLERANCES = {
    "lightning": {"lightning-fp16": 1e-3, "lightning-bar": 1e-2, "lightning-accumulated": 1e-2, "fabric-fp16": 1e-3},
    "accelerate": {"accelerate-fp16": 1e-3, "accelerate-bf16": 1e-2, "trainer-fp16": 1e-3, "trainer-bf16": 1e-2},
}
"""Library -> kind of training -> how far the weights may be from those of one process."""
LIBRARIES = {kind: library for library, kinds in TOLERANCES.items() for kind in kinds}
LAUNCHER = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
)


@functools.cache
def written(library: str) -> Path:
    """The folder with what one process alone and both of two saw of each kind."""
    place, kinds = Path(tempfile.mkdtemp(prefix="processes")), list(TOLERANCES[library])
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    variables = {"OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "200"}
    if library == "lightning":
        program = Path(__file__).with_name("lightning_program.py")
        for world in "12":
            forked.run(program, place, world, *kinds, **variables)
    else:
        program = Path(__file__).with_name("huggingface_program.py")
        command = [sys.executable, *LAUNCHER, program, place, *kinds]
        options: Any = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "env": os.environ | variables,
        }
        with subprocess.Popen(command, **options) as both:
            forked.run(program, place, *kinds, **variables)
            printed, _ = both.communicate(timeout=280)
        assert both.returncode == 0, printed
    return place


def seen(kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What one process alone saw, and both of two."""
    pytest.importorskip(LIBRARIES[kind], reason="an extra")
    folder = written(LIBRARIES[kind])
    alone, first, second = (torch.load(folder / f"{kind}-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    return alone, first, second


@pytest.mark.parametrize("kind", LIBRARIES)
def test_two_processes_train_as_one(kind: str) -> None:
    (alone, first, second), tolerance = seen(kind), TOLERANCES[LIBRARIES[kind]][kind]
    assert first["world"] == (2, 0, True)
    assert second["world"] == (2, 1, False)
    for expected, one, other in zip(alone["weights"], first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)
        assert (one - expected).abs().max() < tolerance
    assert first.get("losses") == second.get("losses")
    assert first.get("losses", []) == pytest.approx(alone.get("losses", []), abs=tolerance)


@pytest.mark.parametrize("kind", ["lightning-fp16", "accelerate-fp16", "trainer-fp16"])
def test_an_overflow_of_one_process_is_skipped_on_both(kind: str) -> None:
    assert [run["scale"] for run in seen(kind)] == [32768.0] * 3


@pytest.mark.parametrize(
    ("kind", "executions"),
    [
        *(("lightning-fp16", 8), ("lightning-accumulated", 4), ("fabric-fp16", 4)),
        *(("accelerate-fp16", 16), ("accelerate-bf16", 8)),  # that program adds up losses after each step
        ("lightning-bar", 8),
    ],
)
def test_a_step_is_one_executable_that_does_not_wait(kind: str, executions: int) -> None:
    """With a bar rank 0 reads values after each batch, so a program that goes on would be another one on rank 1."""
    for run in seen(kind)[2 if kind == "lightning-bar" else 1 :]:
        assert run["counts"][-1] == (executions, 0, 0)


def test_values_are_exchanged_under_lightning() -> None:
    alone, first, second = seen("lightning-fp16")
    assert first["val"] == second["val"]
    assert first["val"] == pytest.approx(float(alone["val"]), abs=1e-3)
    assert first["gathered"].tolist() == [[0], [1]]
    assert [(run["any"], run["all"]) for run in (alone, first, second)] == [(True, True), (True, False), (True, False)]
    _, first, second = seen("fabric-fp16")
    assert first["sum"] == second["sum"] == 3
    assert first["told"] == second["told"] == "from 0"


def test_values_are_exchanged_under_accelerate() -> None:
    _, first, second = seen("accelerate-fp16")
    assert first["gathered"] == second["gathered"] == [0, 1]
    assert first["reduced"] == second["reduced"] == 2
    alone, first, second = seen("trainer-fp16")
    assert first["evals"] == second["evals"] == pytest.approx(alone["evals"], abs=1e-3)
    assert torch.equal(first["predicted"], second["predicted"])  # of all rows, in their order
    assert (first["predicted"] - alone["predicted"]).abs().max() < 1e-2


@pytest.mark.parametrize("kind", ["trainer-fp16", "trainer-bf16"])
def test_a_resumed_run_is_the_undisturbed_one(kind: str) -> None:
    for run in seen(kind):
        assert all(map(torch.equal, run["weights"], run["resumed"]))


def test_rank_0_writes_checkpoints() -> None:
    _, first, _ = seen("lightning-accumulated")  # the last to write
    folder = written("lightning")
    state = torch.load(folder / "lightning-2.ckpt", weights_only=True)["state_dict"]
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert all(map(torch.equal, state.values(), first["weights"]))
    model = torch.load(folder / "fabric-2.ckpt", weights_only=True)["model"]
    assert all(map(torch.equal, model.values(), seen("fabric-fp16")[1]["weights"]))


def test_rank_0_saves_the_weights() -> None:
    from safetensors.torch import load_file

    _, first, _ = seen("accelerate-fp16")
    folder = written("accelerate") / "accelerate-fp16-2"
    saved = load_file(folder / "model.safetensors")
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    assert all(torch.equal(saved[f"body.{name}"], x) for name, x in zip(names, first["weights"], strict=True))
    assert len(list(folder.glob("rng_state_xla_?.pth"))) == 2
