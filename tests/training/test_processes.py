"""Processes that train together on loopback: one device each, gradients reduced in the step, one mind on overflow."""

from __future__ import annotations

import functools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scenarios
import torch
from cluster_program import LOOPBACK
from replica_program import STEPS, own

import xla_amp
from xla_amp import xla_model
from xla_amp.common import config
from xla_amp.common.config import Process, Store
from xla_amp.errors import EngineError, PolicyError
from xla_amp.lazy.processes import consistency
from xla_amp.lazy.processes.launch import _two_ports

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("replica_program.py")
WORLDS = [2, pytest.param(4, marks=pytest.mark.full)]


OTHERS = ("collect", "low")


@functools.cache
def run(world, *modes):
    """What each process saw, by mode; other modes than `OTHERS` are trained with an overflow."""
    names = {mode: mode if mode in (*OTHERS, "graph", "flag") else f"train {mode}" for mode in modes}
    found = scenarios.run(PROGRAM, *names.values(), world=world)
    return {mode: found[name] for mode, name in names.items()}


def alone():
    return run(1, "none", "one")


def together(world):
    return run(world, "none", "one", "unreduced", *OTHERS, *(["graph", "flag"] if world == 2 else []))


def trained(world):
    return {overflow: together(world)[overflow] for overflow in ("none", "one", "unreduced")}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("overflow", ["none", "one"])
def test_the_numbers_are_those_of_one_process_with_the_whole_batch(world, overflow):
    found, (expected,) = together(world)[overflow], alone()[overflow]
    finite = [place for place, loss in enumerate(expected["losses"]) if math.isfinite(loss)]
    assert len(finite) >= 12
    for process in found:
        for place in finite:
            assert process["losses"][place] == pytest.approx(expected["losses"][place], rel=1e-5)
        assert process["sum"] == pytest.approx(expected["sum"], rel=1e-5)
        assert (process["scale"], process["skipped"]) == (expected["scale"], expected["skipped"])
    assert expected["skipped"] == STEPS - len(finite)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("overflow", ["none", "one", "unreduced"])
def test_all_skip_the_same_steps_and_stay_bitwise_equal(world, overflow):
    """Also with gradients of their own (`unreduced`), where the weights differ and the skipped steps do not."""
    first, *others = together(world)[overflow]
    for process in others:
        assert (process["scale"], process["skipped"]) == (first["scale"], first["skipped"])
        assert (process["weights"] == first["weights"]) == (overflow != "unreduced")
    assert (first["skipped"] > 0) == (overflow != "none")


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_is_one_executable_without_host_sync(world):
    for processes in trained(world).values():
        for process in processes:
            assert process["steady"] == [1, 0, 0]


def test_processes_meet():
    for rank, process in enumerate(together(2)["none"]):
        assert process["ordinal"] == [rank, 2]
        assert process["met"] == ["0", "1"]
        assert set(process["listening"]) <= LOOPBACK  # no other machine can reach what `launch` starts
        assert process["most"] == 1


def test_a_flag_of_one_process_skips_the_step_in_all():
    """Without a scaler."""
    first, second = together(2)["flag"]
    assert first == second
    assert len(first) == 4
    for begin, skipped, stepped, skipped_again in first.values():
        assert begin == skipped != 1.0
        assert stepped == skipped_again != skipped


# ---- collectives -----------------------------------------------------------------------------------------------------


def group_of(rank, world):
    """The processes of the grouped cases: all of two, or two pairs of four."""
    return [0, 1] if rank < 2 else [2, 3]


NUMPY = {"sum": np.add, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or, "min": np.minimum}
NUMPY["max"] = np.maximum


def expected_of(name, rank, world):
    """What NumPy makes of everybody's values."""
    everybody, group = range(world), group_of(rank, world)
    operation, *more = name.split()
    members = group if operation == "all_reduce" or more[-1:] == ["grouped"] else list(everybody)
    parts = [own(member).numpy() for member in members]
    place = members.index(rank)
    if operation == "all_reduce":
        return NUMPY[more[0]].reduce([own(member, torch.int32).numpy() for member in members])
    if operation == "all_gather":
        return np.concatenate(parts, axis=1 if "1" in more else 0)
    if "max" in more:
        return np.split(np.maximum.reduce(parts), len(members), axis=1)[place]
    return np.split(np.add.reduce(parts) * 0.5, len(members), axis=0)[place]


