"""`autocast`: mixed precision for JAX functions.

The function is traced as it was written, then its jaxpr is evaluated under autocast.  The function keeps its signature:
float32 in, float32 out.  It may contain ``jax.grad`` and an optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, overload

import jax
import numpy as np

from xla_amp.common import events
from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError
from xla_amp.jax import compat, modules, override_scope
from xla_amp.jax.analysis.jaxprs import has_backward
from xla_amp.jax.analysis.solver_loops import solves
from xla_amp.jax.decisions import Residual, Settings, is_castable, resolve_settings
from xla_amp.jax.higher_order.handlers import HIGHER_ORDER_RULES
from xla_amp.jax.interpreter import Interpreter
from xla_amp.jax.value_info import arguments, arrays_of
from xla_amp.pages.precision_report import PrecisionReport, SavedBytes, summarize
from xla_amp.policy import Policy, PolicyLike, effects

_P = ParamSpec("_P")
_Rest = ParamSpec("_Rest")
_Self = TypeVar("_Self", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)
_R = TypeVar("_R")


class AutocastFunction(Protocol[_P, _R_co]):
    """A function under autocast: the parameters and the result of the function that was wrapped."""

    __name__: str
    __wrapped__: Callable[..., Any]
    region: AutocastContext
    """The settings."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    def report(self, *args: _P.args, **kwargs: _P.kwargs) -> PrecisionReport:
        """What runs low in a call with these arguments; traces the function and its backward pass."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> AutocastFunction[_P, _R_co]: ...
    @overload
    def __get__(
        self: AutocastFunction[Concatenate[_Self, _Rest], _R], instance: _Self, owner: type | None = None, /
    ) -> Callable[_Rest, _R]: ...


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class AutocastContext:
    """Decorator: the result of `autocast()` without a function.  With ``enabled=False`` also a context manager.

    It is reentrant and thread-safe.
    """

    policy: PolicyLike | None
    rules: Mapping[str, Cast] | None
    dtype: Any
    enabled: bool
    residual: Residual
    strict: bool
    _open: threading.local = dataclasses.field(default_factory=threading.local, init=False)

    def settings(self) -> Settings:
        """The arguments, resolved for the current backend, file and environment."""
        return resolve_settings(self.policy, self.dtype, self.residual, self.rules)

    def __enter__(self) -> AutocastContext:
        if self.enabled:
            raise PolicyError(
                "with autocast(): is for PyTorch; JAX gives no way to change the dtypes of a block of a program. Put "
                "the block into a function and call it under autocast, `y = autocast(block)(x)`; "
                "`with autocast(enabled=False):` keeps a block as it is written"
            )
        eager = compat.is_eager(compat.current_trace())
        scope = contextlib.nullcontext() if eager else jax.named_scope(compat.REGION_SCOPE)
        scope.__enter__()
        self._open.__dict__.setdefault("stack", []).append(scope)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.stack.pop().__exit__(None, None, None)

    def __call__(self, function: Callable[_P, _R], /) -> AutocastFunction[_P, _R]:
        wrapped: AutocastFunction[_P, _R] = _wrap(self, function)
        return wrapped

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("policy", "rules", "dtype", "enabled"))
        return f"autocast({shown})"


@overload
def autocast(
    function: None = None,
    *,
    policy: PolicyLike | None = None,
    rules: Mapping[str, Cast] | None = None,
    dtype: Any = None,
    enabled: bool = True,
    residual: Residual = "keep",
    strict: bool = False,
) -> AutocastContext: ...


@overload
def autocast(
    function: Callable[_P, _R],
    *,
    policy: PolicyLike | None = None,
    rules: Mapping[str, Cast] | None = None,
    dtype: Any = None,
    enabled: bool = True,
    residual: Residual = "keep",
    strict: bool = False,
) -> AutocastFunction[_P, _R]: ...


def autocast(
    function: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    rules: Mapping[str, Cast] | None = None,
    dtype: Any = None,
    enabled: bool = True,
    residual: Residual = "keep",
    strict: bool = False,
) -> AutocastContext | AutocastFunction[..., Any]:
    """Mixed precision for a JAX function, as a transformation or a decorator.

    Args:
        function: any function of pytrees: a loss, a model's ``apply``, a whole training step.  None returns a
            decorator; ``with autocast(enabled=False):`` keeps a block as it is written.
        policy: a built-in name, a path to a TOML file, or a `xla_amp.policy.Policy`.  None is the platform's default:
            ``tpu`` for TPU and CPU, ``gpu`` for GPU.
        rules: rules on top of the policy, ``{"tanh": "fp32", "module:*.router": "fp32"}``.
        dtype: the low dtype, ``jnp.bfloat16`` or ``jnp.float16``; None is the policy's, bfloat16 for ``tpu`` and
            ``gpu``; on a GPU that does not multiply it (compute capability below 8.0) float16 and an
            `AutocastWarning`.
        enabled: False switches mixed precision off inside, also within a function that is under autocast.
        residual: ``"keep"``: ``x + f(x)``, where a product in ``f`` depends on ``x``, has the widest dtype of both;
            ``"low"``: it is low if ``f(x)`` is, and so is a carry of a loop that is such a sum.
        strict: a rule of yours without an effect on the function is an error instead of a `RuleWarning`.

    Returns:
        The function under autocast, with the attributes ``report(*args, **kwargs)`` and ``region``; around a function
        of `jax.jit` also with its ``lower``, ``trace``, ``eval_shape`` and ``clear_cache``.

    Raises:
        PolicyError: the policy cannot be loaded, or an argument has an illegal value.
        UnsupportedDtypeError: the policy does not offer this low dtype.
        TypeError: `function` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> loss = autocast(lambda w: jnp.sum(x @ w))
        >>> "bf16" in str(jax.make_jaxpr(loss)(w)), jax.grad(loss)(w).dtype
        (True, dtype('float32'))
    """
    if residual not in get_args(Residual):
        raise PolicyError(f"autocast(residual={residual!r}): expected one of 'keep', 'low'")
    if not isinstance(enabled, bool):
        raise PolicyError(f"autocast(enabled={enabled!r}): expected True or False, got {type(enabled).__name__}")
    region = AutocastContext(
        policy=policy,
        rules=dict(rules) if isinstance(rules, Mapping) else rules,
        dtype=dtype,
        enabled=enabled,
        residual=residual,
        strict=strict,
    )
    if enabled and (policy is not None or rules is not None or dtype is not None):
        region.settings()
    return region if function is None else region(function)


def _wrap(region: AutocastContext, function: Any) -> Any:
    if not callable(function) or _is_dtype(function):
        raise TypeError(
            f"autocast expects a function, got {function!r} ({type(function).__name__}); settings go by keyword, "
            "e.g. autocast(f, dtype=jnp.bfloat16)"
        )
    jitted = _Jitted(region, function) if compat.is_jit(function) else None

    def call(*args: Any, **kwargs: Any) -> Any:
        if not region.enabled:
            with region:
                return function(*args, **kwargs)
        if jitted is not None and not events.decided.listeners and compat.is_eager(compat.current_trace()):
            return jitted.compiled()(*args, **kwargs)
        return _evaluate(region, function, args, kwargs)

    def report(*args: Any, **kwargs: Any) -> PrecisionReport:
        """What runs low in a call with these arguments; traces the function and its backward pass."""
        with modules.functionalized(function, args, kwargs) as lifted:
            with compat.retraced(), events.capture() as records:
                low = _Program(function, lifted._replace(function=region(lifted.function)))
            plain = _Program(function, lifted)
            saved = None
            if not has_backward(plain.closed.jaxpr):
                with contextlib.suppress(TypeError, ValueError, NotImplementedError):  # no derivative exists
                    saved = SavedBytes(low.saved_bytes(), plain.saved_bytes())
        return summarize(records, saved)

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(call, function)
    shown: Any = call
    shown.report, shown.region = report, region
    if jitted is not None:
        for name in ("lower", "trace", "eval_shape"):
            setattr(shown, name, jitted.method(name))
        shown.clear_cache = jitted.clear_cache
    return call


class _Jitted:
    """A function of `jax.jit` under autocast: as ``jax.jit(autocast(f), ...)`` with the same arguments of `jax.jit`."""

    def __init__(self, region: AutocastContext, function: Any) -> None:
        self._region = region
        self._function = function
        self._compiled: dict[Any, Any] = {}

    def compiled(self) -> Any:
        """The function for the rules that hold now."""
        if not self._region.enabled:
            return self._function
        settings = self._region.settings()
        if settings not in self._compiled:
            inner = self._function.__wrapped__

            def run(*args: Any, **kwargs: Any) -> Any:
                return _evaluate(self._region, inner, args, kwargs)

            with contextlib.suppress(AttributeError, TypeError):
                functools.update_wrapper(run, inner)
            self._compiled[settings] = compat.jit_like(self._function, run)
        return self._compiled[settings]

    def method(self, name: str) -> Callable[..., Any]:
        """A method of functions of `jax.jit`, for the rules that hold when it is called."""
        return lambda *args, **kwargs: getattr(self.compiled(), name)(*args, **kwargs)

    def clear_cache(self) -> None:
        """As of `jax.jit`; also of the function without autocast."""
        for each in (self._function, *self._compiled.values()):
            each.clear_cache()


def _evaluate(region: AutocastContext, function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function under autocast and reports the user's rules that had no effect on it."""
    if type(compat.current_trace()).__name__ == "JetTrace":
        raise TypeError(
            "jet(autocast(f), ...): jax.experimental.jet has no rules for low products; put autocast around it: "
            "autocast(lambda *primals: jet(f, primals, series))(*primals)"
        )
    settings = region.settings()
    policy = settings.policy
    # What a region inside of another one decides is not decided again by the outer one.
    inside = override_scope.is_traced_here()
    scope = jax.named_scope(compat.REGION_SCOPE) if inside else contextlib.nullcontext()
    with scope, modules.functionalized(function, args, kwargs) as lifted:
        if not policy.from_user:
            return _Program(function, lifted, policy).run(settings)
        with effects.collect() as found:
            result = _Program(function, lifted, policy).run(settings)
    effects.report(policy, found, "jaxpr", strict=region.strict)
    return result


