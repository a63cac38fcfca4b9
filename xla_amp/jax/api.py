"""`autocast`: mixed precision for JAX functions and for code that JAX traces.

Two drivers apply the same rules:

``jaxpr``   traces the function as written, then evaluates the jaxpr under autocast.  The function keeps its signature:
            float32 in, float32 out.  It may contain ``jax.grad`` and an optimizer.
``trace``   applies the rules while the function runs, like torch: the function sees the low dtypes, so a kernel is
            built for them and an explicit ``astype(float32)`` is honoured; results keep the dtypes that they have.

``with autocast():`` always uses ``trace``, since a block cannot be traced as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

import jax

from xla_amp.errors import PolicyError
from xla_amp.jax import compat, nnx_state
from xla_amp.jax.decisions import Carry, Settings, is_castable, resolve_settings
from xla_amp.jax.higher_order.handlers import HIGHER_ORDER_RULES
from xla_amp.jax.interpreter import Interpreter
from xla_amp.jax.jaxpr_analysis import has_backward, has_kernels
from xla_amp.jax.trace_driver import AutocastTrace
from xla_amp.policy import PolicyLike

Driver: TypeAlias = Literal["auto", "trace", "jaxpr"]

_P = ParamSpec("_P")
_Rest = ParamSpec("_Rest")
_Self = TypeVar("_Self", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)
_R = TypeVar("_R")


class Choice(NamedTuple):
    """The driver that `autocast` uses for a call, and the reason."""

    driver: Literal["trace", "jaxpr", "none"]
    why: str


_REQUESTED: Final = "you asked for it"
_DISABLED: Final = Choice("none", "enabled=False")
_KERNELS: Final = "the function calls kernels, which only a trace in the low dtype reaches"
_CONCRETE: Final = "the function looks at values while it runs"
_TRACEABLE: Final = "it can be traced as a whole"


class AutocastFunction(Protocol[_P, _R_co]):
    """A function under autocast: the parameters and the result of the function that was wrapped."""

    __name__: str
    __wrapped__: Callable[..., Any]
    region: AutocastContext
    """The settings."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    def choice(self, *args: _P.args, **kwargs: _P.kwargs) -> Choice:
        """The driver for a call with these arguments, and the reason; traces the function."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> AutocastFunction[_P, _R_co]: ...
    @overload
    def __get__(
        self: AutocastFunction[Concatenate[_Self, _Rest], _R], instance: _Self, owner: type | None = None, /
    ) -> Callable[_Rest, _R]: ...


class AutocastContext:
    """Context manager and decorator: the result of `autocast()` without a function.

    It is reentrant and thread-safe.
    """

    def __init__(self, *, policy: PolicyLike | None, dtype: Any, enabled: bool, driver: Driver, carry: Carry) -> None:
        self.policy = policy
        self.dtype = dtype
        self.enabled = enabled
        self.driver = driver
        self.carry = carry
        self._open = threading.local()

    def settings(self) -> Settings:
        """The arguments, resolved for the current backend, file and environment."""
        return resolve_settings(self.policy, self.dtype, self.carry)

    def __enter__(self) -> AutocastContext:
        if self.enabled and self.driver == "jaxpr":
            raise PolicyError(
                "`with autocast(driver='jaxpr')`: a block cannot be traced as a whole; leave driver= out, or wrap a "
                "function, autocast(f, driver='jaxpr')"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_open_region(self.settings() if self.enabled else None))
            entered: list[contextlib.ExitStack] = self._open.__dict__.setdefault("stack", [])
            entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.stack.pop().close()

    def __call__(self, function: Callable[_P, _R], /) -> AutocastFunction[_P, _R]:
        wrapped: AutocastFunction[_P, _R] = _wrap(self, function)
        return wrapped

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("policy", "dtype", "enabled", "driver"))
        return f"autocast({shown})"


@contextlib.contextmanager
def _open_region(settings: Settings | None) -> Iterator[None]:
    """Applies autocast to code that runs inside; None switches it off."""
    current = compat.current_trace()
    inside = isinstance(current, AutocastTrace)
    parent = current.parent if inside else current
    trace = parent if settings is None else AutocastTrace(parent, settings)
    # If the enclosing function is traced by an outer region, that region interprets the jaxpr later: the name scope
    # marks primitives that are decided already.
    nested = not inside and not compat.is_eager(parent)
    scope = jax.named_scope(compat.REGION_SCOPE) if nested else contextlib.nullcontext()
    with scope, compat.set_current_trace(trace):
        yield


@overload
def autocast(
    function: None = None,
    *,
    policy: PolicyLike | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
) -> AutocastContext: ...


@overload
def autocast(
    function: Callable[_P, _R],
    *,
    policy: PolicyLike | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
) -> AutocastFunction[_P, _R]: ...


def autocast(
    function: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
) -> AutocastContext | AutocastFunction[..., Any]:
    """Mixed precision for a JAX function, as a transformation, a decorator, or a context manager.

    Args:
        function: any function of pytrees: a loss, a model's ``apply``, a whole training step.  None returns a decorator
            that is also a context manager.
        policy: a built-in name, a path to a TOML file, or a `xla_amp.policy.Policy`.  None is the platform's default:
            ``tpu`` (bfloat16) for TPU and CPU, ``gpu`` (float16) for GPU.
        dtype: the low dtype, ``jnp.bfloat16`` or ``jnp.float16``; None is the policy's.
        enabled: False switches mixed precision off inside, also within a function that is under autocast.
        driver: ``"jaxpr"``, ``"trace"``, or ``"auto"``, which uses ``"jaxpr"`` unless the function calls kernels or
            looks at values; ``autocast(f).choice(*args)`` tells which and why.
        carry: ``"keep"``: loops carry the dtypes that they were written with; ``"low"``: float32 arrays that the body
            computes in the low dtype are carried in it.

    Returns:
        The function under autocast, with the attributes ``choice(*args, **kwargs)`` and ``region``.

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
    for name, value, legal in (("driver", driver, get_args(Driver)), ("carry", carry, get_args(Carry))):
        if value not in legal:
            raise PolicyError(f"autocast({name}={value!r}): expected one of {', '.join(map(repr, legal))}")
    if not isinstance(enabled, bool):
        raise PolicyError(f"autocast(enabled={enabled!r}): expected True or False, got {type(enabled).__name__}")
    region = AutocastContext(policy=policy, dtype=dtype, enabled=enabled, driver=driver, carry=carry)
    if enabled and (policy is not None or dtype is not None):
        region.settings()
    return region if function is None else region(function)


