"""`autocast`: mixed precision for JAX functions and for code that JAX traces.

Two drivers apply the same rules:

``jaxpr``   traces the function as written, then evaluates the jaxpr under autocast.  The function keeps its signature:
            float32 in, float32 out.  It may contain ``jax.grad`` and an optimizer.
``trace``   applies the rules while the function runs, like torch: the function sees the low dtypes, so a kernel is
            built for them and an explicit ``astype(float32)`` is honoured.

With both, the results of a function have the dtypes that it has without autocast.  ``with autocast():`` always uses
``trace``, since a block cannot be traced as a whole; values made in it keep the dtypes that they have, as in torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
import numpy as np

from xla_amp import events
from xla_amp.errors import PolicyError
from xla_amp.jax import compat, override_scope
from xla_amp.jax.decisions import F32, Carry, Settings, dtype_of, is_castable, resolve_settings
from xla_amp.jax.higher_order.common import cast
from xla_amp.jax.higher_order.handlers import HIGHER_ORDER_RULES
from xla_amp.jax.interpreter import Interpreter
from xla_amp.jax.jaxpr_analysis import has_backward, has_kernels
from xla_amp.jax.modules import nnx_state
from xla_amp.jax.trace_driver import AutocastTrace
from xla_amp.policy import Policy, PolicyLike, effects
from xla_amp.policy.op_catalog import is_contraction
from xla_amp.precision_report import PrecisionReport, SavedBytes, summarize
from xla_amp.types import Cast

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
_KERNELS_WIDE: Final = "the function's kernels run in float32, since they cannot be built for the low dtype"
_OVERRIDES: Final = "the function opens an override, whose rules act only while it runs"
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

    def report(self, *args: _P.args, **kwargs: _P.kwargs) -> PrecisionReport:
        """What runs low in a call with these arguments; traces the function and its backward pass."""

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

    def __init__(
        self,
        *,
        policy: PolicyLike | None,
        rules: Mapping[str, Cast] | None = None,
        dtype: Any,
        enabled: bool,
        driver: Driver,
        carry: Carry,
        strict: bool = False,
    ) -> None:
        self.policy = policy
        self.rules = None if rules is None else dict(rules)
        self.dtype = dtype
        self.enabled = enabled
        self.driver = driver
        self.carry = carry
        self.strict = strict
        self._open = threading.local()

    def settings(self) -> Settings:
        """The arguments, resolved for the current backend, file and environment."""
        return resolve_settings(self.policy, self.dtype, self.carry, self.rules)

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
        shown = ", ".join(
            f"{name}={getattr(self, name)!r}" for name in ("policy", "rules", "dtype", "enabled", "driver")
        )
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
    # Dtypes that the region mixes are none of the program's, so a strict program must not refuse them.
    promotion = contextlib.nullcontext() if settings is None else compat.standard_promotion()
    policy = None if settings is None else settings.current_policy()
    with scope, promotion, compat.set_current_trace(trace), override_scope.traced_here(policy):
        yield


@overload
def autocast(
    function: None = None,
    *,
    policy: PolicyLike | None = None,
    rules: Mapping[str, Cast] | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
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
    driver: Driver = "auto",
    carry: Carry = "keep",
    strict: bool = False,
) -> AutocastFunction[_P, _R]: ...


def autocast(
    function: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    rules: Mapping[str, Cast] | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
    strict: bool = False,
) -> AutocastContext | AutocastFunction[..., Any]:
    """Mixed precision for a JAX function, as a transformation, a decorator, or a context manager.

    Args:
        function: any function of pytrees: a loss, a model's ``apply``, a whole training step.  None returns a decorator
            that is also a context manager.
        policy: a built-in name, a path to a TOML file, or a `xla_amp.policy.Policy`.  None is the platform's default:
            ``tpu`` (bfloat16) for TPU and CPU, ``gpu`` (float16) for GPU.
        rules: rules on top of the policy, ``{"tanh": "fp32", "module:*.router": "fp32"}``.
        dtype: the low dtype, ``jnp.bfloat16`` or ``jnp.float16``; None is the policy's.
        enabled: False switches mixed precision off inside, also within a function that is under autocast.
        driver: ``"jaxpr"``, ``"trace"``, or ``"auto"``, which uses ``"jaxpr"`` unless the function calls kernels or
            looks at values; ``autocast(f).choice(*args)`` tells which and why.
        carry: ``"keep"``: loops carry the dtypes that they were written with; ``"low"``: float32 arrays that the body
            computes in the low dtype are carried in it.
        strict: a rule of yours without an effect on the function is an error instead of a `RuleWarning`.  A block,
            ``with autocast():``, is a part of a program and reports nothing: `xla_amp.policy.unused_rules` does.

    Returns:
        The function under autocast, with the attributes ``choice(*args, **kwargs)``, ``report(*args, **kwargs)`` and
        ``region``.

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
    region = AutocastContext(
        policy=policy, rules=rules, dtype=dtype, enabled=enabled, driver=driver, carry=carry, strict=strict
    )
    if enabled and (policy is not None or rules is not None or dtype is not None):
        region.settings()
    return region if function is None else region(function)


