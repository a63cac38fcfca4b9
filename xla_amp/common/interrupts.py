"""Signals whose handlers raise (Ctrl-C, SIGALRM, SIGTERM), kept out of code that must run as a whole.

Python runs the handler of a signal between two bytecodes of the main thread, and wherever C code asks for signals.  A
handler that raises there can leave half an operation behind.  `take_over` wraps the handlers that Python calls.  A
wrapped handler runs at once, as before, unless the main thread

* holds `lock` or runs a function marked by `deferred`: then it runs at the end of that;
* runs C++ code that an exception would abort (`in_native_code`): then it runs at the first bytecode after it.

So sleeping, waiting for a lock and reading from a socket end as they always do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import ctypes
import functools
import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from xla_amp.common import events

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_waiting: list[tuple[Handler, int]] = []
"""Signals that have arrived and whose handlers have not run."""
_deferring = 0
"""Calls of functions marked by `deferred` that the main thread is in."""


@events.Point
def in_native_code() -> bool:  # type: ignore[empty-body]
    """Asks whether some thread is in C++ code through which no exception may pass."""


class Lock(_thread.RLock):  # type: ignore[misc]
    """A reentrant lock that also keeps the handlers of signals from running while the main thread holds it."""

    def __exit__(self, *_: object) -> None:
        self.release()
        if _waiting:
            deliver()

    def held(self) -> bool:
        """Whether this thread holds the lock."""
        try:
            _owned.notify(0)
        except RuntimeError:
            return False
        return True


lock = Lock()
_owned = threading.Condition(lock)  # refuses to notify unless this thread holds the lock


class Handler:
    """What Python calls for a signal instead of the user's handler."""

    __slots__ = ("user",)

    def __init__(self, user: Callable[[int, FrameType | None], Any]) -> None:
        self.user = user

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if lock.held() or _deferring:
            _waiting.append((self, signum))
        elif any(in_native_code()):
            _waiting.append((self, signum))
            _call_between_bytecodes(_delivery)
        else:
            self.user(signum, frame)


def deliver() -> None:
    """Runs the handlers of the signals that wait, unless they must wait longer or this is not the main thread."""
    if not _on_main_thread():
        return
    while _waiting and not lock.held() and not _deferring:
        if any(in_native_code()):
            _call_between_bytecodes(_delivery)
            return
        handler, signum = _waiting.pop(0)
        if _waiting:  # this one may raise
            _call_between_bytecodes(_delivery)
        frame = inspect.currentframe()
        handler.user(signum, frame and frame.f_back)


def deferred(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: handlers of signals run after a call of `function`, which leaves nothing half done."""

    @functools.wraps(function)
    def whole(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        global _deferring
        if not _on_main_thread():
            return function(*args, **kwargs)
        _deferring += 1
        try:
            return function(*args, **kwargs)
        finally:
            _deferring -= 1
            if _waiting:
                deliver()

    return whole


def _on_main_thread() -> bool:
    return _thread.get_ident() == threading.main_thread().ident


class _PendingCall:
    """An object whose truth value is read between two bytecodes of the main thread, for what that does."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __bool__(self) -> bool:
        self.function()
        return False


_delivery = _PendingCall(deliver)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)


def _call_between_bytecodes(call: _PendingCall) -> None:
    """Unlike handlers of signals, pending calls never run where C code asks for signals.

    PyObject_IsTrue returns -1 for an exception, as a pending call does.  `call` must live for ever.
    """
    _add_pending_call(_is_true, id(call))


def take_over() -> None:
    """Wraps the handlers of all signals, those that are installed later included.

    ``signal.signal`` and ``signal.getsignal`` go on to return what the user has set.  They look up the functions of
    `_signal` in each call, so replacing those reaches code that has imported ``signal.signal`` by name, as notebooks
    do.  Default and ignored signals are left alone.
    """
    install, get = _signal.signal, _signal.getsignal
    if hasattr(install, "__wrapped__"):
        return

    @functools.wraps(install)
    def install_wrapped(*args: Any) -> Any:
        if len(args) == 2 and callable(args[1]):
            args = (args[0], Handler(args[1]))
        return _unwrapped(install(*args))

    @functools.wraps(get)
    def get_unwrapped(*args: Any) -> Any:
        return _unwrapped(get(*args))

    _signal.signal, _signal.getsignal = install_wrapped, get_unwrapped

    def wrap_present() -> None:
        for signum in signal.valid_signals():
            handler = get(signum)
            if callable(handler) and not isinstance(handler, Handler):
                install(signum, Handler(handler))

    if _on_main_thread():
        wrap_present()
    else:
        _calls.append(_PendingCall(wrap_present))
        _call_between_bytecodes(_calls[-1])


_calls: list[_PendingCall] = []


def _unwrapped(handler: Any) -> Any:
    return handler.user if isinstance(handler, Handler) else handler
