"""`compile`: record a step for its first calls, then replay its program without recording.

The contract (docs/compile.md): Python runs while a step is recorded, and what it read is a constant of the capture.

1. The state is what `state` declares, what the step's own code names (`values`), and the models and optimizers that a
   recorded call uses.  Its tensors are inputs of the program by position (`state`).
2. Each call compares by value: arguments, modes of the thread, plain values, hooks, ``training`` flags, which
   parameters require a gradient, and, as far as the step reads them before it writes them, which have one and the
   numbers of optimizers (`Capture.matches`).  A difference makes another capture, at most `limit`.
3. Two recorded calls of a capture that agree make its `replay`.  After 4 calls that could not, one warning gives the
   reason and the step stays recorded.
4. After 8, 64, 512, ... replays a call is recorded and compared.  If it differs: `CaptureError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from xla_amp import policy as policies
from xla_amp.backends import base, dynamo
from xla_amp.backends.trees import tree_flatten, tree_leaves
from xla_amp.common import arguments, events, interrupts
from xla_amp.errors import CaptureError
from xla_amp.lazy.capture.recording import Recording
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.capture.state import Snapshot, State
from xla_amp.lazy.capture.values import PLAIN, STATE, Entry, NotReplayableError, difference, plain, same
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, pjrt, recompile_reasons
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import regions
from xla_amp.policy.load import default_name

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PATIENCE = 4
"""Recording calls that cannot be replayed until a warning; optimizers create their state in the first."""
AUDIT = 8
"""After 8, 64, 512, ... replays one call is recorded again and compared."""


@overload
def compile(
    step: Callable[_Arguments, _Result],
    *,
    state: Iterable[Any] | None = None,
    strict: bool = False,
    limit: int = 8,
    check: bool = False,
) -> Compiled[_Arguments, _Result]: ...


@overload
def compile(
    step: None = None, *, state: Iterable[Any] | None = None, strict: bool = False, limit: int = 8, check: bool = False
) -> Callable[[Callable[_Arguments, _Result]], Compiled[_Arguments, _Result]]: ...


def compile(
    step: Any = None, *, state: Iterable[Any] | None = None, strict: bool = False, limit: int = 8, check: bool = False
) -> Any:
    """Captures `step` once two of its calls have recorded the same program; later calls replay it.

    Python runs while a step is recorded, and what it reads is a constant of the capture, as under ``jax.jit``, except
    for what is compared at each call: arguments, shapes, modes, ``training`` flags, options of optimizers, hooks, and
    plain values that the step's own code names or that its modules hold.  docs/compile.md has the table.

    Args:
        step: a function of tensors on the lazy device and of Python values: a whole training step (forward pass,
            backward pass, optimizer, scaler) or an inference step.  None returns a decorator.
        state: models, optimizers, scalers and objects that hold tensors, besides those that the step's closure,
            globals that its code names, its bound object and its arguments name directly.
        strict: raise instead of warning when the step cannot be replayed.
        limit: captures kept, one per combination of what is compared.
        check: record each call and compare it with the capture, to find what a replay would miss.

    Returns:
        A function with the arguments of `step` that returns what it returns, as detached tensors.  Its attributes
        `replays` (int) and `reasons` (list of str) tell how often it replayed and why it did not.

    Numbers of optimizers in `xla_amp.syncfree` are inputs of the program, so schedules keep working; step them outside.
    Other optimizers take a tensor as `lr` (and ``capturable=True``); a number that changes is another capture.

    Raises:
        TypeError: `step` is not a function, or an argument is a tensor on another device.
        CaptureError: `strict`, and the step cannot be replayed: it reads values on the host, changes Python values,
            keeps optimizer state on the host, ...  Also without `strict` if a comparison finds that the step no longer
            does what was captured.

    Example:
        >>> import xla_amp
        >>> x = torch.ones(3, device=xla_amp.xla_device())
        >>> double = compile(lambda x: 2 * x)
        >>> [double(x).sum().item() for _ in range(4)], double.replays
        ([6.0, 6.0, 6.0, 6.0], 2)
    """
    if step is None:
        return functools.partial(compile, state=state, strict=strict, limit=limit, check=check)
    if not callable(step):
        raise TypeError(f"compile() expects a function, got {step!r} ({type(step).__name__})")
    arguments.require("compile(strict=...)", strict, bool, "True or False")
    arguments.require("compile(check=...)", check, bool, "True or False")
    if limit < 1:
        raise ValueError(f"compile(limit={limit!r}): expected at least 1")
    if state is not None and (isinstance(state, STATE) or not isinstance(state, Iterable)):
        raise TypeError(f"compile(state=...) expects a list of objects, got a {type(state).__name__}; type state=[...]")
    return Compiled(step, () if state is None else tuple(state), strict, limit, check)


class Capture:
    """The recorded calls of a step for one set of values, and their replay.

    Args:
        before: the state before the first of them.
    """

    def __init__(self, before: Snapshot) -> None:
        self.entries, self.numbers = before.entries, before.numbers
        self.reads = dict(enumerate(gradient is not None for gradient in before.gradients))
        """Index of each gradient whose presence matters -> whether there is one."""
        self._equal: set[frozenset[int]] = set()
        """Numbers of optimizers that are inputs, those in a set with one value; others are constants."""
        self.replays = 0
        self.last: Recording | None = None
        """The last recorded call."""
        self.replay: Replay | None = None
        self.audit_at = AUDIT
        """Count of replays after which a call is recorded and compared."""

    def matches(self, now: Snapshot) -> bool:
        """Whether this is the capture of a call."""
        if not same(self.entries, now.entries) or self._changed_number(now.numbers) is not None:
            return False
        return all((now.gradients[index] is not None) is had for index, had in self.reads.items())

    def covers(self, other: Capture) -> bool:
        """Whether it serves the calls of another one, too, that is not captured."""
        alike = other.replay is None and same(self.entries, other.entries)
        return alike and self.reads.items() <= other.reads.items() and self._changed_number(other.numbers) is None

    def difference(self, now: Snapshot) -> str:
        """Why a call needs another capture."""
        changed = difference(self.entries, now.entries)
        if changed is not None:
            return "{} changed{}".format(*changed)
        number = self._changed_number(now.numbers)
        if number is None:
            return "other parameters have a gradient"
        return f"{now.options[number].label} changed from {self.numbers[number]} to {now.numbers[number]}"

    def _changed_number(self, numbers: list[float]) -> int | None:
        """Which number of an optimizer needs another capture."""
        free = {at for equal in self._equal for at in equal}
        for equal in self._equal:
            if len({numbers[at] for at in equal}) > 1 or numbers[min(equal)] == 0:
                return min(equal)
        pairs = enumerate(zip(self.numbers, numbers, strict=True))
        return next((at for at, (old, new) in pairs if old != new and at not in free), None)

    def add(self, run: Recording, result: Any, after: Snapshot) -> Any:
        """Compares a recorded call with the one before it, and makes a replay if they agree.

        Args:
            run: the recorded call.
            result: what the step returned.
            after: the state after it.

        Returns:
            What the call returns to the user.

        Raises:
            NotReplayableError: they do not agree, or something in the call cannot be replayed.
        """
        last, self.last = self.last, None
        run.resolve(after)
        leaves = tree_leaves(result)
        run.values = [_constant(item) for item in leaves if not isinstance(item, torch.Tensor)]
        needs_backward = any(isinstance(item, torch.Tensor) and item.requires_grad for item in leaves)
        if needs_backward and not run.has_stepped():
            raise NotReplayableError(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        self.reads = dict(self.reads.items() & run.reads.items())
        self._equal = set(run.numbers.values())
        if last is not None:
            replay = Replay(last, run, result)
            if self.replay is not None:
                self.audit_at *= AUDIT
            self.replay, self._equal = replay, set(replay.options.values())
            result = replay.recorded_result()
        self.last = run
        return result


def _constant(value: Any) -> tuple[Any, ...]:
    """An entry of a Python value that a call returned: equal if a replay may return it again.

    An object that is no plain value may hold tensors, so it is equal to itself only.
    """
    return plain(value) if type(value) in PLAIN else (type(value), id(value), value)


@dynamo.graph_break
class Compiled(Generic[_Arguments, _Result]):
    """A step that is replayed once it is captured; `compile` makes it."""

    replays_without_operations = True
    """Tells `find_overflow` to call ``__wrapped__`` instead: a replay dispatches no torch operation."""

    def __init__(
        self, step: Callable[_Arguments, _Result], state: tuple[Any, ...], strict: bool, limit: int, check: bool
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._declared, self._strict, self._limit, self._check = step, state, strict, limit, check
        self.reset()

    def __repr__(self) -> str:
        return f"xla_amp.compile({getattr(self._step, '__qualname__', self._step)!s})"

    def reset(self) -> None:
        """Drops all captures, reasons and counts."""
        self._cache: list[Capture] = []
        self._state = State(self._step, self._declared)
        self.replays = 0
        """Calls that were not recorded."""
        self.reasons: list[str] = []
        """Why calls are recorded instead of replayed."""
        self._failures = 0
        self._given_up = self._ready = False

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
        if not self._ready:
            _require_the_lazy_device()
            self._ready = True
        entry, before = self._find(args, kwargs)
        if entry is None:
            return self._step(*args, **kwargs)
        if entry.replay is not None and entry.replays < entry.audit_at and not self._check:
            try:
                with trace.lock:  # not while recording: the backward pass may record on a thread of autograd's
                    found = entry.replay.run(before)
            except NotReplayableError as reason:
                self._report(str(reason))
                return self._step(*args, **kwargs)
            if found is not None:
                entry.replays += 1
                self.replays += 1
                replayed: _Result = found[0]
                return replayed
            entry.replay = entry.last = None  # a tensor that it reads, and that is not in its state, was freed
        recorded: _Result = self._record(entry, before, args, kwargs)
        return recorded

    def _snapshot(self, args: Any, kwargs: Any) -> Snapshot:
        """The arguments, the modes of this thread and the state."""
        flat, tree = tree_flatten((args, kwargs))
        for arg in flat:
            if isinstance(arg, torch.Tensor) and (arg.device.type != DEVICE_TYPE or arg.layout is not torch.strided):
                remedy = "to_dense()" if arg.device.type == DEVICE_TYPE else "to(xla_amp.xla_device())"
                raise TypeError(
                    f"a captured step expects dense tensors on {DEVICE_TYPE!r}, got one on {arg.device} (shape "
                    f"{list(arg.shape)}, {arg.layout}); call tensor.{remedy} before"
                )
        entries = [("the structure of its arguments", tree), *_modes()]
        return self._state.snapshot(entries, [(f"argument {index}", arg) for index, arg in enumerate(flat)])

    def _find(self, args: Any, kwargs: Any) -> tuple[Capture | None, Snapshot]:
        """The capture of a call, a new one if there is none, None beyond the limit; and the state before it."""
        before = self._snapshot(args, kwargs)
        fitting = [entry for entry in self._cache if entry.matches(before)]
        if fitting:
            return next((entry for entry in fitting if entry.replay is not None), fitting[0]), before
        reason = self._cache[-1].difference(before) if self._cache else ""
        if len(self._cache) >= self._limit:
            if not self.reasons:
                self._report(f"it has been captured {len(self._cache)} times, its limit; {reason}", for_good=False)
            return None, before
        if any(entry.replay is not None for entry in self._cache):
            recompile_reasons.captured_again(reason)
        self._cache.append(Capture(before))
        return self._cache[-1], before

    @interrupts.deferred
    def _record(self, entry: Capture, before: Snapshot, args: Any, kwargs: Any) -> Any:
        """Calls the step, records its program, and compares it with the last recorded call."""
        run = Recording(self._state, before, entry.last)
        result = run.call(self._step, args, kwargs)
        try:
            result = entry.add(run, result, self._snapshot(args, kwargs))
            if entry.replay is not None:
                self._failures = 0
            self._cache = [each for each in self._cache if each is entry or not entry.covers(each)]
            return result
        except NotReplayableError as reason:
            if entry.replay is not None:
                self._given_up = True
                raise CaptureError(
                    f"{self!r} no longer does what was captured, so some of its last {entry.replays} calls may have "
                    f"been wrong: {reason}. Call reset() when you change what it depends on, or pass that as an "
                    "argument"
                ) from None
            self._cache.remove(entry)
            self._failures += 1
            if self._failures >= PATIENCE:
                self._report(str(reason))
            return result

    def _report(self, reason: str, for_good: bool = True) -> None:
        self._given_up = for_good
        text = f"{self!r} cannot be replayed: {reason}"
        if self._strict:
            raise CaptureError(text)
        self.reasons.append(reason)
        events.warn(f"{text}. Each call is recorded: correct, but slower")


def _require_the_lazy_device() -> None:
    base.require_lazy("compile()", "torch_xla.compile")
    base.select().device()


def _modes() -> Iterator[Entry]:
    """The settings of this thread that shape the program."""
    region = regions.current(DEVICE_TYPE)
    low = torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
    yield "the mode of gradients", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield "the default dtype", torch.get_default_dtype()
    yield "the region", (low, region and (region.policy, region.low, region.enabled))
    yield "the policy", policies.resolve(_default_policy())


@functools.cache
def _default_policy() -> policies.Policy:
    return policies.load(default_name(pjrt.platform()))
