"""Open autocast regions: a stack per thread and device type.

`push` returns a token and `pop` removes exactly its region.  The same ``autocast`` object can therefore be entered
inside itself, an exception leaves nothing behind, and generators may close out of order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping

from xla_amp.common import events
from xla_amp.errors import PolicyError
from xla_amp.policy.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """The settings of one ``autocast`` block."""

    policy: Policy
    """The effective policy (`xla_amp.policy.resolve`)."""
    low: str
    """The low dtype of this block, ``"bfloat16"``."""
    enabled: bool = True


@dataclasses.dataclass(eq=False, slots=True)
class Token:
    """Proof of one `push`, for `pop`."""

    device_type: str
    region: Region
    stack: list[Token]
    """The stack of the thread and device type that opened the region."""


class _Thread(threading.local):
    """Stacks of one thread."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[Token]] = {}
        self.foreign = isinstance(threading.current_thread(), threading._DummyThread)
        """Whether Python did not start this thread, as with autograd's: it runs work of other threads."""


_thread = _Thread()
_lock = threading.Lock()
_open: dict[str, list[Token]] = {}
"""All open regions of the process by device type, newest last."""
_newest: dict[str, Region] = {}
"""Newest open region by device type, read without the lock."""


@events.Point
def opening(device_type: str, region: Region, /) -> None:
    """Before each region opens, on the thread that opens it.

    For a front that installs a kernel for each operation: an override inside an open region may add operations.
    """


@events.Point
def closed(device_type: str, region: Region, /) -> None:
    """After each region closes."""


def push(device_type: str, region: Region) -> Token:
    """Opens `region` for `device_type` on this thread; `pop` the token to close it."""
    for listener in opening.listeners:
        listener(device_type, region)
    stack = _thread.stacks.setdefault(device_type, [])
    token = Token(device_type, region, stack)
    with _lock:
        stack.append(token)
        _open.setdefault(device_type, []).append(token)
        _newest[device_type] = region
    return token


def pop(token: Token) -> None:
    """Closes the region of `token`; regions opened after it and still open stay as they are.

    Raises:
        PolicyError: the region is closed already.
    """
    with _lock:
        if token not in token.stack:
            raise PolicyError(f"this region of {token.device_type!r} is closed already; pop() each token once")
        token.stack.remove(token)
        of_process = _open[token.device_type]
        of_process.remove(token)
        if of_process:
            _newest[token.device_type] = of_process[-1].region
        else:
            del _newest[token.device_type]
    for listener in closed.listeners:
        listener(token.device_type, token.region)


def current(device_type: str) -> Region | None:
    """The innermost region of `device_type` that is open on this thread, or None.

    On a thread that Python did not start (autograd runs the backward pass on such threads) and that has no open
    region, it is the newest open region of the process.
    """
    stack = _thread.stacks.get(device_type)
    if stack:
        return stack[-1].region
    return _newest.get(device_type) if _thread.foreign else None


def open_here() -> Mapping[str, Region]:
    """The innermost open region of each device type on this thread."""
    return {device_type: stack[-1].region for device_type, stack in _thread.stacks.items() if stack}


def in_force() -> Mapping[str, Region]:
    """The region that `current` gives for each device type."""
    return {**(_newest if _thread.foreign else {}), **open_here()}


@contextlib.contextmanager
def reopened(saved: Mapping[str, Region]) -> Iterator[None]:
    """Makes `saved`, which `in_force` gave, this thread's only regions.  Other threads do not see them."""
    before, foreign = _thread.stacks, _thread.foreign
    _thread.stacks, _thread.foreign = {}, False
    try:
        with contextlib.ExitStack() as undo:
            for device_type, region in saved.items():
                opening(device_type, region)
                undo.callback(closed, device_type, region)
                _thread.stacks[device_type] = [Token(device_type, region, [])]
            yield
    finally:
        _thread.stacks, _thread.foreign = before, foreign