def _wrap(region: AutocastContext, function: Any) -> Any:
    if not callable(function) or _is_dtype(function):
        raise TypeError(
            f"autocast expects a function, got {function!r} ({type(function).__name__}); settings go by keyword, "
            "e.g. autocast(f, dtype=jnp.bfloat16) or `with autocast(dtype=jnp.bfloat16):`"
        )

    refused: dict[Any, str] = {}
    eager = _EagerCalls(region, function) if compat.is_jit(function) else None

    def call(*args: Any, **kwargs: Any) -> Any:
        if not region.enabled:
            with region:
                return function(*args, **kwargs)
        run = eager.find(args, kwargs) if eager is not None else None
        return run() if run is not None else _reporting(region, function, args, kwargs, refused)

    def choice(*args: Any, **kwargs: Any) -> Choice:
        """The driver for a call with these arguments, and the reason; traces the function."""
        if not region.enabled:
            return _DISABLED
        return _choose_driver(region, region.settings(), function, args, kwargs, refused)[0]

    def report(*args: Any, **kwargs: Any) -> PrecisionReport:
        """What runs low in a call with these arguments; traces the function and its backward pass."""
        with compat.retraced(), events.capture() as records:
            low = _Program(call, args, kwargs)
        plain = _Program(function, args, kwargs)
        saved = None
        if not has_backward(plain.closed.jaxpr):
            with contextlib.suppress(TypeError, ValueError, NotImplementedError):  # no derivative exists
                saved = SavedBytes(low.saved_bytes(), plain.saved_bytes())
        return summarize(records, is_contraction, saved)

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(call, function)
    call.report = report  # type: ignore[attr-defined]
    call.choice = choice  # type: ignore[attr-defined]
    call.region = region  # type: ignore[attr-defined]
    return call


def _reporting(region: AutocastContext, function: Any, args: Any, kwargs: Any, refused: dict[Any, str]) -> Any:
    """Calls a function under autocast and reports the user's rules that had no effect on it."""
    settings = region.settings()
    policy = settings.current_policy()
    if all(layer.layer == "builtin" for layer in policy.layers):
        return _choose_driver(region, settings, function, args, kwargs, refused)[1]()
    with effects.collect() as found:
        result = _choose_driver(region, settings, function, args, kwargs, refused)[1]()
    effects.report(policy, found, "jaxpr", strict=region.strict)
    return result


def _is_dtype(value: Any) -> bool:
    """Whether a callable is a dtype: the user forgot ``dtype=``."""
    return isinstance(value, type(jax.numpy.bfloat16)) or (isinstance(value, type) and issubclass(value, np.generic))


