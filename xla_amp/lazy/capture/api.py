"""`compile`: a step that is recorded for its first calls and then run without being recorded.

What a replay needs to know comes from three places: which values the program reads and writes from the engine
(`xla_amp.lazy.capture.observer`), how optimizers compute numbers from hyperparameters from `followed`, and which Python
values the step depends on from `surroundings`.  Whatever is not explained by these is a reason to go on recording, and
is said.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from xla_amp import events
from xla_amp import policy as policies
from xla_amp.backends import devices
from xla_amp.errors import CaptureError, DeviceError, EngineError
from xla_amp.lazy.capture.graph_cache import STALE, Plan
from xla_amp.lazy.capture.guards import PLAIN, Surroundings
from xla_amp.lazy.capture.observer import NotReplayable, Watch
from xla_amp.lazy.capture.optimizer_replay import Call
from xla_amp.lazy.capture.warmup import without_a_trace
from xla_amp.lazy.runtime import execute, mesh, pjrt
from xla_amp.lazy.runtime.metrics import metrics
from xla_amp.lazy.tensors import step_marker, tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PATIENCE = 4
"""Recorded calls that may differ from the one before (optimizers make their state in the first) until we say so."""


def compile(step: Callable[_Arguments, _Result] | None = None, *, strict: bool = False, limit: int = 8) -> Any:
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

    replays_without_operations = True
    """Tells `find_overflow` to call ``__wrapped__`` instead: a replay dispatches no torch operation."""

    def __init__(self, step: Callable[..., Any], strict: bool, limit: int) -> None:
        functools.update_wrapper(self, step)
        self._step, self._strict, self._limit = step, strict, limit
        self._plans: dict[Any, list[Plan]] = {}
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
        trial, plan, before = Compiled(self._step, True, 1), Plan([], []), metrics()["compilations"]
        with without_a_trace(Surroundings(self._step, (Optimizer, torch.amp.GradScaler))):
            while not plan.captured:  # ends: a strict one raises after PATIENCE calls that differ
                trial._recorded(plan, leaves, args, kwargs)
        return metrics()["compilations"] - before

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._given_up or events.sinks or execute.observer is not None:  # the last two see every operation
            return self._step(*args, **kwargs)
        leaves, tree = _flattened(args, kwargs)
        if self._around is None:
            _require_the_lazy_device()
            self._around = Surroundings(self._step, (Optimizer, torch.amp.GradScaler))
        plan = self._plan(leaves, tree)
        if plan is None:
            return self._step(*args, **kwargs)
        if plan.is_stale():
            plan.forget()
        elif plan.ready():
            with tensor_io.trace.lock:  # not while recording: the backward pass may record on a thread of autograd's
                result = plan.replay(leaves)
            if result is not STALE:
                self.replays += 1
                return result
            plan.forget()
        return self._recorded(plan, leaves, args, kwargs)

    def _plan(self, leaves: list[Any], tree: Any) -> Plan | None:
        around = self._around
        assert around is not None  # noqa: S101  (set by the caller)
        key = (tree, *_signature(leaves), *_modes())
        values, absent = around.values(), around.absent()
        plans = self._plans.setdefault(key, [])
        for plan in plans:
            if plan.values == values and plan.absent == absent:
                plan.values = values  # the same list of what modules hold: equal at a glance
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
        plans.append(Plan(values, absent))
        return plans[-1]

    def _recorded(self, plan: Plan, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        self._around = around = Surroundings(self._step, (Optimizer, torch.amp.GradScaler))
        before, sizes = around.values(), around.sizes()
        grads = [(p, p.grad) for p in around.parameters]
        call = Call(plan.calls % 2)
        plan.calls += 1
        with step_marker.paused(), call.followed(), Watch(call.ledger.resolve, plan.last_run()) as watch:
            result = self._step(*args, **kwargs)
            execute.cut()
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


_LEAVES = tensor_io.PLAIN.union(PLAIN)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """``tree_flatten((args, kwargs))``, at once where there is nothing to flatten."""
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        return list(args), len(args)
    return tree_flatten((args, kwargs))


def _signature(leaves: list[Any]) -> Iterator[Any]:
    """What of the arguments shapes the program."""
    places: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            yield type(leaf), leaf
            continue
        try:
            buffer = tensor_io.buffer_of(leaf)
        except (DeviceError, NotImplementedError):  # the latter of one without a storage
            remedy = "to_dense()" if leaf.device.type == DEVICE_TYPE else "to(xla_amp.xla_device())"
            raise TypeError(
                f"a captured step expects dense tensors on {DEVICE_TYPE!r}, got one on {leaf.device} (shape "
                f"{list(leaf.shape)}, {leaf.layout}); call tensor.{remedy} before"
            ) from None
        yield (
            buffer.spec, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.requires_grad,
            places.setdefault(id(buffer), index), mesh.active and mesh.layout_of(buffer),
        )  # fmt: skip


def _modes() -> Iterator[Any]:
    """The settings of this thread that shape the program."""
    yield torch.is_grad_enabled()
    yield torch.is_inference_mode_enabled()
    yield torch.get_default_dtype()
    yield torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
    region = policies.current(DEVICE_TYPE)
    yield region and (id(region.policy), region.low, region.enabled)
    yield id(policies.resolve(_default_policy()))


@functools.cache
def _default_policy() -> policies.Policy:
    return policies.load(policies.default_name(pjrt.platform()))
