"""One process with eight (virtual) devices, and several with some each, train one program, as one device does."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

import pytest
import scenarios

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("global_mesh_program.py")
FORMS = {
    "one process": (1, 8, '{"data":8}', "fsdp"),
    "fsdp+tp": (2, 2, '{"data":2,"model":2}', "fsdp+tp"),
    "fsdp": (4, 2, '{"data":8}', "fsdp"),
    "tp": (4, 1, '{"model":2,"data":2}', "tp"),
}
"""Processes, devices of each, the mesh, the recipe."""
EACH = [pytest.param(name, marks=() if form[0] == 1 else pytest.mark.full) for name, form in FORMS.items()]
SHARES = {"one process": 1 / 8, "fsdp+tp": 1 / 4, "fsdp": 1 / 8, "tp": 1 / 2}


@functools.cache
def folder(name):
    """Where the checkpoint of a form is; removed at the end of the process."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return made.name


@functools.cache
def run(processes, devices, axes, recipe, what="form", where=""):
    """What each process found."""
    words = f"{what} {axes} {recipe}"
    return scenarios.run(PROGRAM, words, world=processes, devices=devices, folder=folder(where))[words]


def together(name="fsdp+tp"):
    return run(*FORMS[name], where=name)


def alone():
    return run(1, 1, "{}", "none")[0]


@pytest.mark.parametrize("name", EACH)
def test_the_losses_are_those_of_one_device(name):
    """In float16, with an overflow in the last row; with dropout, although the seeds differ until they share a mesh."""
    for process in together(name):
        assert process["losses"] == pytest.approx(alone()["losses"], rel=1e-5)
        assert process["norm"] == pytest.approx(alone()["norm"], rel=1e-6)
        assert (process["scale"], process["skipped"]) == (alone()["scale"], alone()["skipped"]) == (512.0, 1)


def test_a_captured_step_is_replayed_over_a_mesh_to_the_bit():
    """With an overflow in a replay."""
    [process] = together("one process")
    recorded, captured = process["recorded"], process["captured"]
    assert (captured.pop("replays"), captured["skipped"]) == (4, 2)
    assert captured == {name: value for name, value in recorded.items() if name != "replays"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp+tp", "fsdp", "tp"])
def test_what_several_processes_hold_is_equal_to_the_bit(name):
    one, other = (process["parts"] for process in together(name)[:2])
    shared = 0
    for here, there in zip(one, other, strict=True):
        for part in here.keys() & there.keys():
            shared += 1
            assert here[part] == there[part]
    assert shared > 10


@pytest.mark.parametrize("name", EACH)
def test_a_step_is_one_executable_without_host_sync(name):
    for process in together(name):
        assert process["steady"] == [1, 0, 0]


@pytest.mark.parametrize("name", EACH)
def test_memory_and_collectives(name):
    """Of parameters, and of the optimizer's state, which follows them; small ones are whole."""
    for process in together(name):
        assert process["shares"] == pytest.approx([SHARES[name]] * 2, rel=0.3)
        assert process["collectives"].keys() >= {"all-reduce", *(["all-gather"] if name != "tp" else [])}


@pytest.mark.parametrize("name", EACH[:2])
def test_a_checkpoint_is_written_while_the_next_step_runs(name):
    assert len({digest for process in together(name) for digest in process["loaded"]}) == 1


@pytest.mark.full
@pytest.mark.parametrize(("axes", "devices", "share"), [('{"data":4}', 4, 1 / 4), ("{}", 1, 1)])
def test_a_checkpoint_loads_on_any_number_of_devices(axes, devices, share):
    """Values to the bit; what follows as on the eight devices that wrote it."""
    [wrote] = together("one process")
    [read] = run(1, devices, axes, "fsdp", "again", "one process")
    assert read["loaded"] == wrote["loaded"]
    assert read["later"] == pytest.approx(wrote["later"], rel=1e-5)
    assert read["shares"] == pytest.approx([share] * 2, rel=0.3)


@pytest.mark.full
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
