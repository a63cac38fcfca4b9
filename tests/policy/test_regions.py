"""The stack of open regions: nesting, re-entry, exceptions, threads, overrides inside a region."""

from __future__ import annotations

import _thread
import threading

import pytest

from xla_amp.errors import PolicyError
from xla_amp.policy import load, override, regions
from xla_amp.policy.regions import Region, current, pop, push

DEVICE = "a-device-of-this-test"
TPU, GPU = (Region(policy=load(name), low=load(name).low) for name in ("tpu", "gpu"))
OFF = Region(policy=load("tpu"), low="bfloat16", enabled=False)


def here() -> Region:
    """The current region, which the test knows to be there."""
    region = current(DEVICE)
    assert region is not None
    return region


def in_thread(function, start=None):
    """Result of `function` on another thread; by default one that Python's threading module starts."""
    result, done = [], threading.Event()

    def run():
        try:
            result.append(function())
        finally:
            done.set()

    if start is None:
        threading.Thread(target=run).start()
    else:
        start(run, ())
    assert done.wait(10)
    return result[0]


def test_nesting():
    assert current(DEVICE) is None
    outer = push(DEVICE, TPU)
    assert current(DEVICE) is TPU
    inner = push(DEVICE, OFF)
    assert current(DEVICE) is OFF
    assert current("another") is None
    pop(inner)
    assert current(DEVICE) is TPU
    pop(outer)
    assert current(DEVICE) is None


def test_the_same_region_inside_itself():
    first, second = push(DEVICE, TPU), push(DEVICE, TPU)
    assert first is not second
    pop(second)
    assert current(DEVICE) is TPU
    pop(first)
    assert current(DEVICE) is None


def test_closing_out_of_order_leaves_the_others():
    """As two generators do that are closed in the order in which they were opened."""
    first, second = push(DEVICE, TPU), push(DEVICE, GPU)
    pop(first)
    assert current(DEVICE) is GPU
    pop(second)
    assert current(DEVICE) is None


def test_closing_twice_is_an_error():
    token = push(DEVICE, TPU)
    pop(token)
    with pytest.raises(PolicyError, match="closed already"):
        pop(token)
    assert current(DEVICE) is None


def test_a_token_can_be_closed_on_another_thread():
    token = push(DEVICE, TPU)
    in_thread(lambda: pop(token))
    assert current(DEVICE) is None


def test_a_thread_that_python_did_not_start_sees_the_newest():
    def borrowed():
        return in_thread(lambda: current(DEVICE), start=_thread.start_new_thread)

    assert borrowed() is None
    token = push(DEVICE, TPU)
    assert borrowed() is TPU
    inner = push(DEVICE, OFF)
    assert borrowed() is OFF
    pop(inner)
    assert borrowed() is TPU
    pop(token)
    assert borrowed() is None


def test_a_thread_that_never_opened_a_region_has_none():
    """As in torch, where autocast is off on a new thread: another thread's rules must not reach it."""
    token = push(DEVICE, TPU)
    assert in_thread(lambda: current(DEVICE)) is None
    pop(token)


def test_a_thread_with_regions_of_its_own_sees_only_these():
    token = push(DEVICE, TPU)

    def own():
        inner = push(DEVICE, GPU)
        seen = [current(DEVICE)]
        pop(inner)
        return [*seen, current(DEVICE)]

    assert in_thread(own) == [GPU, None]
    assert current(DEVICE) is TPU
    pop(token)


def test_a_thread_that_python_did_not_start_works_for_others():
    """Autograd's threads: re-entering a region there (custom_bwd) must not hide the region of the caller after it."""
    token = push(DEVICE, TPU)

    def borrowed():
        inner = push(DEVICE, OFF)
        seen = [current(DEVICE)]
        pop(inner)
        return [*seen, current(DEVICE)]

    assert in_thread(borrowed, start=_thread.start_new_thread) == [OFF, TPU]
    pop(token)


def test_many_threads_at_once():
    opened = [TPU, GPU, OFF]
    failures = []

    def work(mine):
        for _ in range(300):
            token = push(DEVICE, mine)
            if current(DEVICE) is not mine:
                failures.append(mine)
            pop(token)

    threads = [threading.Thread(target=work, args=(opened[n % 3],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert current(DEVICE) is None
    assert regions._open[DEVICE] == []
    assert DEVICE not in regions._newest


def test_an_override_reaches_into_an_open_region():
    token = push(DEVICE, TPU)
    with override(softmax="low"):
        changed = here()
        assert changed.policy.decide("softmax.int").cast == "low"
        assert (changed.low, changed.enabled) == (TPU.low, TPU.enabled)
        with override(softmax="promote"):
            assert here().policy.decide("softmax.int").cast == "promote"
        assert current(DEVICE) is changed
    assert current(DEVICE) is TPU
    pop(token)


def test_an_override_keeps_a_switched_off_region_off():
    token = push(DEVICE, OFF)
    with override(softmax="low"):
        assert here().enabled is False
    assert current(DEVICE) is OFF
    pop(token)


def test_an_override_that_fails_on_entry_leaves_nothing(monkeypatch):
    from xla_amp.policy.resolve import _overrides

    token = push(DEVICE, TPU)
    layer = override(softmax="low")
    monkeypatch.setenv("XLA_AMP_RULES", "softmax")
    with pytest.raises(PolicyError, match="expected operation=cast"), layer:
        pass
    monkeypatch.delenv("XLA_AMP_RULES")
    assert current(DEVICE) is TPU
    assert _overrides.open == ()
    pop(token)


def test_listeners_hear_of_every_region():
    heard = []
    with regions.opening.subscribed(lambda device_type, region: heard.append((device_type, region.policy.name))):
        token = push(DEVICE, GPU)
        with override(gelu="fp32"):
            assert "gelu" in here().policy.operations()
        pop(token)
    assert heard == [(DEVICE, "gpu"), (DEVICE, "gpu")]
