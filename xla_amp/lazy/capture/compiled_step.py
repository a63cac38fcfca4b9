"""`compile`: record a step for its first calls, then replay its program without recording.

`guards` explains what is compared, when, and what happens then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from xla_amp import policy as policies
from xla_amp.backends import base
from xla_amp.backends.trees import tree_flatten
from xla_amp.common import events, interrupts
from xla_amp.errors import CaptureError, DeviceError
from xla_amp.lazy.capture.cache_entry import CacheEntry
from xla_amp.lazy.capture.guards import Guards
from xla_amp.lazy.capture.numbers import CallNumbers
from xla_amp.lazy.capture.reach import NotReplayableError, Values
from xla_amp.lazy.capture.recording import Recording
from xla_amp.lazy.capture.warmup import restored_state
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, mesh, pjrt, recompile_reasons
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import regions
from xla_amp.policy.load import default_name

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PATIENCE = 4
"""Recording calls that may differ from the one before until a warning; optimizers create their state in the first."""


@overload
def compile(
    step: Callable[_Arguments, _Result], *, strict: bool = False, limit: int = 8
) -> Compiled[_Arguments, _Result]: ...


@overload
def compile(
    step: None = None, *, strict: bool = False, limit: int = 8
) -> Callable[[Callable[_Arguments, _Result]], Compiled[_Arguments, _Result]]: ...


def compile(step: Callable[..., Any] | None = None, *, strict: bool = False, limit: int = 8) -> Any:
    """Captures `step` once two calls in a row have recorded the same program; later calls replay it.

    Args:
        step: a function of tensors on the lazy device and of Python values, which are compared: a whole training step
            (forward pass, backward pass, optimizer, scaler) or an inference step.  None returns a decorator.
        strict: raise instead of warning when the step cannot be replayed.
        limit: captures kept, one per combination of shapes, dtypes, other arguments, ``training`` flags and open
            regions; least recently made first.

    Returns:
        A function with the arguments of `step` that returns what it returns, as new detached tensors.  Its attributes
        `replays` (int) and `reasons` (list of str) tell how often it replayed and why it did not.

    Hyperparameters of optimizers are read in each call, so schedules keep working; step them outside.  Growth
    parameters of scalers, modules' attributes and Python values that the step can see are compared in each call; a
    change leads to another capture.

    Raises:
        TypeError: `step` is not a function, or an argument is a tensor on another device.
        CaptureError: `strict`, and the step cannot be replayed: it reads values on the host, changes Python values,
            keeps optimizer state on the host, ...  Also without `strict` if an audit finds that the step no longer
            does what was captured.

    Example:
        >>> import xla_amp
        >>> x = torch.ones(3, device=xla_amp.xla_device())
        >>> double = compile(lambda x: 2 * x)
        >>> [double(x).sum().item() for _ in range(4)], double.replays
        ([6.0, 6.0, 6.0, 6.0], 2)
    """
    if step is None:
        return functools.partial(compile, strict=strict, limit=limit)
    if not callable(step):
        raise TypeError(f"compile() expects a function, got {step!r} ({type(step).__name__})")
    if limit < 1:
        raise ValueError(f"compile(limit={limit!r}): expected at least 1")
    return Compiled(step, strict, limit)


class Compiled(Generic[_Arguments, _Result]):
    """A step that is replayed once it is captured; `compile` makes it."""

    replays_without_operations = True
    """Tells `find_overflow` to call ``__wrapped__`` instead: a replay dispatches no torch operation."""

    def __init__(self, step: Callable[_Arguments, _Result], strict: bool, limit: int) -> None:
        functools.update_wrapper(self, step)
        self._step, self._strict, self._limit = step, strict, limit
        self._cache: list[CacheEntry] = []
        self._guards: Guards | None = None
        self.replays = 0
        """Calls that were not recorded."""
        self._failures = 0
        self._given_up = self._limit_reported = False
        self.reasons: list[str] = []
        """Why calls are recorded instead of replayed."""

    def __repr__(self) -> str:
        return f"xla_amp.compile({getattr(self._step, '__qualname__', self._step)!s})"

    def reset(self) -> None:
        """Drops all captures, reasons and counts."""
        self._cache.clear()
        self._guards, self.replays, self.reasons = None, 0, []
        self._failures, self._given_up, self._limit_reported = 0, False, False

    @interrupts.deferred
    def warm_up(self, *args: Any, **kwargs: Any) -> int:
        """Compiles the programs of calls with such arguments ahead of the first one.

        Calls the step until it is captured, then restores tensors, gradients, optimizers, scalers and the random state.
        Meanwhile the device holds a second copy of what the step overwrites.

        Args:
            args, kwargs: arguments as in a call; of tensors only shape, dtype and layout matter.

        Returns:
            How many programs were compiled; none with ``XLA_AMP_EAGER=1``.  Later calls are recorded and replayed as
            usual, and compile none.

        Raises:
            CaptureError: the step cannot be replayed; the text gives the reason.
        """
        _require_the_lazy_device()
        if trace.eager:
            return 0
        flat_args, _ = tree_flatten((args, kwargs))
        trial, before = Compiled(self._step, True, 1), metrics()["compilations"]
        try:
            others = _others(flat_args)
            trial._guards = guards = Guards(self._step, others)
            entry = CacheEntry([], guards.values(others))
        except NotReplayableError as reason:
            raise CaptureError(f"{self!r} cannot be replayed: {reason}") from None
        with restored_state(guards):
            while not entry.captured:  # ends: a strict step raises after PATIENCE calls that differ
                trial._record(entry, flat_args, args, kwargs)
        return metrics()["compilations"] - before

    @overload
    def __get__(self, instance: None, owner: type) -> Compiled[_Arguments, _Result]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., _Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        # The last three see all operations, of which a replay has none.
        watched = events.decided.listeners or execute.flush_begins.listeners or torch._C._len_torch_dispatch_stack()
        if self._given_up or trace.eager or watched:
            return self._step(*args, **kwargs)
        flat_args, tree = tree_flatten((args, kwargs))
        try:
            entry = self._find_entry(flat_args, tree)
        except NotReplayableError as reason:  # a value that cannot be compared
            self._give_up(str(reason))
            return self._step(*args, **kwargs)
        if entry is None:
            return self._step(*args, **kwargs)
        assert self._guards is not None  # noqa: S101  (`_find_entry`)
        if (lost := entry.lost(self._guards)) is not None:
            recompile_reasons.captured_again(events.user_location(), lost)
        if entry.captured and not entry.audit_is_due():
            with trace.lock:  # not while recording: the backward pass may record on a thread of autograd's
                found = entry.run(_tensors(flat_args))
            if found is not None:
                self.replays += 1
                replayed: _Result = found[0]
                return replayed
            entry.drop_capture()
        recorded: _Result = self._record(entry, flat_args, args, kwargs)
        return recorded

    def _find_entry(self, flat_args: list[Any], tree: Any) -> CacheEntry | None:
        """The cache entry of a call; a new one if there is none; None beyond the limit."""
        if self._guards is None:
            _require_the_lazy_device()
        others = _others(flat_args)
        for known in (None,) if self._guards is None else (self._guards, None):
            guards = known or Guards(self._step, others)  # closures and attributes may hold other objects now
            call, values = _call(flat_args, tree, guards), guards.values(others)
            found = next((entry for entry in self._cache if entry.call == call and entry.values == values), None)
            if found is not None and guards.hold(values):
                break
        self._guards = guards
        if found is not None:
            found.values = values  # shares the list of modules' values, so that comparing them is fast
            return found
        if len(self._cache) >= self._limit:
            if not self._limit_reported:
                self._limit_reported = True
                captures = f"it has been captured {len(self._cache)} times, its limit"
                self._report(f"{captures}; {self._difference(call, values)}")
            return None
        if self._cache:
            recompile_reasons.captured_again(events.user_location(), self._difference(call, values))
        self._cache.append(CacheEntry(call, values))
        return self._cache[-1]

    def _difference(self, call: list[tuple[str, Any]], values: Values) -> str:
        """Why a call needs another entry than those that exist."""
        alike = [entry for entry in self._cache if entry.call == call]
        if alike:
            return f"Python changes {alike[-1].values.difference(values)}"
        pairs = zip(self._cache[-1].call, call, strict=False)
        old, new, text = next((old, new, text) for (_, old), (text, new) in pairs if old != new)
        return text.format(_described(new), _described(old))

    @interrupts.deferred
    def _record(self, entry: CacheEntry, flat_args: list[Any], args: Any, kwargs: Any) -> Any:
        """Calls the step, records its program, and compares it with the last recorded call."""
        guards, tensors = self._guards, _tensors(flat_args)
        assert guards is not None  # noqa: S101  (the callers have made it)
        guards.forget()
        numbers = CallNumbers(entry.calls % 2)
        entry.calls += 1
        run = Recording(numbers, tensors, guards.gradients(), entry.last)
        with step_marker.paused(), numbers.tracked(), run:
            result = self._step(*args, **kwargs)
            execute.flush()
        try:
            after = guards.values(_others(flat_args))
            changed = entry.values.difference(after)
            if changed is not None:
                raise NotReplayableError(f"it changes {changed}, which a replay would not; do that outside")
            result = entry.add(run, result, tensors, guards, after)
            if entry.captured:
                self._failures = 0
            return result
        except NotReplayableError as reason:
            entry.last = None
            if entry.captured:
                self._given_up = True
                raise CaptureError(
                    f"{self!r} no longer does what was captured, so some of its last {entry.replays} calls may have "
                    f"been wrong: {reason}. Call reset() when you change what it depends on, or pass that as an "
                    "argument"
                ) from None
            self._failures += 1
            if self._failures >= PATIENCE:
                self._give_up(str(reason))
            return result

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._report(reason)

    def _report(self, reason: str) -> None:
        text = f"{self!r} cannot be replayed: {reason}"
        if self._strict:
            raise CaptureError(text)
        if reason not in self.reasons:
            self.reasons.append(reason)
            events.warn(f"{text}. Each call is recorded: correct, but slower")


def _require_the_lazy_device() -> None:
    base.require_lazy("compile()", "torch_xla.compile")
    base.select().device()


def _tensors(flat_args: list[Any]) -> list[torch.Tensor]:
    return [item for item in flat_args if isinstance(item, torch.Tensor)]


def _others(flat_args: list[Any]) -> dict[str, Any]:
    """The arguments that are no tensors, by the names that messages give them."""
    return {f"argument {index}": arg for index, arg in enumerate(flat_args) if not isinstance(arg, torch.Tensor)}


def _call(flat_args: list[Any], tree: Any, guards: Guards) -> list[tuple[str, Any]]:
    """The properties of a call, besides Python values, that shape its program, each with words for its change."""
    return [
        ("the structure of its arguments has changed", tree),
        *((f"argument {index} is {{}}, {{}} before", each) for index, each in enumerate(_arguments(flat_args))),
        *(("a mode (grad, autocast, default dtype, policy) is {}, {} before", mode) for mode in _modes()),
        ("other parameters have a gradient, require one, or have hooks", guards.gradient_states()),
    ]


def _arguments(flat_args: list[Any]) -> Iterator[Any]:
    """The properties of the arguments that shape the program; of what is no tensor its type."""
    first_uses: dict[int, int] = {}
    for index, arg in enumerate(flat_args):
        if not isinstance(arg, torch.Tensor):
            yield type(arg)
            continue
        try:
            buffer = tensor_io.buffer_of(arg)
        except (DeviceError, NotImplementedError):  # the latter of one without a storage
            remedy = "to_dense()" if arg.device.type == DEVICE_TYPE else "to(xla_amp.xla_device())"
            raise TypeError(
                f"a captured step expects dense tensors on {DEVICE_TYPE!r}, got one on {arg.device} (shape "
                f"{list(arg.shape)}, {arg.layout}); call tensor.{remedy} before"
            ) from None
        yield (
            buffer.spec, arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.requires_grad,
            first_uses.setdefault(id(buffer), index), mesh.active and mesh.sharding_of(buffer),
        )  # fmt: skip


def _described(item: Any) -> str:
    """A property of a call for messages."""
    if not isinstance(item, tuple):
        return repr(item)
    return ", ".join(str(list(part) if isinstance(part, torch.Size) else part) for part in item[1:6])


def _modes() -> Iterator[Any]:
    """The settings of this thread that shape the program."""
    yield torch.is_grad_enabled()
    yield torch.is_inference_mode_enabled()
    yield torch.get_default_dtype()
    yield torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
    region = regions.current(DEVICE_TYPE)
    yield region and (id(region.policy), region.low, region.enabled)
    yield id(policies.resolve(_default_policy()))


@functools.cache
def _default_policy() -> policies.Policy:
    return policies.load(default_name(pjrt.platform()))
