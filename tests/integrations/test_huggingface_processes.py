"""Two processes under Accelerate and transformers' Trainer train as one process does with the batches of both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

pytest.importorskip("accelerate", reason="the extra `huggingface`")
pytestmark = [pytest.mark.full, pytest.mark.processes]

PROGRAM = Path(__file__).with_name("huggingface_program.py")
KINDS = ("accelerate-fp16", "accelerate-bf16", "trainer-fp16", "trainer-bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes wrote."""
    place = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "200"}
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    command = [sys.executable, *launcher, PROGRAM, place, *KINDS]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    with subprocess.Popen(command, **options) as run:
        done = forked.run(PROGRAM, place, *KINDS, environment=environment)
        printed, _ = run.communicate(timeout=280)
    assert run.returncode == 0, printed
    assert done.returncode == 0, done.stderr
    return place


def seen(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What one process alone saw, and both of two."""
    alone, first, second = (torch.load(folder / f"{kind}-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    return alone, first, second


@pytest.mark.parametrize(("kind", "tolerance"), list(zip(KINDS, (1e-3, 1e-2, 1e-3, 1e-2), strict=True)))
def test_two_processes_train_as_one(kind: str, tolerance: float, folder: Path) -> None:
    alone, first, second = seen(folder, kind)
    assert first["world"] == (2, 0, True)
    assert second["world"] == (2, 1, False)
    for expected, one, other in zip(alone["weights"], first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)
        assert (one - expected).abs().max() < tolerance
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(alone["losses"], abs=tolerance)


@pytest.mark.parametrize("kind", ["accelerate-fp16", "trainer-fp16"])
def test_an_overflow_of_one_process_is_skipped_on_both(kind: str, folder: Path) -> None:
    assert [run["scale"] for run in seen(folder, kind)] == [32768.0] * 3


@pytest.mark.parametrize(("kind", "steps"), [("accelerate-fp16", 8), ("accelerate-bf16", 4)])
def test_a_step_is_one_executable_that_does_not_wait(kind: str, steps: int, folder: Path) -> None:
    """The program adds up losses after each step, which is a second one."""
    for run in seen(folder, kind)[1:]:
        assert run["counts"][-1] == (2 * steps, 0, 0)


def test_values_are_exchanged(folder: Path) -> None:
    _, first, second = seen(folder, "accelerate-fp16")
    assert first["gathered"] == second["gathered"] == [0, 1]
    assert first["reduced"] == second["reduced"] == 2
    alone, first, second = seen(folder, "trainer-fp16")
    assert first["evals"] == second["evals"] == pytest.approx(alone["evals"], abs=1e-3)
    assert torch.equal(first["predicted"], second["predicted"])  # of all rows, in their order
    assert (first["predicted"] - alone["predicted"]).abs().max() < 1e-2


@pytest.mark.parametrize("kind", ["trainer-fp16", "trainer-bf16"])
def test_a_resumed_run_is_the_undisturbed_one(kind: str, folder: Path) -> None:
    for run in seen(folder, kind):
        assert all(map(torch.equal, run["weights"], run["resumed"]))


def test_rank_0_saves_the_weights(folder: Path) -> None:
    from safetensors.torch import load_file

    _, first, _ = seen(folder, "accelerate-fp16")
    saved = load_file(folder / "accelerate-fp16-2" / "model.safetensors")
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    assert all(torch.equal(saved[f"body.{name}"], x) for name, x in zip(names, first["weights"], strict=True))
    assert len(list((folder / "accelerate-fp16-2").glob("rng_state_xla_?.pth"))) == 2
