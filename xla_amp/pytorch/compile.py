"""`compile`: a step that is recorded for its first calls and then run without being recorded.

What a replay needs to know comes from three places: which values the program reads and writes from the engine
(`xla_amp.engines.jax.capture`), how optimizers compute numbers from hyperparameters from `followed`, and which Python
values the step depends on from `surroundings`.  Whatever is not explained by these is a reason to go on recording, and
is said.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from xla_amp import policy as policies
from xla_amp import record
from xla_amp.engines.jax import boundary, capture, cut, mesh, storage
from xla_amp.engines.jax.capture import Geometry, NotReplayable, Replay, Watch
from xla_amp.engines.jax.metrics import metrics
from xla_amp.engines.jax.storage import DEVICE_TYPE
from xla_amp.errors import CaptureError, EngineError
from xla_amp.pytorch import devices
from xla_amp.pytorch.followed import Hyperparameter, Ledger, Term, evaluate
from xla_amp.pytorch.surroundings import PLAIN, Surroundings
from xla_amp.pytorch.warm_up import without_a_trace

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PATIENCE = 4
"""Recorded calls that may differ from the one before (optimizers make their state in the first) until we say so."""
AUDIT = 8
"""After 8, 64, 512, ... replays one call is recorded again and compared."""


def compile(
    step: Callable[_Arguments, _Result] | None = None, *, strict: bool = False, limit: int = 8
) -> Any:
    """Makes `step` run without being recorded once two calls in a row have recorded the same program.

    Args:
        step: a function of tensors on the lazy device, and of anything hashable: a whole training step (forward pass,
            backward pass, optimizer, scaler) or an inference step.  None returns a decorator.
        strict: raise instead of warning when the step cannot be replayed.
        limit: captures kept, one per combination of shapes, dtypes, other arguments, ``training`` flags and open
            regions; least recently made first.

    Returns:
        A function with the arguments of `step` that returns what it returns, as detached fresh tensors.  Its attributes
        `replays` (int) and `reasons` (list of str) say how often it replayed and why not.

    Hyperparameters of optimizers are read anew at each call, so schedules go on working; they must be stepped outside.
    Growth parameters of scalers, modules' attributes and Python values that the step can see are compared at each
    call, and a change leads to another capture.

    Raises:
        TypeError: `step` is no function, or an argument is a tensor on another device.
        CaptureError: `strict`, and the step cannot be replayed: it reads values on the host, changes Python values,
            keeps optimizer state on the host, ...  Also whenever an audit finds that replays were not what the step
            does by now.

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