def _wrap(region: AutocastContext, function: Any) -> Any:
    if not callable(function):
        raise TypeError(
            f"autocast expects a function, got {function!r} ({type(function).__name__}); settings go by keyword, "
            "e.g. autocast(f, dtype=jnp.bfloat16) or `with autocast(dtype=jnp.bfloat16):`"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        if not region.enabled or region.driver == "trace":
            with region:
                return function(*args, **kwargs)
        _, run = _choose_driver(region, function, args, kwargs)
        return run()

    def choice(*args: Any, **kwargs: Any) -> Choice:
        """The driver for a call with these arguments, and the reason; traces the function."""
        if not region.enabled:
            return _DISABLED
        if region.driver == "trace":
            return Choice("trace", _REQUESTED)
        return _choose_driver(region, function, args, kwargs)[0]

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(call, function)
    call.choice = choice  # type: ignore[attr-defined]
    call.region = region  # type: ignore[attr-defined]
    return call


def _choose_driver(region: AutocastContext, function: Any, args: Any, kwargs: Any) -> tuple[Choice, Callable[[], Any]]:
    """The driver for a call, and a function that runs the call with it."""

    def run_traced() -> Any:
        with region:
            return function(*args, **kwargs)

    settings = region.settings()
    try:
        program = _Program(function, args, kwargs)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        if region.driver == "jaxpr":
            raise
        return Choice("trace", _CONCRETE), run_traced
    jaxpr = program.closed.jaxpr
    if region.driver == "auto" and has_kernels(jaxpr) and not has_backward(jaxpr):
        return Choice("trace", _KERNELS), run_traced
    why = _REQUESTED if region.driver == "jaxpr" else _TRACEABLE
    return Choice("jaxpr", why), lambda: program.run(settings)


class _Program:
    """A function traced as written, for the arguments of one call."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        debug_info = compat.debug_info(function, args, kwargs)
        self._finish: Callable[[Any], Any] = lambda out: out
        lifted = nnx_state.functionalize(function, args, kwargs)
        if lifted is not None:
            function, args, self._finish = lifted
            kwargs = {}
        leaves, tree = jax.tree.flatten((args, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if compat.is_array(leaf)]
        self._values = [leaves[index] for index in indices]
        self._static_outs: list[Any] = []
        """Results that are no arrays; None for those that are."""

        def flat_function(*values: Any) -> list[Any]:
            filled = list(leaves)
            for index, value in zip(indices, values, strict=True):
                filled[index] = value
            positional, named = jax.tree.unflatten(tree, filled)
            outs, self._out_tree = jax.tree.flatten(function(*positional, **named))
            self._static_outs = [None if compat.is_array(out) else out for out in outs]
            return [out for out in outs if compat.is_array(out)]

        self.closed = compat.trace(flat_function, [compat.typeof(value) for value in self._values], debug_info)

    def run(self, settings: Settings) -> Any:
        """The results, in the dtypes that the function was written with."""
        interpreter = Interpreter(settings, HIGHER_ORDER_RULES)
        outs = interpreter.eval_jaxpr(self.closed, self._values)
        arrays = iter(
            interpreter.table.cast(out, aval.dtype) if is_castable(aval.dtype) else out
            for out, aval in zip(outs, self.closed.out_avals, strict=True)
        )
        filled = [next(arrays) if static is None else static for static in self._static_outs]
        return self._finish(jax.tree.unflatten(self._out_tree, filled))
