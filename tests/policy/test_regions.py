"""Regions as threads that Python did not start see them; nesting and other threads are in tests/pytorch/autocast."""

from __future__ import annotations

import _thread
import queue

from xla_amp.policy import load
from xla_amp.policy.regions import Region, current, pop, push

DEVICE = "a-device-of-this-test"
TPU = Region(policy=load("tpu"), low="bfloat16")
OFF = Region(policy=load("tpu"), low="bfloat16", enabled=False)


def test_a_thread_that_python_did_not_start_sees_the_newest_and_works_for_others():
    """Autograd's threads: re-entering a region there (custom_bwd) must not hide the region of the caller after it."""
    seen: queue.Queue[list[Region | None]] = queue.Queue()

    def look():
        before, inner = current(DEVICE), push(DEVICE, OFF)
        inside = current(DEVICE)
        pop(inner)
        seen.put([before, inside, current(DEVICE)])

    def borrowed():
        _thread.start_new_thread(look, ())
        return seen.get(timeout=10)

    assert borrowed() == [None, OFF, None]
    token = push(DEVICE, TPU)
    assert borrowed() == [TPU, OFF, TPU]
    inner = push(DEVICE, OFF)
    assert borrowed() == [OFF, OFF, OFF]
    pop(inner)
    assert borrowed() == [TPU, OFF, TPU]
    pop(token)
    assert borrowed() == [None, OFF, None]
