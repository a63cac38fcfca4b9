"""Forked children: using the device in one raises, anything else works.

A child has none of XLA's threads, so that running a program or reading a value would wait for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import warnings
from collections.abc import Iterator
from typing import Any

from xla_amp.common import events, interrupts
from xla_amp.common.types import LAZY
from xla_amp.errors import DeviceError
from xla_amp.lazy.base import private_api

_forked = False
_clients: list[Any] = []
"""JAX's clients during a fork."""


@events.Point
def in_child() -> None:
    """In each forked child: what waits for the device in the parent must not wait for it there."""


def is_forked() -> bool:
    """Whether this process is a forked child of one that has used the device."""
    return _forked


def check() -> None:
    """Raises in a forked child.

    Raises:
        DeviceError: naming the start methods that work.
    """
    if _forked:
        raise DeviceError(
            f"Cannot re-initialize the device {LAZY!r} in forked subprocess: it has none of the parent's threads. "
            "To use the device with multiprocessing, you must use the 'spawn' or 'forkserver' start method; to load "
            "data, return CPU tensors from the child and move them to the device in the parent"
        )


def watch() -> None:
    """Prepares the forks of this process; call it once, after JAX has started."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Inside, JAX does not warn of a fork: a loader's worker gets no tensor of the device, and a use there raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called.*JAX is multithreaded", RuntimeWarning)
        yield


def _before() -> None:
    interrupts.lock.__enter__()  # in the child, no other thread would release it
    _clients.extend(private_api.clients())


def _in_parent() -> None:
    _clients.clear()
    interrupts.lock.__exit__()


def _in_child() -> None:
    global _forked
    interrupts.lock.release()
    _forked = True
    in_child()
    # At exit Python would destroy JAX's client, which waits for its threads or crashes.
    atexit.unregister(private_api.exit_function())
    for client in _clients:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    gc.freeze()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc: called first at exit, with the status; C++ destroys nothing after it
        libc.on_exit(libc._exit, None)
