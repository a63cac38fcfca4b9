"""The device guard that torch's C++ code calls, safe while a Python error is pending.

torch/csrc/acc/Module.cpp has `noexcept` functions that call the guard's method `type_`, several times per node of a
backward pass.  A C++ exception there ends the process.  Two things would throw when a hook has raised, because C++
destroys its stream guards while Python's error indicator is still set:

* the look-up of `type_`: it misses in the instance, sees the error and reports the method as missing.  So `type_` is
  an attribute of the instance;
* the call: a result that is returned while an error is set becomes a SystemError.  So `type_` first takes the error
  away, into a slot.

A third is a signal: between look-up and call pybind11 makes a string of a name, where Python runs the handlers of
signals.  `interrupts` keeps those that raise from running there.

autograd then raises a SystemError ("returned NULL without setting an exception"), and `run_backward` raises the error
from the slot in its place.  `type_` runs no bytecode: it is the ``__next__`` of an iterator made of C objects.  It
costs 1.5 microseconds per node of a backward pass (2.4 ms instead of 2.1 for 200 nodes).

The cure in torch is small: `type()` in C++, and no Python in functions that are `noexcept`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_amp.common import interrupts
from xla_amp.errors import DeviceError
from xla_amp.lazy.graph import trace as graph
from xla_amp.lazy.programs import execute
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.torch_common import backward_threads, module_paths

_SLOTS = 1024
"""Calls of `type_` that may follow an error before `_take_error` looks for it."""

_python = ctypes.PyDLL(None)
# Converting arguments would run code with the error still set, so the functions get prepared ones, without `argtypes`.
_fetch_error = _python.PyErr_Fetch
_fetch_error.restype = None
_normalize_error = _python.PyErr_NormalizeException
_normalize_error.restype = None

_guards: list[Any] = []  # C++ holds no reference to the Python object
_slots = [tuple(ctypes.c_void_p() for _ in range(3)) for _ in range(_SLOTS)]
"""Type, value and traceback of an error, as owned references; null while there is none."""


def make() -> Any:
    """The guard to register with torch."""
    pointers = [tuple(map(ctypes.byref, slot)) for slot in _slots]
    fetched = itertools.starmap(_fetch_error, itertools.cycle(pointers))
    device_type = itertools.repeat(torch.autograd.DeviceType.PrivateUse1)  # type: ignore[attr-defined]
    device_types = map(operator.itemgetter(1), zip(fetched, device_type, strict=False))
    # ctypes prepares some of a function's state at its first call, which must not be one with an error set.
    for _ in range(2):
        next(device_types)

    class Guard(torch._C._acc.DeviceGuard):
        type_ = device_types.__next__

    guard = Guard()
    guard.type_ = found = device_types.__next__  # type: ignore[method-assign]
    _guards.append(guard)
    at_rest = execute.reference_counts([found])
    # C++ code holds a reference to the method from its look-up until it has returned.
    interrupts.in_native_code.subscribe(lambda: execute.reference_counts([found]) > at_rest)
    return guard


_lock = threading.Lock()
_ACCELERATORS = frozenset({"cuda", "hpu", "mps", "mtia", "xpu"})
"""Device types of torch for which autograd asks the process's one accelerator for a stream."""
_ASSERTION = "opt_ready_stream"
"""A word of torch's internal assertion where a node of such a device has no stream."""


def run_backward(original: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """torch's ``_engine_run_backward`` that raises the errors of hooks which `type_` took away.

    An error does not tell which pass it belongs to, so the passes of several threads run one after the other.  They
    did before: autograd has one thread for the device.  What that records belongs to the thread that calls this.

    torch takes the device for its one accelerator from its registration on, and no public function takes that back
    (pytorch#161129, torch 2.8 to 2.15).  Of a node on CUDA it then has no stream, and fails in an internal assertion.

    Raises:
        DeviceError: an output, or a node of the pass, is on another accelerator.
    """
    types = {x.device.type for x in outputs if isinstance(x, torch.Tensor)}
    if not types.isdisjoint(_ACCELERATORS):
        raise _two_accelerators(", ".join(map(repr, sorted(types & _ACCELERATORS))))
    on_device = DEVICE_TYPE in types
    alone = _lock if on_device and not module_paths.in_backward() else contextlib.nullcontext()
    with alone, graph.backward(on_device):
        return _run(original, outputs, *args, **kwargs)


def _run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with backward_threads.chosen():
            return original(*args, **kwargs)
    except SystemError:
        error = _take_error()
        if error is None:
            raise
    except RuntimeError as assertion:
        if _ASSERTION not in str(assertion):
            raise
        error = _two_accelerators("another accelerator")
    raise error


def _two_accelerators(where: str) -> DeviceError:
    return DeviceError(
        f"cannot run a backward pass on {where}: torch has one accelerator in a process, which is {DEVICE_TYPE!r} "
        "since the lazy device was started (pytorch#161129). Train on each in a process that does not use the other. "
        "xla_amp.xla_device() and tensors on 'jax' start the lazy device; xla_amp.autocast('cuda') does not"
    )


def _take_error() -> BaseException | None:
    """One of the errors in the slots; forgets all of them."""
    found = None
    for kind, value, traceback in _slots:
        if not kind.value:
            continue
        _normalize_error(ctypes.byref(kind), ctypes.byref(value), ctypes.byref(traceback))
        error: BaseException = ctypes.cast(value, ctypes.py_object).value
        if traceback.value:
            error.__traceback__ = ctypes.cast(traceback, ctypes.py_object).value
        for reference in (kind, value, traceback):
            if reference.value:
                _python.Py_DecRef(reference)
            reference.value = None
        found = found or error
    return found
