"""Regions: entering, leaving, nesting, decorating. On the CPU the dispatcher is torch's own, on XLA it is ours."""

from __future__ import annotations

import _thread
import copy
import pickle
import queue
import threading

import calls
import forked
import open_regions
import pytest
import torch

import xla_amp
from xla_amp import autocast, policy
from xla_amp.errors import PolicyError
from xla_amp.policy import regions

LOW, FULL, HALF = torch.bfloat16, torch.float32, torch.float16
OPEN = {
    "low": lambda device: autocast(device, dtype=LOW),
    "default": lambda device: autocast(device),
    "half": lambda device: autocast(device, dtype=HALF),
    "off": lambda device: autocast(device, enabled=False),
    "torch half": lambda device: torch.autocast(device.type, dtype=HALF),
    "torch off": lambda device: torch.autocast(device.type, enabled=False),
}
SEQUENCES = {
    "nested": [("low", LOW), ("half", HALF), ("off", FULL), ("low", LOW), (3, FULL), (2, HALF), (1, LOW), (0, FULL)],
    "entered again while it is open": [("low", LOW), ("again", LOW), (1, LOW), (0, FULL)],
    "of torch": [("low", LOW), ("torch half", HALF), (1, LOW), ("torch off", FULL), ("low", LOW), (3, FULL), (2, LOW)],
    "out of order": [("default", None), ("half", HALF), (0, HALF), (1, FULL)],  # the newest stays in force
}
"""Regions that are entered, or left by number, and what a product is in after each; None is the platform's dtype."""


@pytest.fixture
def mm_dtype(device):
    """The dtype in which a matrix product of float32 matrices runs here and now."""
    matrix = torch.ones(2, 2, device=device)
    return lambda: torch.mm(matrix, matrix).dtype


def state(device):
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.is_autocast_cache_enabled(),
    )


@pytest.fixture(autouse=True)
def _state_is_restored(device):
    before = state(device)
    yield
    assert state(device) == before


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(device, low_of, mm_dtype, name):
    opened, left = [], set()
    for step, expected in SEQUENCES[name]:
        if isinstance(step, int):
            opened[step].__exit__(None, None, None)
            left.add(step)
        else:
            opened.append(opened[0] if step == "again" else OPEN[step](device))
            opened[-1].__enter__()
        assert mm_dtype() is (expected or low_of(device))
    for region in [region for number, region in enumerate(opened) if number not in left]:
        region.__exit__(None, None, None)
    assert mm_dtype() is FULL


def test_an_exception_restores(device, mm_dtype):
    with pytest.raises(KeyError, match="mine"), autocast(device, dtype=LOW), autocast(device, enabled=False):
        raise KeyError("mine")
    assert mm_dtype() is FULL
    with autocast(device, dtype=LOW):
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3, device=device), torch.ones(2, 3, device=device))
        assert mm_dtype() is LOW  # also the exclusion of the autocast key is undone


