"""Extension points, which a lower layer calls and upper layers subscribe to; the stream of decisions; warnings.

A point costs nothing without listeners: a hot path tests for them before it builds a record::

    if events.decided.listeners:
        events.decided(events.DecisionRecord(...))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Generic, ParamSpec, TypeVar

from xla_amp.common.types import Cast, Layer
from xla_amp.errors import XlaAmpWarning

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_lock = threading.Lock()


class Point(Generic[_Arguments, _Result]):
    """Decorator that makes a function without a body an extension point, with its name, signature and docstring.

    Example:
        >>> @Point
        ... def program_ran(count: int) -> str:
        ...     "After each program."
        >>> with program_ran.subscribed(lambda count: f"program {count}"):
        ...     program_ran(3)
        ['program 3']
    """

    def __init__(self, declared: Callable[_Arguments, _Result]) -> None:
        functools.update_wrapper(self, declared)
        self.listeners: tuple[Callable[_Arguments, _Result], ...] = ()
        """Replaced, never changed in place, so reading needs no lock."""

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> list[_Result]:
        """Calls the listeners in the order in which they came; an exception of one reaches the caller."""
        return [listener(*args, **kwargs) for listener in self.listeners]

    def subscribe(self, listener: Callable[_Arguments, _Result]) -> None:
        """Calls `listener` from now on, from any thread."""
        with _lock:
            self.listeners = (*self.listeners, listener)

    def unsubscribe(self, listener: Callable[_Arguments, _Result]) -> None:
        """Removes `listener`.

        Raises:
            ValueError: `listener` is not subscribed.
        """
        with _lock:
            left = list(self.listeners)
            left.remove(listener)
            self.listeners = tuple(left)

    @contextlib.contextmanager
    def subscribed(self, listener: Callable[_Arguments, _Result]) -> Iterator[None]:
        """Context manager: `listener` is subscribed while the block runs."""
        self.subscribe(listener)
        try:
            yield
        finally:
            self.unsubscribe(listener)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an operation ran."""

    operation: str
    """ATen name, with the overload unless it is the default; on other fronts the primitive or StableHLO operation."""
    phase: str
    """``forward``, ``backward`` or ``update``; empty where that is unknown."""
    module: str
    """Path of the module; for a backward operation that of its forward operation; empty for the root and outside."""
    location: str
    """The user's ``file:line``; for a backward operation that of its forward operation."""
    gradient_of: str = ""
    """For a backward operation: the forward operation."""
    iteration: str = ""
    """In a loop: which iteration, from 0, outermost loop first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecisionRecord:
    """An operation that ran or that a program has, the decision about it, and its cost.  Every report reads these."""

    operation: str
    """ATen name with overload, or the front's name where no ATen operation corresponds."""
    cast: Cast
    layer: Layer
    """Layer of the rule that won; ``builtin`` for an operation without a rule."""
    policy: str
    """Name of the policy."""
    front: str
    """``pytorch``, ``jax`` or ``stablehlo``."""
    given: tuple[str, ...]
    """dtypes of the tensor operands before the cast."""
    used: tuple[str, ...]
    """dtypes of the same operands after the cast."""
    why: str = ""
    source: str = ""
    origin: str = ""
    """Where the rule is written: file and line, variable, or the call that set it."""
    result: tuple[str, ...] = ()
    """dtypes of the results, where known."""
    location: str = ""
    """The user's ``file:line``, where the front can tell."""
    module: str = ""
    """Path of the module that it ran in, where modules are followed; empty for the model itself and outside modules."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the operands of `given`, where known; -1 for a size that is not."""
    result_shapes: tuple[tuple[int, ...], ...] = ()
    flops: int | None = None
    """Floating-point operations of a product or convolution: a multiplication and an addition each; None: unknown."""
    bytes: int | None = None
    """Bytes of operands and results, where the front knows them; otherwise they follow from shapes and dtypes."""

    @property
    def before(self) -> str:
        """The different dtypes of `given`, with commas."""
        return ", ".join(dict.fromkeys(self.given))

    @property
    def after(self) -> str:
        """The different dtypes of `used`, with commas."""
        return ", ".join(dict.fromkeys(self.used))

    @property
    def casts(self) -> list[str]:
        """The casts of operands: ``float32->bfloat16``."""
        return [f"{given}->{used}" for given, used in zip(self.given, self.used, strict=True) if given != used]


@Point
def decided(record: DecisionRecord, /) -> None:
    """An operation ran, or a program has one: every decision of this process, from any thread."""


@Point
def undecided(record: DecisionRecord, /) -> None:
    """An operation of torch without a rule ran, and its kernel was installed (`operation_recorder`)."""


@contextlib.contextmanager
def capture() -> Iterator[list[DecisionRecord]]:
    """Collects the records of all threads while the block runs.

    Example:
        >>> with capture() as records:
        ...     pass
        >>> records
        []
    """
    records: list[DecisionRecord] = []
    with decided.subscribed(records.append):
        yield records


_OURS = frozenset({"", "contextlib", "torch", "xla_amp"})
LIBRARIES = (
    _OURS
    | {"concurrent", "functools", "threading"}
    | {"accelerate", "equinox", "flax", "jax", "lightning", "transformers"}
)
"""Packages that are never the user's program."""


def warn(text: str, category: type[XlaAmpWarning] = XlaAmpWarning, at: tuple[str, int] | None = None) -> None:
    """Warns at the user's line.  No other function of this library calls `warnings`.

    Args:
        text: what happened, and what to type instead.
        category: by which users filter it.
        at: file and line; None is the innermost stack frame outside torch, JAX, xla_amp and the frameworks above them.
    """
    frame = user_frame(LIBRARIES)
    if at is not None:
        warnings.warn_explicit(text, category, *at)
    elif frame is None:
        warnings.warn(text, category, stacklevel=2)
    else:
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        name = frame.f_globals.get("__name__")
        warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, name, registry)


def user_location(libraries: frozenset[str] = _OURS) -> str:
    """``file:line`` of the innermost stack frame outside `libraries`, by default torch, xla_amp, contextlib, or ``""``.

    Frames are compared by module name: a folder on the user's path may be called torch or xla_amp.  Generated code
    (our kernels, graphs of torch.fx) has no module name and is skipped.
    """
    frame = user_frame(libraries)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_frame(libraries: frozenset[str] = _OURS) -> FrameType | None:
    """The frame of `user_location`, or None.

    `libraries` are packages whose frames are not the user's.
    """
    frame = inspect.currentframe()
    while frame is not None:
        root = frame.f_globals.get("__name__", "").partition(".")[0]
        if root not in libraries and frame.f_code is not user_frame.__code__:
            return frame
        frame = frame.f_back
    return None
