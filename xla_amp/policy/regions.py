"""Which region is open: a stack per thread and device type, changed by tokens.

A token restores what was there before it whatever happened in between, so the same ``autocast`` object can be
entered again inside itself, an exception leaves nothing behind, and generators may close out of order.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping

from xla_amp.errors import PolicyError
from xla_amp.policy.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """What one ``autocast`` block asks for."""

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
    """The stack that holds it: that of the thread and device type of the push."""


class _Thread(threading.local):
    """Stacks of one thread."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[Token]] = {}
        self.foreign = isinstance(threading.current_thread(), threading._DummyThread)
        """Whether Python did not start this thread (autograd's are such): it runs work on behalf of other threads."""


_thread = _Thread()
_lock = threading.Lock()
_open: dict[str, list[Token]] = {}
"""All open regions of the process by device type, newest last."""
_newest: dict[str, Region] = {}
"""The last of each, for reading without the lock."""


_listeners: tuple[Callable[[str, Region], object], ...] = ()
_closing: tuple[Callable[[str, Region], object], ...] = ()


def on_push(listener: Callable[[str, Region], object]) -> None:
    """Calls ``listener(device_type, region)`` before every region that opens from now on, on the thread that opens it.

    For a front that installs one kernel per operation: an override inside an open region may add operations.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)


def on_pop(listener: Callable[[str, Region], object]) -> None:
    """Calls ``listener(device_type, region)`` after every region that closes from now on."""
    global _closing
    with _lock:
        _closing = (*_closing, listener)


def push(device_type: str, region: Region) -> Token:
    """Opens `region` for `device_type` on this thread; `pop` the token to close it."""
    for listener in _listeners:
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
        PolicyError: it was closed before.
    """
    with _lock:
        if token not in token.stack:
            raise PolicyError(f"this region of {token.device_type!r} is closed already; pop() each token once")
        token.stack.remove(token)
        everywhere = _open[token.device_type]
        everywhere.remove(token)
        if everywhere:
            _newest[token.device_type] = everywhere[-1].region
        else:
            del _newest[token.device_type]
    for listener in _closing:
        listener(token.device_type, token.region)


def current(device_type: str) -> Region | None:
    """The innermost region of `device_type` that is open on this thread, or None.

    On a thread that Python did not start (autograd runs the backward pass on such threads) and that has none open, the
    newest region that is open anywhere in the process.
    """
    stack = _thread.stacks.get(device_type)
    if stack:
        return stack[-1].region
    return _newest.get(device_type) if _thread.foreign else None


def opened_here(device_type: str) -> Region | None:
    """The innermost region of `device_type` that this thread itself opened, or None."""
    stack = _thread.stacks.get(device_type)
    return stack[-1].region if stack else None


def open_here() -> Mapping[str, Region]:
    """The innermost open region of each device type on this thread."""
    return {device_type: stack[-1].region for device_type, stack in _thread.stacks.items() if stack}