class Compiled:
    """What `compile` returns."""

    def __init__(self, step: Callable[..., Any], strict: bool, limit: int) -> None:
        functools.update_wrapper(self, step)
        self._step, self._strict, self._limit = step, strict, limit
        self._plans: dict[Any, list[_Plan]] = {}
        self._around: Surroundings | None = None
        self.replays = 0
        """Calls that were not recorded."""
        self._failures = 0
        self._given_up = self._said_limit = False
        self.reasons: list[str] = []
        """Why calls are recorded that could have been replays."""

    def __repr__(self) -> str:
        return f"xla_amp.compile({getattr(self._step, '__qualname__', self._step)!s})"

    def reset(self) -> None:
        """Forgets all captures and reasons; counts start anew."""
        self._plans.clear()
        self._around, self.replays, self.reasons = None, 0, []
        self._failures, self._given_up, self._said_limit = 0, False, False

    def warm_up(self, *args: Any, **kwargs: Any) -> int:
        """Compiles what calls with such arguments will run, ahead of the first one.

        The step is called until it is captured, and everything is put back as it was: tensors, gradients, optimizers,
        scalers, the random state.  Meanwhile the device holds a second copy of what the step overwrites.

        Args:
            args, kwargs: arguments as in a call; of tensors only shape, dtype and layout matter.

        Returns:
            How many programs were compiled.  The calls that follow are recorded and replayed as ever, and compile none.

        Raises:
            CaptureError: the step cannot be replayed; the text says why.
        """
        _require_the_lazy_device()
        leaves, _ = tree_flatten((args, kwargs))
        trial, plan, before = Compiled(self._step, True, 1), _Plan([], []), metrics()["compilations"]
        with without_a_trace(Surroundings(self._step, (Optimizer, torch.amp.GradScaler))):
            while not plan.captured:  # ends: a strict one raises after PATIENCE calls that differ
                trial._recorded(plan, leaves, args, kwargs)
        return metrics()["compilations"] - before

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._given_up or record.sinks or cut.observer is not None:  # the last two see every operation
            return self._step(*args, **kwargs)
        _require_the_lazy_device()
        leaves, tree = tree_flatten((args, kwargs))
        if self._around is None:
            self._around = Surroundings(self._step, (Optimizer, torch.amp.GradScaler))
        plan = self._plan(leaves, tree)
        if plan is None:
            return self._step(*args, **kwargs)
        if plan.ready():
            with storage.tape.lock:  # not while recording: the backward pass may record on a thread of autograd's
                result = plan.replay(leaves)
            if result is not _STALE:
                self.replays += 1
                return result
            plan.forget()
        return self._recorded(plan, leaves, args, kwargs)

    def _plan(self, leaves: list[Any], tree: Any) -> _Plan | None:
        around = self._around
        assert around is not None  # noqa: S101  (set by the caller)
        key = (tree, *_signature(leaves), *_modes())
        values, absent = around.values(), around.absent()
        plans = self._plans.setdefault(key, [])
        for plan in plans:
            if plan.values == values and plan.absent == absent:
                return plan
        if plans:  # what it sees may be other objects by now
            self._around = around = Surroundings(self._step, (Optimizer, torch.amp.GradScaler))
            values, absent = around.values(), around.absent()
            for plan in plans:
                if plan.values == values and plan.absent == absent:
                    return plan
        kept = sum(map(len, self._plans.values()))
        if kept >= self._limit:
            if self._said_limit:
                return None
            self._said_limit = True
            changed = around.difference(plans[-1].values, values) if plans else None
            self._say(
                f"it has been captured in {kept} forms, its limit; "
                + (f"Python changes {changed}" if changed else "its arguments differ again (shapes? plain numbers?)")
            )
            return None
        plans.append(_Plan(values, absent))
        return plans[-1]

    def _recorded(self, plan: _Plan, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        self._around = around = Surroundings(self._step, (Optimizer, torch.amp.GradScaler))
        before, sizes = around.values(), around.sizes()
        grads = [(p, p.grad) for p in around.parameters]
        call = _Call(plan.calls % 2)
        plan.calls += 1
        with boundary.paused(), call.followed(), Watch(call.ledger.resolve, plan.last_run()) as watch:
            result = self._step(*args, **kwargs)
            cut.cut()
        try:
            changed = around.difference(before, around.values()) or around.size_difference(sizes, around.sizes())
            if changed is not None:
                raise NotReplayable(f"it changes {changed}, which a replay would not; do that outside")
            result = plan.learn(call, watch, leaves, grads, result, around)
            if plan.captured:
                self._failures = 0
            return result
        except NotReplayable as reason:
            if plan.captured:
                self._given_up = True
                raise CaptureError(
                    f"{self!r} no longer does what was captured, so some of its last {plan.replays} calls may have "
                    f"been wrong: {reason}. Call reset() when you change what it depends on, or pass that as an "
                    "argument"
                ) from None
            self._failures += 1
            if self._failures >= PATIENCE:
                self._given_up = True
                self._say(str(reason))
            return result

    def _say(self, reason: str) -> None:
        text = f"{self!r} cannot be replayed: {reason}"
        if self._strict:
            raise CaptureError(text)
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"{text}. It goes on being recorded in each call: right, and slower", UserWarning, 4)


def _require_the_lazy_device() -> None:
    engine = devices.engine()
    if engine.DEVICE_TYPE != DEVICE_TYPE:
        raise EngineError(
            f"compile() captures steps of the lazy device {DEVICE_TYPE!r}, and this process uses "
            f"{engine.DEVICE_TYPE!r}: use torch_xla.compile there, or set XLA_AMP_ENGINE=jax"
        )
    engine.device()


