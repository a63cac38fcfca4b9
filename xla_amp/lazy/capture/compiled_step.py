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
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np
import torch

from xla_amp import policy as policies
from xla_amp.backends import base, dynamo
from xla_amp.backends.trees import tree_flatten, tree_leaves
from xla_amp.common import arguments, config, events, interrupts
from xla_amp.errors import CaptureError, DeviceError
from xla_amp.lazy.capture.recording import Recording
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.capture.state import Snapshot, State, difference
from xla_amp.lazy.capture.values import PLAIN, STATE, NotReplayableError, plain
from xla_amp.lazy.capture.warmup import restored_state
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, mesh, pjrt, recompile_reasons
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import tensor_io
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
    step: None = None,
    *,
    state: Iterable[Any] | None = None,
    strict: bool = False,
    limit: int = 8,
    check: bool = False,
) -> Callable[[Callable[_Arguments, _Result]], Compiled[_Arguments, _Result]]: ...


def compile(
    step: Callable[..., Any] | None = None,
    *,
    state: Iterable[Any] | None = None,
    strict: bool = False,
    limit: int = 8,
    check: bool = False,
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
        call: the arguments and modes of the calls that it serves, each with words for messages.
        before: the state before the first of them.
    """

    def __init__(self, call: list[tuple[str, Any]], before: Snapshot) -> None:
        self.call, self.chunks = call, before.chunks
        self._values = before.values()
        had, self.numbers = before.start()
        self._reads = dict(enumerate(had))
        """Gradients whose presence matters -> whether there is one."""
        self._equal: set[frozenset[int]] = set()
        """Numbers of optimizers that are inputs, those in a set with one value; others are constants."""
        self.replays = 0
        self.last: Recording | None = None
        """The last recorded call."""
        self.replay: Replay | None = None
        self.lost: str | None = None
        """Why the replay was dropped, to be reported at the next call."""
        self._audit_at = AUDIT
        self._program: weakref.ref[XlaProgram] | None = None

    def matches(self, call: list[tuple[str, Any]], now: Snapshot) -> bool:
        """Whether this is the capture of a call."""
        return (
            self.call == call
            and self._values == now.values()
            and all((now.gradients[at] is not None) is had for at, had in self._reads.items())
            and self.changed_number(now.numbers) is None
        )

    def changed_number(self, numbers: list[float]) -> int | None:
        """Which number of an optimizer needs another capture."""
        free: set[int] = set()
        for equal in self._equal:
            free |= equal
            values = {numbers[at] for at in equal}
            if len(values) != 1 or not all(value and math.isfinite(value) for value in values):
                return min(equal)
        pairs = enumerate(zip(self.numbers, numbers, strict=True))
        return next((at for at, (old, new) in pairs if old != new and at not in free), None)

    def covers(self, other: Capture) -> bool:
        """Whether it serves the calls of another one, too, that is not captured."""
        alike = self.call == other.call and self._values == other._values and other.replay is None
        return alike and self._reads.items() <= other._reads.items() and self.changed_number(other.numbers) is None

    def audit_is_due(self) -> bool:
        """Whether the next call is recorded although there is a replay."""
        return self.replays >= self._audit_at

    def drop(self, reason: str | None) -> None:
        """Drops the replay; the next two recorded calls can make another."""
        self.lost = None if self.replay is None else reason
        self.replay = self.last = None
        self.replays, self._audit_at = 0, AUDIT

    def _hold(self, reference: weakref.ref[XlaProgram]) -> None:
        """Drops the replay when the cache of programs drops its program: to stay within bounds it must not keep it."""
        program = reference()
        if program is not None and (self._program is None or self._program() is not program):
            self._program, drop = reference, weakref.WeakMethod(self.drop)
            reason = f"its program was dropped to stay within {config.PROGRAM_MEMORY}"
            program.holders.append(lambda: None if (method := drop()) is None else method(reason))

    def add(self, run: Recording, result: Any, arguments: list[torch.Tensor], after: Snapshot) -> Any:
        """Compares a recorded call with the one before it, and makes a replay if they agree.

        Args:
            run: the recorded call.
            result: what the step returned.
            arguments: tensor arguments.
            after: the state after it.

        Returns:
            What the call returns to the user.

        Raises:
            NotReplayableError: they do not agree, or something in the call cannot be replayed.
        """
        last, self.last = self.last, None
        run.resolve(after)
        leaves = tree_leaves(result)
        run.plain = [_constant(item) for item in leaves if not isinstance(item, torch.Tensor)]
        needs_backward = any(isinstance(item, torch.Tensor) and item.requires_grad for item in leaves)
        if needs_backward and not (run.stepped or run.writes_gradients):
            raise NotReplayableError(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        self._hold(run.program)
        self._reads = dict(self._reads.items() & run.reads.items())
        self._equal = set(run.numbers.values())
        if last is not None:
            if run.plain != last.plain:
                kinds = ", ".join(dict.fromkeys(kind.__name__ for kind, *_ in (*last.plain, *run.plain)))
                raise NotReplayableError(
                    f"it returns a Python value that is another one in each call (among {kinds}); return tensors and "
                    "constants, in tuples, lists and dictionaries"
                )
            replay = Replay(last, run, result, arguments, after)
            if self.replay is not None:
                self._audit_at *= AUDIT
            self.replay, self._equal = replay, set(replay.options.values())
            result = replay.recorded_result(arguments, after)
        self.last = run
        return result


def _constant(value: Any) -> tuple[Any, ...]:
    """An entry of a Python value that a call returned: equal if a replay may return it again.

    An object that is no plain value may hold tensors, so it is equal to itself only.
    """
    if type(value) in PLAIN:
        return plain(value)  # type: ignore[no-any-return]
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return type(value), id(value), value


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
        self._given_up = self._limit_reported = self._ready = False

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
        flat_args, tree = tree_flatten((args, kwargs))
        trial, before = Compiled(self._step, self._declared, True, self._limit, False), metrics()["compilations"]
        state = trial._state.snapshot(_others(flat_args), _tensors(flat_args))
        with restored_state(trial._state.owners(), state.parameters):
            state.release()
            while not any(entry.replay for entry in trial._cache):  # ends: a strict step raises
                trial._record(*trial._find(flat_args, tree), flat_args, args, kwargs)
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
        if not self._ready:
            _require_the_lazy_device()
            self._ready = True
        flat_args, tree = tree_flatten((args, kwargs))
        entry, before = self._find(flat_args, tree)
        if entry is None:
            return self._step(*args, **kwargs)
        if entry.lost is not None:
            recompile_reasons.captured_again(events.user_location(), entry.lost)
            entry.lost = None
        if entry.replay is not None and not entry.audit_is_due() and not self._check:
            try:
                with trace.lock:  # not while recording: the backward pass may record on a thread of autograd's
                    found = entry.replay.run(_tensors(flat_args), before)
            except NotReplayableError as reason:
                self._give_up(str(reason))
                return self._step(*args, **kwargs)
            if found is not None:
                entry.replays += 1
                self.replays += 1
                replayed: _Result = found[0]
                return replayed
            entry.drop("a tensor that it reads, and that is not in its state, was freed")
        recorded: _Result = self._record(entry, before, flat_args, args, kwargs)
        return recorded

    def _find(self, flat_args: list[Any], tree: Any) -> tuple[Capture | None, Snapshot]:
        """The capture of a call, a new one if there is none, None beyond the limit; and the state before it."""
        call = _call(flat_args, tree)
        before = self._state.snapshot(_others(flat_args), _tensors(flat_args))
        fitting = [entry for entry in self._cache if entry.matches(call, before)]
        if fitting:
            return next((entry for entry in fitting if entry.replay is not None), fitting[0]), before
        if len(self._cache) >= self._limit:
            if not self._limit_reported:
                self._limit_reported = True
                captures = f"it has been captured {len(self._cache)} times, its limit"
                self._report(f"{captures}; {self._difference(call, before)}")
            return None, before
        if any(entry.replay is not None for entry in self._cache):
            recompile_reasons.captured_again(events.user_location(), self._difference(call, before))
        self._cache.append(Capture(call, before))
        return self._cache[-1], before

    def _difference(self, call: list[tuple[str, Any]], now: Snapshot) -> str:
        """Why a call needs another capture than those that exist."""
        alike = [entry for entry in self._cache if entry.call == call]
        if not alike:
            pairs = zip(self._cache[-1].call, call, strict=False)
            old, new, text = next((old, new, text) for (_, old), (text, new) in pairs if old != new)
            return text.format(_described(new), _described(old))
        change = difference(alike[-1].chunks, now.chunks)
        if change is not None:
            return f"Python changes {change}"
        number = alike[-1].changed_number(now.numbers)
        if number is None:
            return "other parameters have a gradient"
        option, old = now.options[number], alike[-1].numbers[number]
        return f"Python changes {option.label} from {old!r} to {now.numbers[number]!r}{_remedy(option.owner)}"

    @interrupts.deferred
    def _record(self, entry: Capture | None, before: Snapshot, flat_args: list[Any], args: Any, kwargs: Any) -> Any:
        """Calls the step, records its program, and compares it with the last recorded call."""
        if entry is None:
            return self._step(*args, **kwargs)
        run = Recording(self._state, before, entry.last)
        with step_marker.paused(), run:
            result = self._step(*args, **kwargs)
            execute.flush()
        try:
            run.require_one_program()
            after = self._state.snapshot(_others(flat_args), _tensors(flat_args))
            _require_unchanged(before, after)
            result = entry.add(run, result, _tensors(flat_args), after)
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


def _require_unchanged(before: Snapshot, after: Snapshot) -> None:
    """Raises `NotReplayableError` if a call has changed Python values, which a replay would not."""
    changed = before.difference(after)
    numbers = zip(before.options, before.numbers, after.numbers, strict=False)
    changed = changed or next(
        (f"{each.label} from {old!r} to {new!r}" for each, old, new in numbers if old != new), None
    )
    changed = changed or next((label for label, _ in set(before.schedules) ^ set(after.schedules)), None)
    if changed is not None:
        raise NotReplayableError(f"it changes {changed}, which a replay would not; do that outside")


def _remedy(optimizer: Any) -> str:
    """What to type for an optimizer whose numbers change."""
    name = type(optimizer).__name__
    if getattr(optimizer, "numbers_are_inputs", False):
        return ""
    if name in ("SGD", "Adam", "AdamW"):
        return f"; use xla_amp.syncfree.{name}, whose numbers are inputs of the program"
    return f"; use {name}(..., lr=torch.tensor(..., device={DEVICE_TYPE!r}), capturable=True)"


def _require_the_lazy_device() -> None:
    base.require_lazy("compile()", "torch_xla.compile")
    base.select().device()


def _tensors(flat_args: list[Any]) -> list[torch.Tensor]:
    return [item for item in flat_args if isinstance(item, torch.Tensor)]


def _others(flat_args: list[Any]) -> list[tuple[str, Any]]:
    """The objects among the arguments that have a state, with the names that messages give them."""
    return [(f"argument {index}", arg) for index, arg in enumerate(flat_args) if isinstance(arg, STATE)]


class _Value:
    """An argument that is no tensor: equal to one of the same type that says that it is equal."""

    def __init__(self, value: Any) -> None:
        self.value = value.tobytes() if isinstance(value, np.ndarray) else value
        self.kind = (type(value), value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or self.kind != other.kind:
            return False
        if self.value is other.value or self.kind in PLAIN:
            return self.value is other.value or bool(plain(self.value) == plain(other.value))
        try:
            return bool(self.value == other.value)
        except Exception:
            return False  # such as a dataclass of tensors

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.value)


def _call(flat_args: list[Any], tree: Any) -> list[tuple[str, Any]]:
    """The arguments and modes of a call, each with words for its change."""
    return [
        ("the structure of its arguments has changed", tree),
        *((f"argument {index} is {{}}, {{}} before", each) for index, each in enumerate(_arguments(flat_args))),
        *(("a mode (grad, autocast, default dtype, policy) is {}, {} before", mode) for mode in _modes()),
    ]


def _arguments(flat_args: list[Any]) -> Iterator[Any]:
    """What of the arguments shapes the program."""
    first_uses: dict[int, int] = {}
    for index, arg in enumerate(flat_args):
        if not isinstance(arg, torch.Tensor):
            yield type(arg) if isinstance(arg, STATE) else _Value(arg)
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
    yield region and (region.policy, region.low, region.enabled)
    yield policies.resolve(_default_policy())


@functools.cache
def _default_policy() -> policies.Policy:
    return policies.load(default_name(pjrt.platform()))
