"""Signals whose handlers raise (Ctrl-C, SIGALRM, SIGTERM), kept out of code that must run as a whole.

Python runs the handler of a signal between two bytecodes of the main thread, and wherever C code asks for signals.  A
handler that raises there can leave half an operation behind.  `take_over` wraps the handlers that Python calls.  A
wrapped handler runs at once, as before, unless the main thread

* holds `lock`: then it runs when the lock is released;
* runs code marked by `deferred` or `uninterruptible`, or C++ code that an exception would abort (`in_native_code`):
  then it runs at the first bytecode after it.

So sleeping, waiting for a lock and reading from a socket end as they always do.  A handler that raises first calls
`before_raising`, where an unfinished training step is undone.  Python drops an exception in a finalizer (``__del__``, a
callback of a weak reference); one of a handler is raised again after it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_waiting: list[tuple[Handler, int]] = []
"""Signals that have arrived and whose handlers have not run."""
_whole: set[CodeType] = set()
"""Code of functions that run as a whole, with a call of `deliver` after them."""
_short: set[CodeType] = set()
"""Code of short functions that run as a whole, with nothing after them."""
before_raising: list[Callable[[BaseException], None]] = []
"""Called, with `lock` held, with the exception of a handler before it goes on to the user."""
after_undo: list[Callable[[], None]] = []
"""Called, with `lock` held, after an unfinished training step was undone."""
in_native_code: Callable[[], bool] = bool
"""Whether some thread is in C++ code through which no exception may pass."""


class Lock(_thread.RLock):  # type: ignore[misc]
    """A reentrant lock that also keeps the handlers of signals from running while the main thread holds it."""

    def __exit__(self, *_: object) -> None:
        self.release()
        if _waiting:
            deliver()

    def held(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]


lock = Lock()


class Handler:
    """What Python calls for a signal instead of the user's handler."""

    __slots__ = ("user",)

    def __init__(self, user: Callable[[int, FrameType | None], Any]) -> None:
        self.user = user

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        where = _obstacle(frame)
        if where is None:
            self.run(signum, frame)
            return
        _waiting.append((self, signum))
        if where is _short:
            _call_between_bytecodes(_delivery)

    def run(self, signum: int, frame: FrameType | None) -> None:
        """Runs the user's handler."""
        try:
            self.user(signum, frame)
        except BaseException as error:
            error._xla_amp_of_handler = True  # type: ignore[attr-defined]
            with lock:
                for listener in before_raising:
                    listener(error)
            raise


def deliver(insist: bool = False) -> None:
    """Runs the handlers of the signals that wait, unless they must wait longer or this is not the main thread.

    Args:
        insist: try again at the next bytecodes, also in code with a call of this function after it.
    """
    if _thread.get_ident() != threading.main_thread().ident:
        return
    frame = sys._getframe(1)
    where = _obstacle(frame)
    if _waiting and (where is _short or (where is _whole and insist)):
        _call_between_bytecodes(_delivery)
    while where is None and _waiting:
        handler, signum = _waiting.pop(0)
        if _waiting:  # this one may raise
            _call_between_bytecodes(_delivery)
        handler.run(signum, frame)


def _obstacle(frame: FrameType | None) -> Any:
    """What the main thread is in that must run as a whole: `lock`, `_whole`, `_short` (also for C++), or None."""
    if lock.held():
        return lock
    if in_native_code():
        return _short
    found = None
    while frame is not None:
        if frame.f_code in _whole:
            return _whole
        if frame.f_code in _short:
            found = _short
        frame = frame.f_back
    return found


class _Call:
    """An object whose truth value is read between two bytecodes of the main thread, for what that does."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __bool__(self) -> bool:
        self.function()
        return False


_delivery = _Call(lambda: deliver(insist=True))
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)


def _call_between_bytecodes(call: _Call) -> None:
    """Unlike handlers of signals, pending calls never run where C code asks for signals.

    PyObject_IsTrue returns -1 for an exception, as a pending call does.  `call` must live for ever.
    """
    _add_pending_call(_is_true, id(call))


_dropped: list[BaseException] = []
"""Exceptions of handlers that Python has dropped, to be raised again."""


def _raise_dropped() -> None:
    if _obstacle(sys._getframe(1)) is not None:
        _call_between_bytecodes(_raising)
    elif _dropped:
        raise _dropped.pop(0)


_raising = _Call(_raise_dropped)


def _keep_dropped(original: Callable[[sys.UnraisableHookArgs], Any]) -> Callable[[sys.UnraisableHookArgs], Any]:
    """``sys.unraisablehook``, but for exceptions of handlers: the step is undone, so the program must not go on."""

    @functools.wraps(original)
    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if error is None or not hasattr(error, "_xla_amp_of_handler"):
            original(unraisable)
            return
        _dropped.append(error)
        _call_between_bytecodes(_raising)

    uninterruptible(hook)
    return hook


def deferred(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: handlers of signals run after a call of `function`, which leaves nothing half done."""
    _whole.add(function.__code__)

    @functools.wraps(function)
    def whole(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        finally:
            if _waiting:
                deliver()

    return whole


def uninterruptible(*functions: Any) -> None:
    """As `deferred`, for short functions, which stay as they are: ``__exit__`` of a context manager."""
    _short.update(function.__code__ for function in functions)


def deferred_until_told(function: Any) -> None:
    """As `deferred`, for a function of another library near whose end `deliver_soon` is called."""
    _whole.add(function.__code__)


def deliver_soon() -> None:
    """Runs the handlers of the signals that wait after the code that must run as a whole."""
    if _waiting:
        _call_between_bytecodes(_delivery)


def take_over() -> None:
    """Wraps the handlers of all signals, those that are installed later included.

    ``signal.signal`` and ``signal.getsignal`` go on to return what the user has set.  They look up the functions of
    `_signal` in each call, so replacing those reaches code that has imported ``signal.signal`` by name, as notebooks
    do.  Default and ignored signals are left alone.
    """
    install, get = _signal.signal, _signal.getsignal
    if hasattr(install, "__wrapped__"):
        return
    sys.unraisablehook = _keep_dropped(sys.unraisablehook)

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

    if threading.current_thread() is threading.main_thread():
        wrap_present()
    else:
        _calls.append(_Call(wrap_present))
        _call_between_bytecodes(_calls[-1])


_calls: list[_Call] = []


def _unwrapped(handler: Any) -> Any:
    return handler.user if isinstance(handler, Handler) else handler