def _signature(leaves: list[Any]) -> Iterator[Any]:
    """What of the arguments shapes the program."""
    places: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            yield type(leaf), leaf
            continue
        if leaf.device.type != DEVICE_TYPE:
            raise TypeError(
                f"a captured step expects tensors on {DEVICE_TYPE!r}, got one on {leaf.device} (shape "
                f"{list(leaf.shape)}); move it with tensor.to(xla_amp.xla_device()) before the call"
            )
        buffer = storage.buffer_of(leaf)
        yield (
            buffer.spec, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.requires_grad,
            places.setdefault(id(buffer), index), mesh.layout_of(buffer),
        )  # fmt: skip


def _modes() -> Iterator[Any]:
    """The settings of this thread that shape the program."""
    yield torch.is_grad_enabled()
    yield torch.is_inference_mode_enabled()
    yield torch.get_default_dtype()
    yield torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
    region = policies.current(DEVICE_TYPE)
    yield region and (id(region.policy), region.low, region.enabled)
    yield id(policies.resolve(policies.default_name(devices.engine().platform())))


class _Call:
    """What the optimizers did in one recorded call."""

    def __init__(self, shift: int) -> None:
        self.ledger = Ledger(shift)
        self.optimizers: list[Optimizer] = []
        self.on_host: str | None = None
        """What an optimizer computes with on the host, in words."""
        self.changed: str | None = None
        """What the step did to an optimizer's options, in words."""
        self._options: list[tuple[Optimizer, list[list[Any]]]] = []
        self._kept: list[tuple[dict[str, Any], str, Any, Any]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, optimizers that step compute with `Followed` hyperparameters."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            self._put_back()
            for optimizer, before in self._options:
                if _options(optimizer) != before:
                    self.changed = (
                        f"it changes the options of {type(optimizer).__name__} (a schedule's step?), which a replay "
                        "would not; do that outside"
                    )
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self._options.append((optimizer, _options(optimizer)))
        self.on_host = self.on_host or _state_on_host(optimizer)
        for group in optimizer.param_groups:
            for name, value in group.items():
                stand_in = self._stand_in(id(group), name, value)
                if stand_in is not value:
                    self._kept.append((group, name, value, stand_in))
        for group, name, _, stand_in in self._kept:
            group[name] = stand_in

    def _stand_in(self, group: int, name: str, value: Any) -> Any:
        if _can_be_followed(value):
            return self.ledger.follow(Hyperparameter(group, name, None), lambda: value)
        if isinstance(value, tuple) and any(map(_can_be_followed, value)):
            return tuple(
                self.ledger.follow(Hyperparameter(group, name, place), functools.partial(float, item))
                if _can_be_followed(item)
                else item
                for place, item in enumerate(value)
            )
        return value

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for group, name, value, stand_in in self._kept:
            if group[name] is stand_in:
                group[name] = value
        self._kept.clear()

    def reads(self) -> Mapping[Hyperparameter, Callable[[], float]]:
        """How to read each hyperparameter from now on."""
        groups = {id(group): group for optimizer in self.optimizers for group in optimizer.param_groups}
        return {
            hyper: functools.partial(_read, groups[hyper.group], hyper.name, hyper.place) for hyper in self.ledger.reads
        }

    def settings(self) -> list[Any]:
        """The other options of the groups, which a capture holds fixed."""
        return [
            (len(group["params"]), *(_fixed(value) for value in group.values()))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]


def _options(optimizer: Optimizer) -> list[list[Any]]:
    return [[v for k, v in group.items() if isinstance(v, (*PLAIN, tuple))] for group in optimizer.param_groups]


def _can_be_followed(value: Any) -> bool:
    return type(value) is float and value != 0 and math.isfinite(value)


def _read(group: dict[str, Any], name: str, place: int | None) -> float:
    return group[name] if place is None else group[name][place]


def _fixed(value: Any) -> Any:
    """A group's option as far as a capture depends on it: followed numbers count only as such."""
    if _can_be_followed(value):
        return float
    if isinstance(value, tuple):
        return tuple(map(_fixed, value))
    return id(value) if isinstance(value, (torch.Tensor, list)) else value


def _state_on_host(optimizer: Optimizer) -> str | None:
    """What of the optimizer's state or options the host computes with, in words."""
    name = type(optimizer).__name__
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE):
                return (
                    f"{name} keeps its {key!r} on the host; use the class of the same name in xla_amp.syncfree, or "
                    "capturable=True where the optimizer has it"
                )
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE:
                return f"{name} has a tensor on the host as {key!r}; move it to the device, or give a number"
    return None