@pytest.mark.parametrize("world", WORLDS)
def test_collectives_give_what_numpy_makes_of_all_values(world):
    found = together(world)["collect"]
    for rank, process in enumerate(found):
        names = set(process) - {"programs", "weight", "collective_broadcast"}
        assert len(names) == 10
        for name in names:
            np.testing.assert_array_equal(process[name], expected_of(name, rank, world), err_msg=f"{name} on {rank}")
        assert process["programs"] == 0  # all of them were operations of the one step that had run


@pytest.mark.parametrize("world", WORLDS)
def test_broadcasts_arrive_to_the_bit(world):
    for process in together(world)["collect"]:
        *values, zeros = process["collective_broadcast"]
        assert values == [
            str(own(1, dtype).tolist()) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        ]
        assert zeros == "[-0.0, -0.0]"
        assert process["weight"] == together(world)["collect"][0]["weight"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_reduction_that_overflows_in_its_dtype_skips_the_step_everywhere(world):
    """80000 in all, finite on each process: float16 ends at 65504."""
    mean = 80000 / world
    for process in together(world)["low"]:
        assert process["None"] == [0, [-mean, -(world + 1) / 2], "torch.float32"]
        skipped, (big, small), dtype = process["torch.bfloat16"]
        assert (skipped, small, dtype) == (0, -(world + 1) / 2, "torch.float32")
        assert big == pytest.approx(-mean, rel=2**-8)
        assert big != -mean  # it was rounded to bfloat16's 8 bits on the way
        assert process["torch.float16"] == [1, [0, 0], "torch.float32"]


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_in_16_bits_are_reduced_in_float32(world):
    for process in together(world)["low"]:
        assert process["half None"] == [[40000.0] * 2, "torch.float16", ["f32"]]
        values, dtype, reductions = process["half torch.bfloat16"]
        assert (dtype, reductions) == ("torch.float16", ["bf16"])
        assert values == pytest.approx([40000.0] * 2, rel=2**-7)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_processes_with_another_new_program_are_named_before_it_runs(own_policy):
    first, second = together(2)["graph"]
    assert first == second  # all processes say the same
    for text in first.values():
        assert re.search(r"EngineError: process 0 \(.*\) and process 1 \(.*\) cannot run their next program", text)
        assert len(re.findall(r"replica_program\.py:\d+: xla_amp\.sync\(\)", text)) == 2
    low = {"tpu": "bfloat16", "gpu": "float16"}[own_policy]
    different = rf"operation \d is all_reduce\.sum\(%4\) .* 0, sin\(%4\) -> {low}\[4,4\] .* 1"
    assert re.search(different, first["operation"])
    assert re.search(rf"operation \d is .*{low}\[4,4\] .* 0, .*float32\[4,4\] .* 1", first["policy"])
    assert "is the end (3 results) on process 0, the end (4 results) on process 1" in first["results"]


def test_a_forked_process_waits_at_its_end_for_the_others():
    assert scenarios.run(PROGRAM, "late") == {"late": [[2.0, 2.0]] * 2}


@pytest.mark.full
def test_when_one_raises_the_others_end_and_the_error_has_its_number(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_AMP_TIMEOUT", "60")
    done = scenarios.started(PROGRAM, "end", folder=tmp_path, copies=False, status=None)
    assert done.returncode != 0
    words = r"Process 1 terminated with the following error.*this one has had enough"
    assert re.search(words, done.stderr, re.DOTALL), done.stderr


def meeting(monkeypatch, changes, world_sizes=(2, 2), come=(0, 1), timeout=60):
    """What `consistency.meet` says in processes (here: threads) of which the second is started with `changes`."""
    port, plain = _two_ports(), consistency.settings
    monkeypatch.setattr(consistency, "settings", lambda place: plain(place) | (changes if place.rank else {}))

    def meet(rank):
        place = Process(rank, world_sizes[rank], rank, "", timeout, Store("127.0.0.1", port, False, "0"))
        try:
            consistency.meet(place)
        except EngineError as error:
            return str(error)
        return ""

    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(meet, come))
    finally:
        consistency._store.clear()
        consistency._met.clear()


def test_processes_that_were_started_alike_meet(monkeypatch):
    assert meeting(monkeypatch, {}) == ["", ""]


@pytest.mark.parametrize(
    ("changes", "world_sizes", "words"),
    [
        ({"autocast rules": "mm=fp32"}, (2, 2), "autocast rules is 'mm=fp32' there and 'no added rules' here"),
        ({"version of jax": "0.1"}, (2, 2), "version of jax is '0.1' there"),
        ({}, (2, 3), "WORLD_SIZE is '3' there and '2' here"),
        ({}, (3, 2), "WORLD_SIZE is '2' there and '3' here"),
    ],
)
def test_a_process_that_was_started_otherwise_is_named(monkeypatch, changes, world_sizes, words):
    first, second = meeting(monkeypatch, changes, world_sizes)
    assert words in first
    assert re.search(r"process 0 \(.*pid \d+\) cannot train with process 1 \(.*pid \d+\)", first)
    assert "process 1 (" in second


def test_rules_from_outside_are_part_of_what_is_compared(monkeypatch):
    place = Process(0, 2, 0, "", 60, None)
    assert consistency.settings(place)["autocast rules"] == "no added rules"
    monkeypatch.setenv("XLA_AMP_RULES", "softmax=low")
    assert consistency.settings(place)["autocast rules"] == "softmax=low"


def test_a_process_that_does_not_come_is_named(monkeypatch):
    [alone] = meeting(monkeypatch, {}, come=(0,), timeout=1)
    assert "waited in vain for process 1, which did not start within 1 s" in alone
    assert "1 of 2 processes came: 0. " in alone


def test_the_place_of_a_process(monkeypatch):
    assert config.process() is None
    assert xla_model.xrt_world_size() == 1
    config.place_process(rank=1, world_size=2, port=100)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.pop(name)
        monkeypatch.setenv(name, value)
    assert config.process() == Process(1, 2, 1, "127.0.0.1:101", 300, Store("127.0.0.1", 100, False, "0"))
    monkeypatch.setenv("XLA_AMP_COORDINATOR", "somewhere:5")
    monkeypatch.setenv("XLA_AMP_TIMEOUT", "9")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert config.process() == Process(1, 2, 1, "somewhere:5", 9, Store("127.0.0.1", 100, True, "3"))
    monkeypatch.delenv("MASTER_ADDR")
    assert config.process() == Process(1, 2, 1, "somewhere:5", 9, None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("XLA_AMP_COORDINATOR")
    for name, value, words in (
        ("RANK", "2", r"RANK='2': expected a number from 0 to 1"),
        ("MASTER_PORT", "", "MASTER_ADDR and MASTER_PORT must say where process 0 is"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two': expected a whole number"),
        ("XLA_AMP_TIMEOUT", "2", "XLA_AMP_TIMEOUT='2': expected a whole number of seconds, at least 3"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(PolicyError, match=words):
                config.process()


def test_bad_input():
    with pytest.raises(ValueError, match=r"launch\(nprocs=0\): expected at least 1"):
        xla_amp.launch(print, 0)
    for timeout in (1, 3.0):
        with pytest.raises(ValueError, match=rf"launch\(timeout={timeout}\): expected whole seconds, at least 3"):
            xla_amp.launch(print, 1, timeout=timeout)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: xla_model.all_reduce("mean", x), ValueError, r"\('mean', ...\): expected one of 'sum', 'mul'"),
        (lambda x: xla_model.all_reduce("sum", 3), TypeError, r"expected a tensor or a list of tensors, got 3 \(int\)"),
        (lambda x: xla_model.all_gather(x, 2), ValueError, r"all_gather\(dim=2\): there is no such dimension in"),
        (lambda x: xla_model.all_gather(3), TypeError, "all_gather: expected a tensor, got 3"),
        (lambda x: xla_model.all_gather(x, groups=[[0, 1]]), ValueError, r"groups=\[\[0, 1\]\]\): expected"),
        (lambda x: xla_model.reduce_scatter("sum", x, 1.0, 0, 2), ValueError, r"\(shard_count=2\): expected .*, 1"),
        (lambda x: xla_model.reduce_scatter("avg", x, 1.0, 0, 1), ValueError, r"\('avg', ...\): expected"),
        (lambda x: xla_model.collective_broadcast([x], 1), ValueError, "expected a process from 0 to 0"),
        (lambda x: xla_model.reduce_gradients(None, dtype=torch.int8), TypeError, "expected a floating dtype"),
        (lambda x: xla_model.reduce_gradients(None, dtype=torch.float8_e4m3fn), TypeError, "a sum in 8 bits"),
    ],
)
def test_bad_input_to_collectives(call, kind, words):
    with pytest.raises(kind, match=words):
        call(torch.ones(2, 3))


def test_collectives_of_one_process_are_copies():
    x = torch.arange(6.0, device=xla_amp.xla_device()).reshape(2, 3)
    for result in (
        xla_model.all_gather(x, 1),
        xla_model.reduce_scatter("sum", x, 1.0, 0, 1),
        xla_model.all_gather(x, output=torch.empty(2, 3, device=x.device)),
    ):
        assert result.tolist() == x.tolist()
        assert result is not x
    assert (xla_model.reduce_scatter("max", x, 2.0, 1, 1) == x * 2).all()
