"""Tokens of open regions, and threads that Python did not start.

Nesting and other threads are in tests/pytorch/autocast.
"""

from __future__ import annotations

import _thread
import threading

from xla_amp.policy import load
from xla_amp.policy.regions import Region, current, pop, push

DEVICE = "a-device-of-this-test"
TPU = Region(policy=load("tpu"), low="bfloat16")
OFF = Region(policy=load("tpu"), low="bfloat16", enabled=False)


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