def _choose_driver(
    region: AutocastContext, settings: Settings, function: Any, args: Any, kwargs: Any, refused: dict[Any, str]
) -> tuple[Choice, Callable[[], Any]]:
    """The driver for a call, and a function that runs the call with it.

    Args:
        region: the arguments of `autocast`.
        settings: these, resolved.
        function: the function without autocast.
        args: its positional arguments.
        kwargs: its named arguments.
        refused: types of arguments -> why the function's kernels cannot be built for the low dtype, "" if they can.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        with region:
            return function(*args, **kwargs)

    try:
        program = _Program(function, args, kwargs, settings.current_policy())
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        if region.driver == "jaxpr":
            raise
        why = _CONCRETE if region.driver == "auto" else _REQUESTED
        return Choice("trace", why), lambda: _widen_low(traced(*args, **kwargs), (args, kwargs), settings)

    def run_traced() -> Any:
        return jax.tree.map(cast, traced(*args, **kwargs), program.result_dtypes())

    jaxpr = program.closed.jaxpr
    if region.driver == "trace":
        return Choice("trace", _REQUESTED), run_traced
    if program.opens_override:
        if region.driver == "jaxpr":
            raise PolicyError(
                "autocast(driver='jaxpr'): the function opens a policy.override, whose rules act only while it runs; "
                "leave driver= out, or open the override around the call"
            )
        return Choice("trace", _OVERRIDES), run_traced
    why = _REQUESTED if region.driver == "jaxpr" else _TRACEABLE
    if region.driver == "auto" and has_kernels(jaxpr) and not has_backward(jaxpr):
        key = (program.types(), settings)
        if key not in refused:
            refused[key] = _kernel_error(program, lambda: _Program(traced, args, kwargs))
        if not refused[key]:
            return Choice("trace", _KERNELS), run_traced
        why = f"{_KERNELS_WIDE}: {refused[key]}"
    return Choice("jaxpr", why), lambda: program.run(settings)


def _kernel_error(program: _Program, trace_low: Callable[[], _Program]) -> str:
    """Why a function with kernels cannot be traced in the low dtype, forward or backward; "" if it can."""
    errors = (TypeError, ValueError, NotImplementedError)
    try:
        low = trace_low()
        try:
            low.trace_gradient()
        except errors:
            with contextlib.suppress(*errors):
                program.trace_gradient()
                raise
    except errors as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _widen_low(result: Any, arguments: Any, settings: Settings) -> Any:
    """`result` with float32 for the low dtype, unless an argument has it.

    For a function that cannot be traced, so that the dtypes of its results without autocast are unknown.
    """
    if any(dtype_of(leaf) == settings.low for leaf in jax.tree.leaves(arguments)):
        return result
    return jax.tree.map(lambda leaf: cast(leaf, F32) if dtype_of(leaf) == settings.low else leaf, result)


class _EagerCalls:
    """Eager calls of a function that `jax.jit` returned: traced and compiled once for each type of the arguments.

    Args:
        region: the settings.
        function: the function without autocast.
    """

    def __init__(self, region: AutocastContext, function: Any) -> None:
        self._region = region
        self._function = function
        self._compiled: dict[Any, Callable[..., Any] | None] = {}

    def find(self, args: Any, kwargs: Any) -> Callable[[], Any] | None:
        """A function that makes a call with these arguments; None if the call is not one of these."""
        if events.sinks or not compat.is_eager(compat.current_trace()):
            return None
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [isinstance(leaf, _ARGUMENTS) for leaf in leaves]
        static = tuple(None if is_dynamic else leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True))
        settings = self._region.settings()
        key = (tree, static, tuple(dynamic), settings, settings.current_policy())
        try:
            known = key in self._compiled
        except TypeError:  # an argument that is not hashable
            return None
        if not known:
            # JAX would ignore what a function that is called by another asks of the compiler, and donated arguments.
            with override_scope.traced_here(settings.current_policy()):
                plain = compat.is_plain_jit(self._function, args, kwargs, sum(dynamic))
            self._compiled[key] = self._compile(tree, static, dynamic) if plain else None
        compiled = self._compiled[key]
        return None if compiled is None else functools.partial(compiled, *itertools.compress(leaves, dynamic))

    def _compile(self, tree: Any, static: Sequence[Any], dynamic: Sequence[bool]) -> Callable[..., Any]:
        @jax.jit
        def run(*values: Any) -> Any:
            rest = iter(values)
            filled = [next(rest) if is_dynamic else leaf for leaf, is_dynamic in zip(static, dynamic, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, filled)
            return _reporting(self._region, self._function, args, kwargs, {})

        return run


_ARGUMENTS: Final = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
"""Types of the arguments that a function traces, unless they are static."""


class _Program:
    """A function traced as written, for the arguments of one call.

    Args:
        function: the function.
        args: its positional arguments.
        kwargs: its named arguments.
        policy: whose rules will be applied, if any.
    """

    def __init__(self, function: Any, args: Any, kwargs: Any, policy: Policy | None = None) -> None:
        self._policy = policy
        self._debug_info = compat.debug_info(function, args, kwargs)
        self._finish: Callable[[Any], Any] = lambda out: out
        lifted = nnx_state.functionalize(function, args, kwargs)
        self._lifted = lifted is not None
        if lifted is not None:
            function, args, self._finish = lifted
            kwargs = {}
        self._function = function
        self._leaves, self._tree = jax.tree.flatten((args, kwargs))
        self._indices = [index for index, leaf in enumerate(self._leaves) if compat.is_array(leaf)]
        self._values = [self._leaves[index] for index in self._indices]
        self._avals = [compat.typeof(value) for value in self._values]
        self.opens_override = False
        """Whether the function opens an override, whose rules act only while it runs."""
        self._static_outs: list[Any] = []
        """Results that are no arrays; None for those that are."""
        self.closed = compat.trace(self._flat_function, self._avals, self._debug_info)

    def _flat_function(self, *values: Any) -> list[Any]:
        filled = list(self._leaves)
        for index, value in zip(self._indices, values, strict=True):
            filled[index] = value
        positional, named = jax.tree.unflatten(self._tree, filled)
        with override_scope.traced_here(self._policy) as scope:
            outs, self._out_tree = jax.tree.flatten(self._function(*positional, **named))
        self.opens_override = self.opens_override or scope.opened
        self._static_outs = [None if compat.is_array(out) else out for out in outs]
        return [out for out in outs if compat.is_array(out)]

    def types(self) -> tuple[Any, ...]:
        """Structure and types of the arguments; arguments that are no arrays by their types."""
        arrays = set(self._indices)
        others = tuple(type(leaf) for index, leaf in enumerate(self._leaves) if index not in arrays)
        return (self._tree, tuple(self._avals), others)

    def _floats(self, *values: Any) -> list[Any]:
        return [out for out in self._flat_function(*values) if is_castable(out.dtype)]

    def trace_gradient(self) -> None:
        """Traces the function and its backward pass, for the errors."""

        def gradient(*values: Any) -> list[Any]:
            outs, backward = jax.vjp(self._floats, *values)
            return [g for g in backward(outs) if is_castable(g.dtype)]

        compat.trace(gradient, self._avals, self._debug_info)

    def saved_bytes(self) -> int:
        """Bytes that the forward pass keeps for the backward pass, besides the arguments."""

        def saved(*values: Any) -> list[Any]:
            return list(jax.tree.leaves(jax.vjp(self._floats, *values)[1]))

        jaxpr = compat.trace(saved, self._avals, self._debug_info).jaxpr
        computed = {var for eqn in jaxpr.eqns for var in eqn.outvars}
        kept = {var for var in jaxpr.outvars if not isinstance(var, compat.Literal)} & computed
        return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)

    def result_dtypes(self) -> Any:
        """The function's result with dtypes instead of arrays."""
        dtypes = iter(aval.dtype for aval in self.closed.out_avals)
        filled = [next(dtypes) if static is None else static for static in self._static_outs]
        result = jax.tree.unflatten(self._out_tree, filled)
        return result[0] if self._lifted else result

    def run(self, settings: Settings) -> Any:
        """The results, in the dtypes that the function was written with."""
        interpreter = Interpreter(settings, HIGHER_ORDER_RULES, saves=not compat.runs_now(self._values))
        outs = interpreter.eval_jaxpr(self.closed, self._values)
        arrays = iter(compat.cast_like(out, aval) for out, aval in zip(outs, self.closed.out_avals, strict=True))
        filled = [next(arrays) if static is None else static for static in self._static_outs]
        return self._finish(jax.tree.unflatten(self._out_tree, filled))
