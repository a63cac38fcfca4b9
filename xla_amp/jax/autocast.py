"""`autocast`: mixed precision for JAX functions and for code that JAX traces.

Two drivers apply one set of rules:

``jaxpr``   traces the function as it was written, then runs the result under the rules.  The function keeps its
            signature: float32 in, float32 out.  It may itself contain ``jax.grad`` and an optimizer.
``trace``   applies the rules while the function runs, as torch does: the function sees the low dtypes, so a kernel is
            built for them and an explicit ``astype(float32)`` is honoured; results keep the dtype that they have.

``with autocast():`` always means the second, since a block cannot be traced as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args, overload

import jax

from xla_amp.errors import PolicyError
from xla_amp.jax import compat, nnx_state
from xla_amp.jax.decisions import Carry, Rules, is_float, rules
from xla_amp.jax.interpreter import Walker, has_backward, has_kernels
from xla_amp.jax.trace_driver import RegionTrace
from xla_amp.policy import PolicyLike

Driver: TypeAlias = Literal["auto", "trace", "jaxpr"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Choice(NamedTuple):
    """The driver that `autocast` takes for a call, and why."""

    driver: Literal["trace", "jaxpr", "none"]
    why: str


_ASKED: Final = "you asked for it"
_OFF: Final = Choice("none", "enabled=False")
_KERNELS: Final = "the function calls kernels, which only a trace in the low dtype reaches"
_VALUES: Final = "the function looks at values while it runs"
_WHOLE: Final = "it can be traced as a whole"


class Region:
    """What `autocast()` without a function returns: a context manager and a decorator.

    It may be entered again while it is open, and used by several threads.
    """

    def __init__(self, *, policy: PolicyLike | None, dtype: Any, enabled: bool, driver: Driver, carry: Carry) -> None:
        self.policy = policy
        self.dtype = dtype
        self.enabled = enabled
        self.driver = driver
        self.carry = carry
        self._open = threading.local()

    def rules(self) -> Rules:
        """What it asks for now."""
        return rules(self.policy, self.dtype, self.carry)

    def __enter__(self) -> Region:
        if self.enabled and self.driver == "jaxpr":
            raise PolicyError(
                "`with autocast(driver='jaxpr')`: a block cannot be traced as a whole; leave driver= out, or wrap a "
                "function, autocast(f, driver='jaxpr')"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_region(self.rules() if self.enabled else None))
            entered: list[contextlib.ExitStack] = self._open.__dict__.setdefault("stack", [])
            entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.stack.pop().close()

    def __call__(self, function: _Function) -> _Function:
        return _wrapped(self, function)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("policy", "dtype", "enabled", "driver"))
        return f"autocast({shown})"


@contextlib.contextmanager
def _region(asked: Rules | None) -> Any:
    """Inside, the rules are applied to what runs; None switches them off."""
    current = compat.current_trace()
    inside = isinstance(current, RegionTrace)
    parent = current.parent if inside else current
    trace = parent if asked is None else RegionTrace(parent, asked)
    # Where a function is being traced, the region around it gets the result later: the mark says that it is decided.
    mark = contextlib.nullcontext() if inside or compat.is_running(parent) else jax.named_scope(compat.REGION)
    with mark, compat.set_current_trace(trace):
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
) -> Region: ...


@overload
def autocast(
    function: _Function,
    *,
    policy: PolicyLike | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
) -> _Function: ...


def autocast(
    function: Any = None,
    *,
    policy: PolicyLike | None = None,
    dtype: Any = None,
    enabled: bool = True,
    driver: Driver = "auto",
    carry: Carry = "keep",
) -> Any:
    """Mixed precision for a JAX function, as a transformation, a decorator, or a block.

    Args:
        function: any function of pytrees: a loss, a model's ``apply``, a whole training step.  None gives a decorator
            that is also a context manager.
        policy: which rules: a built-in name, a path to a TOML file, or a `xla_amp.policy.Policy`.  None is the
            platform's own: ``tpu`` (bfloat16) for TPU and CPU, ``gpu`` (float16) for GPU.
        dtype: the low dtype, ``jnp.bfloat16`` or ``jnp.float16``; None is the policy's.
        enabled: False switches mixed precision off inside, also within a function that is under it.
        driver: ``"jaxpr"``, ``"trace"``, or ``"auto"``, which takes the first unless the function calls kernels or
            looks at values; ``autocast(f).choice(*args)`` says which and why.
        carry: ``"keep"``: loops carry the dtypes that they were written with; ``"low"``: float32 arrays that the body
            computes in the low dtype are carried in it.

    Returns:
        The function under autocast, with the attributes ``choice(*args, **kwargs)`` and ``region``.

    Raises:
        PolicyError: the policy cannot be loaded, or an argument is not one of those above.
        UnsupportedDtypeError: the policy has no such low dtype.
        TypeError: `function` is not one.

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
    region = Region(policy=policy, dtype=dtype, enabled=enabled, driver=driver, carry=carry)
    if enabled and (policy is not None or dtype is not None):
        region.rules()
    return region if function is None else region(function)