_STALE = object()


class _Plan:
    """One form of a step: what was seen of it, and its replay."""

    def __init__(self, values: list[Any], absent: list[bool]) -> None:
        self.values = values
        """The plain Python values around it."""
        self.absent = absent
        """Which parameters have no gradient when it begins."""
        self.calls = self.replays = 0
        self._audit_at = AUDIT
        self._last: tuple[_Call, capture.Run, list[Any]] | None = None
        self._replay: Replay | None = None

    @property
    def captured(self) -> bool:
        """Whether there is a replay."""
        return self._replay is not None

    def ready(self) -> bool:
        """Whether the next call need not be recorded."""
        return self._replay is not None and self.replays < self._audit_at

    def forget(self) -> None:
        """Drops the capture; the form goes on being recorded until there is one again."""
        self._replay = self._last = None

    def last_run(self) -> capture.Run | None:
        """The run of the last recorded call, if it was one program."""
        return None if self._last is None else self._last[1]

    # -- learning ------------------------------------------------------------------------------------------------

    def learn(
        self, call: _Call, watch: Watch, leaves: list[Any], grads: list[Any], result: Any, around: Surroundings
    ) -> Any:
        """Compares a recorded call with the one before it, and captures when they agree.

        Raises:
            NotReplayable: they do not agree, or something in the call cannot be replayed.
        """
        last, self._last = self._last, None
        run = capture.only_run(watch)
        if call.on_host is not None:
            raise NotReplayable(call.on_host)
        if call.changed is not None:
            raise NotReplayable(call.changed)
        flat, tree = tree_flatten(result)
        changed = [(p, p.grad) for p, before in grads if p.grad is not before]
        plain = [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]
        needs_backward = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flat)
        if needs_backward and not (call.optimizers or changed):
            raise NotReplayable(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        if self._replay is not None:
            self._audit(self._replay, call, run)
            return result
        self._last = call, run, plain
        if last is None:
            return result
        earlier_call, earlier, earlier_plain = last
        if plain != earlier_plain:
            raise NotReplayable(f"it returns a Python value that changes: {earlier_plain} and then {plain}")
        arguments = [capture.argument_buffer(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        replay = Replay(earlier, run, watch.begin, watch.end, arguments)
        self._explain_numbers(earlier_call, earlier, call, run)
        self._call, self._settings, self._reads = call, call.settings(), call.reads()
        self._readers = list(self._reads.values())
        self._read: list[float] | None = None
        self._ready: Any = None
        self._is_uploaded = False
        self._scalers = [scaler for scaler in around.found if isinstance(scaler, torch.amp.GradScaler)]
        self._growth = [_growth(scaler) for scaler in self._scalers]
        self._grads = [(p, grad) for p, grad in changed if grad is not None]
        self._dropped = [p for p, grad in changed if grad is None]
        self._tree, self._outputs = tree, [_Output(leaf, replay, leaves, arguments) for leaf in flat]
        self._replay, self._last = replay, None
        values = replay.values()
        return tree_unflatten([output.now(values, leaves) for output in self._outputs], tree)

    def _audit(self, replay: Replay, call: _Call, run: capture.Run) -> None:
        """Compares a recorded call with what a replay would have run.

        Raises:
            NotReplayable: they differ.
        """
        self._audit_at *= AUDIT
        if run.code != self._code:
            raise NotReplayable(f"by now {capture.first_difference(self._code, run.code)}")
        expected = self._numbers()
        if expected is None:
            return
        for name, old, new in zip(capture.number_names(run.code), expected, run.floats, strict=True):
            if old != new:
                raise NotReplayable(f"by now Python computes {new!r} for {name}, where a replay takes {old!r}")

    def _explain_numbers(self, earlier_call: _Call, earlier: capture.Run, call: _Call, run: capture.Run) -> None:
        """Finds out how each lifted number comes about."""
        terms = call.ledger.terms_of(run.seen)
        before = earlier_call.ledger.terms_of(earlier.seen)
        for index, (name, old, new) in enumerate(
            zip(capture.number_names(run.code), earlier.floats, run.floats, strict=True)
        ):
            if index in terms and terms[index] == before.get(index):
                continue
            if old != new or math.isnan(new):
                raise NotReplayable(
                    f"Python computes a number for {name} that changes from call to call ({old!r}, then {new!r}) and "
                    "is no hyperparameter; keep it in a tensor on the device, or pass it as one"
                )
            terms.pop(index, None)
        self._code, self._floats = run.code, np.array(run.floats, np.float64)
        self._places: dict[tuple[Term, ...], list[int]] = {}
        for index, ways in terms.items():
            self._places.setdefault(ways, []).append(index)

    # -- replaying -----------------------------------------------------------------------------------------------

    def replay(self, leaves: list[Any]) -> Any:
        """Runs the captured program; `_STALE` when what it was captured with has changed."""
        reads = self._reads
        if self._call.settings() != self._settings or [_growth(s) for s in self._scalers] != self._growth:
            return _STALE
        if any(evaluate(test, reads) != outcome for test, outcome in self._call.ledger.conditions.items()):
            return _STALE
        floats = self._numbers_to_run()
        cut.cut()
        arguments = [capture.argument_buffer(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = None if floats is None or self._replay is None else self._replay.run(arguments, floats)
        if values is None:
            return _STALE
        self.replays += 1
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        for parameter in self._dropped:
            parameter.grad = None
        return tree_unflatten([output.now(values, leaves) for output in self._outputs], self._tree)

    def _numbers(self) -> np.ndarray | None:
        """The lifted numbers with the hyperparameters as they are now.

        None where it is unknown which is which: two formulas had one value when captured and have two now.
        """
        floats = self._floats.copy()
        for ways, places in self._places.items():
            numbers = {evaluate(term, self._reads) for term in ways}
            if len(numbers) > 1:
                return None
            floats[places] = numbers.pop()
        return floats

    def _numbers_to_run(self) -> Any:
        """`_numbers` for the program; those of the last call, on the device, while no hyperparameter changes."""
        now = [read() for read in self._readers]
        if now != self._read:
            self._read, self._ready = now, self._numbers()
            self._is_uploaded = False
        elif not self._is_uploaded and self._ready is not None:
            self._ready, self._is_uploaded = capture.uploaded(self._ready), True
        return self._ready


def _growth(scaler: torch.amp.GradScaler) -> tuple[Any, ...]:
    if not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


class _Output:
    """One leaf of what the step returns."""

    def __init__(self, leaf: Any, replay: Replay, leaves: list[Any], arguments: list[Any]) -> None:
        self._fixed = leaf
        self._place: int | None = None
        """Which of the program's results it is; None for an argument, a tensor that lives on, and plain values."""
        self._argument: int | None = None
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != DEVICE_TYPE:
            return
        self._argument = next((index for index, given in enumerate(leaves) if given is leaf), None)
        buffer = storage.buffer_of(leaf)
        if self._argument is not None or replay.keeps(buffer) or buffer in arguments:
            return
        self._place = replay.place_of(buffer)
        if self._place is not None:
            if leaf.dtype is not buffer.spec.dtype:
                raise NotReplayable(f"it returns a view of other bytes ({leaf.dtype} of {buffer.spec.dtype})")
            self._geometry = Geometry.of(leaf)
            self._fixed = None

    def now(self, values: list[Any], leaves: list[Any]) -> Any:
        """The leaf of a call whose program gave `values`; always a fresh tensor, so that no replay overwrites it."""
        if self._place is not None:
            return capture.result(values[self._place], self._geometry)
        return self._fixed if self._argument is None else leaves[self._argument]
