"""Two processes with two (virtual) devices each train one program, in layouts by name, as one device does."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import scenarios

pytestmark = [pytest.mark.full, pytest.mark.processes]
PROGRAM = Path(__file__).with_name("global_mesh_program.py")
FORMS = {
    "fsdp+tp": (2, 2, '{"data":2,"model":2}', "fsdp+tp"),
    "fsdp": (4, 2, '{"data":8}', "fsdp"),
    "tp": (4, 1, '{"model":2,"data":2}', "tp"),
}
"""Processes, devices of each, the mesh, the recipe."""
SHARES = {"fsdp+tp": 1 / 4, "fsdp": 1 / 8, "tp": 1 / 2}


@functools.cache
def run(processes, devices, axes, *recipes):
    """What each process found."""
    words = " ".join(["form 4", axes, *recipes])
    return scenarios.run(PROGRAM, words, world=processes, devices=devices)[words]


def together(recipe="fsdp+tp"):
    return run(*FORMS[recipe])


@functools.cache
def alone():
    return run(1, 1, "{}", "none")[0]["none"]


@pytest.mark.parametrize("recipe", FORMS)
def test_the_losses_are_those_of_one_device(recipe):
    """In float16, with an overflow in the last row; with dropout, although the seeds differ until they share a mesh."""
    for process in together(recipe):
        found = process[recipe]
        assert found["losses"] == pytest.approx(alone()["losses"], rel=1e-5)
        assert found["norm"] == pytest.approx(alone()["norm"], rel=1e-6)
        assert (found["scale"], found["skipped"]) == (alone()["scale"], alone()["skipped"]) == (512.0, 1)


@pytest.mark.parametrize("recipe", FORMS)
def test_what_several_processes_hold_is_equal_to_the_bit(recipe):
    one, other = (process[recipe]["parts"] for process in together(recipe)[:2])
    shared = 0
    for here, there in zip(one, other, strict=True):
        for part in here.keys() & there.keys():
            shared += 1
            assert here[part] == there[part]
    assert shared > 10


@pytest.mark.parametrize("recipe", FORMS)
def test_a_step_is_one_executable(recipe):
    for process in together(recipe):
        assert process[recipe]["steady"] == {"executions": 1, "compilations": 0, "host_syncs": 0}


@pytest.mark.parametrize("recipe", FORMS)
def test_memory_and_collectives(recipe):
    """Of parameters, and of the optimizer's state, which follows them; small ones are whole."""
    for process in together(recipe):
        assert process[recipe]["shares"] == pytest.approx([SHARES[recipe]] * 2, rel=0.3)
        assert process[recipe]["collectives"].keys() >= {"all-reduce", *(["all-gather"] if "fsdp" in recipe else [])}


def test_a_checkpoint_is_written_while_the_next_step_runs():
    for process in together():
        before, kept, after = process["loaded"]
        assert before == kept == after
    assert len({process["loaded"][0] for process in together()}) == 1


def test_what_cannot_be_says_what_to_call():
    for process in together():
        refused = process["refused"]
        assert "split over several processes, of which each has a part: call xla_amp.full_tensor" in refused["read"]
        assert refused["own values"].startswith(
            "EngineError: the processes of one mesh have different values for float"
        )
        assert "make batches of each process's own rows with xla_amp.global_batch()" in refused["own values"]
        assert refused["collective"].startswith("DeviceError: all_reduce: these processes train on one mesh")
        for text in (process["own numbers"], refused["own numbers again"]):  # the second after eight programs
            assert "different values for the Python numbers" in text