def _wrapped(region: Region, function: Any) -> Any:
    if not callable(function):
        raise TypeError(
            f"autocast expects a function, got {function!r} ({type(function).__name__}); settings go by keyword, "
            "e.g. autocast(f, dtype=jnp.bfloat16) or `with autocast(dtype=jnp.bfloat16):`"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        if not region.enabled or region.driver == "trace":
            with region:
                return function(*args, **kwargs)
        _, run = _chosen(region, function, args, kwargs)
        return run()

    def choice(*args: Any, **kwargs: Any) -> Choice:
        """The driver that a call with these arguments takes, and why; it traces the function."""
        if not region.enabled:
            return _OFF
        return Choice("trace", _ASKED) if region.driver == "trace" else _chosen(region, function, args, kwargs)[0]

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(call, function)
    call.choice = choice  # type: ignore[attr-defined]
    call.region = region  # type: ignore[attr-defined]
    return call


def _chosen(region: Region, function: Any, args: Any, kwargs: Any) -> tuple[Choice, Callable[[], Any]]:
    def traced() -> Any:
        with region:
            return function(*args, **kwargs)

    asked = region.rules()
    try:
        program = _Program(function, args, kwargs)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        if region.driver == "jaxpr":
            raise
        return Choice("trace", _VALUES), traced
    if region.driver == "auto" and has_kernels(program.closed.jaxpr) and not has_backward(program.closed.jaxpr):
        return Choice("trace", _KERNELS), traced
    return Choice("jaxpr", _ASKED if region.driver == "jaxpr" else _WHOLE), lambda: program.run(asked)


class _Program:
    """A function traced as it was written, for the arguments of one call."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        names = compat.debug_info(function, args, kwargs)
        self._finish: Callable[[Any], Any] = lambda out: out
        lifted = nnx_state.lift(function, args, kwargs)
        if lifted is not None:
            function, args, self._finish = lifted
            kwargs = {}
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if compat.is_array(leaf)]
        self._values = [leaves[place] for place in places]
        self._rest: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            filled = list(leaves)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            given, named = jax.tree.unflatten(tree, filled)
            outs, self._tree = jax.tree.flatten(function(*given, **named))
            self._rest = [None if compat.is_array(out) else out for out in outs]
            return [out for out in outs if compat.is_array(out)]

        types = [compat.typeof(value) for value in self._values]
        self.closed = compat.trace(flat, types, names)

    def run(self, asked: Rules) -> Any:
        """The results, in the dtypes that the function was written with."""
        walker = Walker(asked)
        outs = walker.run(self.closed, self._values)
        kept = iter(
            walker.frame.cast(out, aval.dtype) if is_float(aval.dtype) else out
            for out, aval in zip(outs, self.closed.out_avals, strict=True)
        )
        filled = [next(kept) if other is None else other for other in self._rest]
        return self._finish(jax.tree.unflatten(self._tree, filled))
