"""Two processes under Lightning and Fabric train as one process does with the batches of both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

pytest.importorskip("lightning", reason="the extra `lightning`")
pytestmark = [pytest.mark.full, pytest.mark.processes]

PROGRAM = Path(__file__).with_name("lightning_program.py")
KINDS = ("lightning-fp16", "lightning-bar", "lightning-accumulated", "fabric-fp16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes wrote."""
    place = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "200"}
    for world in (1, 2):
        done = forked.run(PROGRAM, place, str(world), *KINDS, environment=environment)
        assert done.returncode == 0, done.stderr
    return place


def seen(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What one process alone saw, and both of two."""
    alone, first, second = (torch.load(folder / f"{kind}-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    return alone, first, second


@pytest.mark.parametrize(("kind", "tolerance"), list(zip(KINDS, (1e-3, 1e-2, 1e-2, 1e-3), strict=True)))
def test_two_processes_train_as_one(kind: str, tolerance: float, folder: Path) -> None:
    alone, first, second = seen(folder, kind)
    assert first["world"] == (2, 0, True)
    assert second["world"] == (2, 1, False)
    for expected, one, other in zip(alone["weights"], first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)
        assert (one - expected).abs().max() < tolerance


def test_an_overflow_of_one_process_is_skipped_on_both(folder: Path) -> None:
    assert [run["scale"] for run in seen(folder, "lightning-fp16")] == [32768.0] * 3


@pytest.mark.parametrize(("kind", "steps"), [("lightning-fp16", 8), ("lightning-accumulated", 4), ("fabric-fp16", 4)])
def test_a_step_is_one_executable_that_does_not_wait(kind: str, steps: int, folder: Path) -> None:
    for run in seen(folder, kind)[1:]:
        assert run["counts"][-1] == (steps, 0, 0)


def test_a_bar_ends_a_program_after_each_batch(folder: Path) -> None:
    """Rank 0 reads values there, so a program that goes on would be another one on rank 1."""
    assert seen(folder, "lightning-bar")[2]["counts"][-1] == (8, 0, 0)


def test_values_are_exchanged(folder: Path) -> None:
    alone, first, second = seen(folder, "lightning-fp16")
    assert first["val"] == second["val"]
    assert first["val"] == pytest.approx(float(alone["val"]), abs=1e-3)
    assert first["gathered"].tolist() == [[0], [1]]
    assert [(run["any"], run["all"]) for run in (alone, first, second)] == [(True, True), (True, False), (True, False)]
    _, first, second = seen(folder, "fabric-fp16")
    assert first["sum"] == second["sum"] == 3
    assert first["told"] == second["told"] == "from 0"


def test_rank_0_writes_a_checkpoint_that_loads_anywhere(folder: Path) -> None:
    _, first, _ = seen(folder, "lightning-accumulated")  # the last to write
    state = torch.load(folder / "lightning-2.ckpt", weights_only=True)["state_dict"]
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert all(map(torch.equal, state.values(), first["weights"]))
    model = torch.load(folder / "fabric-2.ckpt", weights_only=True)["model"]
    assert all(map(torch.equal, model.values(), seen(folder, "fabric-fp16")[1]["weights"]))