def _is_dtype(value: Any) -> bool:
    """Whether a callable is a dtype: the user forgot ``dtype=``."""
    return isinstance(value, type(jax.numpy.bfloat16)) or (isinstance(value, type) and issubclass(value, np.generic))


class _Program:
    """A function traced as written, for the arguments of one call, `lifted`.

    `policy`: whose rules will be applied, if any.
    """

    def __init__(self, function: Any, lifted: modules.Lifted, policy: Policy | None = None) -> None:
        self._policy = policy
        self._debug_info = compat.debug_info(function)
        self._function, self._finish = lifted.function, lifted.finish
        self._leaves, self._tree = jax.tree.flatten((lifted.args, lifted.kwargs))
        self._indices = [index for index, leaf in enumerate(self._leaves) if isinstance(leaf, jax.Array)]
        self._values = [self._leaves[index] for index in self._indices]
        self._avals = [jax.typeof(value) for value in self._values]
        self._static_outs: list[Any] = []
        """Results that are no arrays; None for those that are."""
        self.closed = compat.trace(self._flat_function, self._avals, self._debug_info)

    def _flat_function(self, *values: Any) -> list[Any]:
        filled = list(self._leaves)
        for index, value in zip(self._indices, values, strict=True):
            filled[index] = value
        positional, named = jax.tree.unflatten(self._tree, filled)
        with override_scope.traced_here(self._policy):
            outs, self._out_tree = jax.tree.flatten(self._function(*positional, **named))
        self._static_outs = [None if isinstance(out, jax.Array) else out for out in outs]
        return [out for out in outs if isinstance(out, jax.Array)]

    def _floats(self, *values: Any) -> list[Any]:
        return [out for out in self._flat_function(*values) if is_castable(out.dtype)]

    def saved_bytes(self) -> int:
        """Bytes that the forward pass keeps for the backward pass, besides the arguments."""

        def saved(*values: Any) -> list[Any]:
            return list(jax.tree.leaves(jax.vjp(self._floats, *values)[1]))

        jaxpr = compat.trace(saved, self._avals, self._debug_info).jaxpr
        computed = {var for eqn in jaxpr.eqns for var in eqn.outvars}
        kept = computed.intersection(compat.variables(jaxpr.outvars))
        return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)

    def run(self, settings: Settings) -> Any:
        """The results, in the dtypes that the function was written with."""
        settings = dataclasses.replace(settings, solves=solves(self.closed.jaxpr, settings.policy))
        interpreter = Interpreter(settings, HIGHER_ORDER_RULES, saves=not compat.runs_now(self._values))
        outs = arrays_of(interpreter.eval_jaxpr(self.closed, arguments(self._values)))
        arrays = iter(compat.cast_like(out, aval) for out, aval in zip(outs, self.closed.out_avals, strict=True))
        filled = [next(arrays) if static is None else static for static in self._static_outs]
        return self._finish(jax.tree.unflatten(self._out_tree, filled))
