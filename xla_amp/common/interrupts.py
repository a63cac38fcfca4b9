"""Signals whose handlers raise (Ctrl-C, SIGALRM, SIGTERM), kept out of code that must run as a whole.

Python runs the handler of a signal between two bytecodes of the main thread, and wherever C code asks for signals.  A
handler that raises there can leave half an operation behind.  `take_over` wraps the handlers that Python calls.  A
wrapped handler runs at once, as before, unless the main thread

* holds `lock` or runs a function marked by `deferred`: then it runs at the end of that;
* runs C++ code that an exception would abort (`in_native_code`): then the signal is raised again a moment later.

So sleeping, waiting for a lock and reading from a socket end as they always do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import functools
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from xla_amp.common import events

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_MOMENT = 0.002
"""Seconds until a signal is raised again that has found the main thread in C++ code."""
waiting: list[tuple[Callable[[int, FrameType | None], object], int]] = []
"""Handlers that the main thread calls once it is out of `lock` and `deferred`, and the numbers of their signals."""
_deferring = 0
"""Calls of functions marked by `deferred` that the main thread is in."""


@events.Point
def in_native_code() -> bool:  # type: ignore[empty-body]
    """Asks whether some thread is in C++ code through which no exception may pass."""


@events.Point
def changes_hands() -> None:
    """A thread holds `lock` that was not the last one to hold it."""


class Lock(_thread.RLock):  # type: ignore[misc]
    """A reentrant lock that also keeps the handlers of signals from running while the main thread holds it.

    What it protects may belong to threads: `changes_hands` tells when another one than before holds it.
    """

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = 0
        """The last thread that held it, by `get_ident`; what hears of `changes_hands` sets it."""

    def __enter__(self) -> bool:  # type: ignore[override]
        self.acquire()
        try:
            if _thread.get_ident() != self.thread:
                changes_hands()
        except BaseException:
            self.release()
            raise
        return True

    def __exit__(self, *_: object) -> None:
        self.release()
        if waiting:
            deliver()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Context manager: the thread, which holds it, does not hold it inside."""
        times = 0
        while self.held():
            self.release()
            times += 1
        try:
            yield
        finally:
            for _ in range(times):
                self.__enter__()

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
            waiting.append((self, signum))
        elif any(in_native_code()):
            _thread.start_new_thread(_raise_soon, (signum,))
        else:
            self.user(signum, frame)


def _raise_soon(signum: int) -> None:
    time.sleep(_MOMENT)
    # A real signal: what the main thread waits for by now, such as a sleep, ends.
    signal.pthread_kill(threading.main_thread().ident or 0, signum)


def deliver() -> None:
    """Calls the handlers that wait, unless they must wait longer or this is not the main thread."""
    if waiting and _on_main_thread() and not lock.held() and not _deferring:
        handler, signum = waiting.pop(0)
        try:
            handler(signum, inspect.currentframe())
        finally:
            deliver()


def deferred(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: handlers of signals run after a call of `function`, which leaves nothing half done."""

    @functools.wraps(function)
    def whole(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        global _deferring
        if _thread.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        _deferring += 1
        try:
            return function(*args, **kwargs)
        finally:
            _deferring -= 1
            if waiting:
                deliver()

    return whole


def _on_main_thread() -> bool:
    return _thread.get_ident() == threading.main_thread().ident


_OF_C = frozenset({signal.SIGPROF})
"""Signals with a handler that Python does not know: libtpu's profiler sends this one."""


def take_over() -> None:
    """Wraps the handlers of all signals, those that are installed later included.

    ``signal.signal`` and ``signal.getsignal`` go on to return what the user has set.  The first one looks up the
    function of `_signal` in each call, so replacing that reaches code that has imported ``signal.signal`` by name, as
    notebooks do.  Default and ignored signals are left alone.

    A signal in `_OF_C` is not set to its default where Python has never set another: Lightning does that after a run,
    and the next one would end the process.
    """
    install, get = _signal.signal, signal.getsignal
    if hasattr(install, "__wrapped__"):
        return

    @functools.wraps(install)
    def install_wrapped(*args: Any) -> Any:
        if len(args) == 2 and args[0] in _OF_C and args[1] == get(args[0]) == signal.SIG_DFL:
            return signal.SIG_DFL
        if len(args) == 2 and callable(args[1]):
            args = (args[0], Handler(args[1]))
        return _unwrapped(install(*args))

    @functools.wraps(get)
    def get_unwrapped(signalnum: int) -> Any:
        return _unwrapped(get(signalnum))

    _signal.signal, signal.getsignal = install_wrapped, get_unwrapped

    def wrap_present(*_: object) -> None:
        for signum in signal.valid_signals():
            handler = get(signum)
            if callable(handler) and not isinstance(handler, Handler):
                install(signum, Handler(handler))

    waiting.append((wrap_present, 0))  # only the main thread may install handlers
    deliver()


def _unwrapped(handler: Any) -> Any:
    return handler.user if isinstance(handler, Handler) else handler
