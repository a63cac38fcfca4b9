"""`compile`: record a step for its first calls, then replay its program without recording.

docs/compile.md has the contract.  Before each call the state is read (`state`, `values`), and what is compared selects
a capture.  Two recorded calls of a capture that agree (`recording`) make its replay (`replay`).
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from xla_amp import policy as policies
from xla_amp.common import arguments, events, interrupts
from xla_amp.engines import base
from xla_amp.errors import CaptureError
from xla_amp.lazy.capture.counters import Count
from xla_amp.lazy.capture.recording import Recording
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.capture.state import Snapshot, State
from xla_amp.lazy.capture.values import STATE, Entry, NotReplayableError, difference, is_dense, same
from xla_amp.lazy.graph.trace import Owner, heard, this_thread, trace
from xla_amp.lazy.programs import execute, pjrt, recompile_reasons
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import regions
from xla_amp.policy.load import default_name
from xla_amp.torch_common import dynamo
from xla_amp.torch_common.trees import tree_flatten, tree_map_only

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PATIENCE = 4
"""Recording calls that cannot be replayed until a warning; optimizers create their state in the first."""
_READERS = {"param_groups", "get_last_lr"}
"""A step that has neither name reads no number of an optimizer that does not step."""
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
    for what is compared at each call: docs/compile.md has the table.

    Args:
        step: a training or inference step on tensors of the lazy device and Python values.  None returns a decorator.
        state: models, optimizers, scalers and objects that hold tensors, besides those that the step names directly.
        strict: raise instead of warning when the step cannot be replayed.
        limit: captures kept, one per combination of what is compared.
        check: record each call and compare it with the capture, to find what a replay would miss.

    Returns:
        A function like `step`; its `replays` (int) and `reasons` (list of str) tell how often it replayed, and why not.

    Raises:
        TypeError: `step` is not a function, or an argument is a tensor on another device.
        CaptureError: `strict`, and the step cannot be replayed; or it no longer does what was captured.

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
    """The recorded calls of a step for one set of values, and their replay; `before` is the state before the first."""

    def __init__(self, before: Snapshot) -> None:
        self._before = before
        self._reads = set(range(len(before.had_gradient)))
        """The parameters where it matters whether they have a gradient."""
        self._inputs: set[int] = set()
        """Numbers of optimizers that are inputs, or that no optimizer has read; others are constants."""
        self._given: list[int] = []
        """Those that are inputs."""
        self._counts: dict[str, Count] = {}
        self._entries = self._compared(before)
        self.last: Recording | None = None
        self.replay: Replay | None = None
        self.replays, self.audit_at = 0, AUDIT
        """Calls that were replayed, and their count after which one is recorded and compared."""

    def _compared(self, now: Snapshot) -> list[list[Entry]]:
        numbers = enumerate(zip(now.options, now.numbers, strict=True))
        constants = [(option.label, number) for at, (option, number) in numbers if at not in self._inputs]
        inputs = [*map(now.numbers.__getitem__, self._given)]
        equal = [inputs.index(number) if number else -1 for number in inputs]
        had = [had for at, had in enumerate(now.had_gradient) if at in self._reads]
        last = [("which numbers of optimizers are equal or zero", equal), ("which parameters have a gradient", had)]
        return [constants, *now.entries, last]

    def matches(self, now: Snapshot) -> bool:
        """Whether this is the capture of a call."""
        compared = self._compared(now)
        if not same(self._entries, compared):
            return False
        if not self._counts:
            self._entries = compared  # the next call has most of these objects, too, which is seen faster
        return True

    def difference(self, now: Snapshot) -> str:
        """Why a call needs another capture."""
        changed = difference(self._entries, self._compared(now))
        return "" if changed is None else "{} changed{}".format(*changed)

    def add(self, run: Recording, result: Any, after: Snapshot) -> None:
        """Makes a replay if a recorded call, which has returned `result`, agrees with the one before it.

        Raises:
            NotReplayableError: they do not agree, or something in the call cannot be replayed.
        """
        last, self.last = self.last, run
        run.resolve(after, result)
        self._reads &= run.reads
        options = run.options
        if last is not None:
            replay = Replay(last, run, result)
            self.audit_at *= AUDIT if self.replays == self.audit_at else 1
            self.replay, options = replay, replay.options
        inputs = {run.numbers[at] for at in options.values()}
        self._given = [at for at, number in enumerate(run.numbers) if number is not None and number in inputs]
        unread = () if run.stepped or _READERS.intersection(after.names) else enumerate(run.numbers)
        self._inputs = {*self._given, *(at for at, number in unread if number is not None)}
        self._counts = run.counts
        compared = self._compared(self._before)
        self._entries = [[(label, self._counts.get(label, by)) for label, by in part] for part in compared]


class _Captures:
    """What one thread has captured; programs are shared."""

    def __init__(self, step: Callable[..., Any], declared: tuple[Any, ...]) -> None:
        self.cache: list[Capture] = []
        self.state = State(step, declared)
        self.refusals: list[str] = []
        """Why calls could not be replayed since the last that could."""
        self.given_up = False


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

    def __copy__(self) -> Compiled[_Arguments, _Result]:
        """The step itself, as copies of functions are; a copy of what it names belongs to another step."""
        return self

    def __deepcopy__(self, memo: Any) -> Compiled[_Arguments, _Result]:
        return self

    def __reduce__(self) -> str:
        """Pickles by name, as functions; pickle raises if that name is another object."""
        return str(getattr(self, "__qualname__", repr(self)))

    def reset(self) -> None:
        """Drops all captures, reasons and counts."""
        self._captures: weakref.WeakKeyDictionary[Owner, _Captures] = weakref.WeakKeyDictionary()
        self.replays = 0
        """Calls that were not recorded."""
        self.reasons: list[str] = []
        """Why calls are recorded instead of replayed."""

    @property
    def _own(self) -> _Captures:
        """Those of this thread."""
        found = self._captures.get(owner := this_thread())
        return found or self._captures.setdefault(owner, _Captures(self._step, self._declared))

    @overload
    def __get__(self, instance: None, owner: type) -> Compiled[_Arguments, _Result]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., _Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)  # which has `replays` and `reset`, too

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        # These see all operations, of which a replay has none.
        listened = events.decided.listeners or heard(execute.flush_nears, execute.flush_begins)
        watched = listened or torch._C._len_torch_dispatch_stack()
        own = self._own
        if own.given_up or trace.eager or watched:
            return self._step(*args, **kwargs)
        if not own.cache:
            base.require_lazy("compile()", "torch_xla.compile")
            base.select().device()
        before = self._snapshot(own, args, kwargs)
        capture = self._find(own, before)
        if capture and not (capture.last or capture.replay) and own.state.find_schedules(before):  # its first call
            own.cache.remove(capture)
            before = self._snapshot(own, args, kwargs)
            capture = self._find(own, before)
        if capture is None:
            return self._step(*args, **kwargs)
        if capture.replay is not None and capture.replays < capture.audit_at and not self._check:
            try:
                with trace.lock:  # not while recording: the backward pass may record on a thread of autograd's
                    found = capture.replay.run(before)
                    self.replays += found is not None
            except NotReplayableError as reason:
                self._report(str(reason))
                return self._step(*args, **kwargs)
            if found is not None:
                capture.replays += 1
                replayed: _Result = found[0]
                return replayed
            capture.replay = capture.last = None  # a tensor that it reads, and that is not in its state, was freed
        recorded: _Result = self._record(own, capture, before, args, kwargs)
        return recorded

    def _snapshot(self, own: _Captures, args: Any, kwargs: Any) -> Snapshot:
        """The arguments, the modes of this thread and the state."""
        flat, tree = tree_flatten((args, kwargs))
        for arg in flat:
            if isinstance(arg, torch.Tensor) and not is_dense(arg):
                raise TypeError(
                    f"a captured step expects dense tensors on {DEVICE_TYPE!r}, got one on {arg.device} (shape "
                    f"{list(arg.shape)}, {arg.layout}); call tensor.to(xla_amp.xla_device()) or to_dense() before"
                )
        return own.state.snapshot([("the structure of its arguments", tree), *_modes()], flat)

    def _find(self, own: _Captures, before: Snapshot) -> Capture | None:
        """The capture of a call, a new one if there is none; None beyond the limit."""
        for capture in reversed(own.cache):
            if capture.matches(before):
                own.cache.remove(capture)
                own.cache.append(capture)  # the one used last
                return capture
        reason = own.cache[-1].difference(before) if own.cache else ""
        if len(own.cache) >= self._limit and own.cache[0].replays:
            del own.cache[0]  # what it was for is over, as an epoch
        if len(own.cache) >= self._limit:
            if not self.reasons:
                self._report(f"it has been captured {len(own.cache)} times, its limit; {reason}", for_good=False)
            return None
        if any(capture.replay is not None for capture in own.cache):
            recompile_reasons.captured_again(reason)
        own.cache.append(Capture(before))
        return own.cache[-1]

    @interrupts.deferred
    def _record(self, own: _Captures, capture: Capture, before: Snapshot, args: Any, kwargs: Any) -> Any:
        """Calls the step, records its program, and compares it with the last recorded call."""
        run, known = Recording(own.state, before), len(own.state.counters)
        result = run.call(self._step, args, kwargs)
        try:
            capture.add(run, result, self._snapshot(own, args, kwargs))
            if len(own.state.counters) > known:
                own.cache = [capture]  # others compare the value of the counter
            if capture.replay is not None:
                own.refusals.clear()
            return tree_map_only(torch.Tensor, lambda each: each.detach() if each.requires_grad else each, result)
        except NotReplayableError as reason:
            if capture.replay is not None:
                own.given_up = True
                raise CaptureError(
                    f"{self!r} no longer does what was captured, so some of its last {capture.replays} calls may have "
                    f"been wrong: {reason}. Call reset() when you change what it depends on, or pass that as an "
                    "argument"
                ) from None
            own.cache.remove(capture)
            own.refusals.append(str(reason))
            if len(own.refusals) >= PATIENCE:
                self._report(str(reason))
        return result

    def _report(self, reason: str, for_good: bool = True) -> None:
        self._own.given_up = for_good
        text = f"{self!r} cannot be replayed: {reason}"
        if self._strict:
            raise CaptureError(text)
        self.reasons.append(reason)
        events.warn(f"{text}. Each call is recorded: correct, but slower")


def _modes() -> list[Entry]:
    """The settings of this thread that shape the program."""
    region = regions.current(DEVICE_TYPE)
    low = torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
    return [
        ("the mode of gradients", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())),
        ("the default dtype", torch.get_default_dtype()),
        ("the region", (low, region and (region.policy, region.low, region.enabled))),
        ("the policy", policies.resolve(default_name(pjrt.platform()))),
    ]