def test_the_cache_flag(device):
    with autocast(device, dtype=LOW, cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        with autocast(device, dtype=LOW):
            assert not torch.is_autocast_cache_enabled()
        with autocast(device, dtype=LOW, cache_enabled=True):
            assert torch.is_autocast_cache_enabled()


def test_what_a_test_leaves_open_is_closed_after_it(device, mm_dtype):
    policy.override(mm="keep").__enter__()
    autocast(device, dtype=HALF).__enter__()
    torch.autocast(device.type).__enter__()
    closed = open_regions.close_regions()
    assert [text.partition("(")[0] for text in closed] == ["autocast", "override", "a region of torch"]
    torch.autocast(device.type).__enter__()
    assert open_regions.close_regions()
    assert mm_dtype() is FULL
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
    assert open_regions.close_regions() == []


# ---- order -----------------------------------------------------------------------------------------------------------


def test_regions_of_two_devices_may_end_out_of_order(device, mm_dtype):
    other = autocast("cpu" if device.type != "cpu" else "xla", dtype=LOW, cache_enabled=False)
    mine = autocast(device, dtype=LOW, cache_enabled=True)
    mine.__enter__()
    other.__enter__()
    mine.__exit__(None, None, None)
    assert mm_dtype() is FULL
    assert not torch.is_autocast_cache_enabled()
    other.__exit__(None, None, None)


def test_leaving_what_this_thread_has_not_entered(device):
    caught = []

    def leave(region):
        with pytest.raises(RuntimeError, match="this thread has not entered it"):
            region.__exit__(None, None, None)
        caught.append(region)

    leave(autocast(device))
    with autocast(device) as region:
        thread = threading.Thread(target=leave, args=(region,))
        thread.start()
        thread.join()
    assert len(caught) == 2


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_start_outside_and_share_an_object(device, mm_dtype):
    region = autocast(device, dtype=LOW)
    inside, go_on = threading.Event(), threading.Event()
    seen = []

    def work():
        seen.append(mm_dtype())
        with region:
            inside.set()
            go_on.wait(10)
            seen.append(mm_dtype())
        seen.append(mm_dtype())

    thread = threading.Thread(target=work)
    with autocast(device, dtype=HALF):
        thread.start()
        inside.wait(10)
        assert mm_dtype() is HALF
    with region:
        pass
    assert mm_dtype() is FULL
    go_on.set()
    thread.join()
    assert seen == [FULL, LOW, FULL]


# ---- decorators ------------------------------------------------------------------------------------------------------


def test_function(device, mm_dtype):
    """Recursive, and a method."""

    class Model(torch.nn.Module):
        @autocast(device, dtype=LOW)
        def forward(self, a, *, b=0):
            """Does nothing."""
            inner = self.forward(a - 1) if a else []
            return [*inner, (self, a, b, mm_dtype())]

    model = Model()
    assert model(1, b=2) == [(model, 0, 0, LOW), (model, 1, 2, LOW)]
    assert mm_dtype() is FULL
    assert (model.forward.__name__, model.forward.__doc__) == ("forward", "Does nothing.")


def test_a_region_that_fails_on_entry_leaves_nothing_open(device, mm_dtype, monkeypatch):
    region = autocast(device, dtype=HALF)
    with autocast(device, dtype=LOW):
        monkeypatch.setenv("XLA_AMP_RULES", "softmax")
        for failing in (region, policy.override(tanh="low")):
            with pytest.raises(PolicyError, match="expected operation=cast"), failing:
                pass
        monkeypatch.delenv("XLA_AMP_RULES")
        assert mm_dtype() is LOW
        with region:
            assert mm_dtype() is HALF
    assert mm_dtype() is FULL


def test_a_region_made_before_settings_change_follows_them_when_it_is_entered(device, mm_dtype, monkeypatch, tmp_path):
    region = autocast(device, dtype=LOW)
    file = tmp_path / "rules.toml"

    def entered():
        with region:
            return mm_dtype()

    assert entered() is LOW
    with policy.override(mm="fp32"):
        assert entered() is FULL
    monkeypatch.setenv("XLA_AMP_RULES", "mm=fp32")
    assert entered() is FULL
    monkeypatch.delenv("XLA_AMP_RULES")
    assert entered() is LOW
    monkeypatch.setenv("XLA_AMP_POLICY", str(file))
    with pytest.raises(PolicyError, match="cannot be read"):
        entered()
    for cast, expected in (("fp32", FULL), ("low", LOW), ("keep", FULL)):
        file.write_text(f'[[rule]]\noperations = ["mm"]\ncast = "{cast}"\n', "utf-8")
        assert entered() is expected


def test_a_region_has_the_low_dtype_that_torch_has_when_it_is_entered(mm_dtype, device):
    region = autocast("cpu")
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", HALF)
    try:
        with region:
            assert torch.get_autocast_dtype("cpu") is HALF
    finally:
        torch.set_autocast_dtype("cpu", before)
    with region:
        assert torch.get_autocast_dtype("cpu") is before


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))])
def test_copies_of_a_region(device, mm_dtype, again):
    for region in (autocast(device, HALF, policy="tpu", rules={"mm": "low"}), autocast(device, enabled=False)):
        same = again(region)
        assert repr(same) == repr(region)
        with same, same:
            assert mm_dtype() is (HALF if region.enabled else FULL)
        assert mm_dtype() is FULL


BEFORE_THE_DEVICE = """
import copy, torch, xla_amp
from xla_amp import autocast, policy
regions = [autocast("xla"), autocast("xla", torch.float16), autocast("xla", policy="gpu")]
regions += [autocast("xla", enabled=False)]
regions += [copy.deepcopy(region) for region in regions]
with regions[0], regions[0]:
    matrix = torch.ones(2, 2, device=xla_amp.xla_device())
    print(torch.mm(matrix, matrix).dtype)
for region in regions:
    with region, policy.override(linear="keep"):
        print(torch.mm(matrix, matrix).dtype)
print(torch.mm(matrix, matrix).dtype)
"""


def test_regions_made_before_the_device_starts(low_of):
    low = low_of(torch.device("xla"))
    run = forked.run(program=BEFORE_THE_DEVICE, JAX_PLATFORMS="cpu")
    assert run.stdout.split() == [str(each) for each in (low, *(low, HALF, HALF, FULL) * 2, FULL)]


# ---- what an entry costs ---------------------------------------------------------------------------------------------


def test_python_calls_of_an_entry(device):
    """A training step enters a region: what it means was decided when it was made, or for the one before it."""

    def entered():
        with autocast(device, dtype=LOW):
            pass

    if device.type == "xla":
        pytest.skip("on torch_xla's device a region installs its kernels, and takes them away")
    entered()
    assert len(calls.of(entered)) <= (25 if device.type != "cpu" else 35)


def test_one_listener_hears_of_regions():
    before = regions.opening.listeners
    assert [listener.__module__ for listener in before] == ["xla_amp.pytorch.autocast.scopes"]
    with xla_amp.explain(), xla_amp.explain():
        assert len(regions.opening.listeners) == 2
    assert regions.opening.listeners == before


def test_a_thread_that_python_did_not_start_sees_the_newest_and_works_for_others():
    """Autograd's threads: re-entering a region there (custom_bwd) must not hide the region of the caller after it."""
    seen, name = queue.Queue(), "a-device-of-this-test"
    tpu, off = (regions.Region(policy=policy.load("tpu"), low="bfloat16", enabled=enabled) for enabled in (True, False))

    def look():
        before, inner = regions.current(name), regions.push(name, off)
        inside = regions.current(name)
        regions.pop(inner)
        seen.put([before, inside, regions.current(name)])

    def borrowed():
        _thread.start_new_thread(look, ())
        return seen.get(timeout=10)

    assert borrowed() == [None, off, None]
    token = regions.push(name, tpu)
    assert borrowed() == [tpu, off, tpu]
    inner = regions.push(name, off)
    assert borrowed() == [off, off, off]
    regions.pop(inner)
    assert borrowed() == [tpu, off, tpu]
    regions.pop(token)
    assert borrowed() == [None, off, None]
