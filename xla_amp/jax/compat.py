"""What is private of JAX, or differs between its versions: everything else uses public names only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core, source_info_util
from jax._src import linear_util as lu
from jax.extend import core as extended
from jax.interpreters import ad, partial_eval

Trace = core.Trace
Literal = extended.Literal
ClosedJaxpr = extended.ClosedJaxpr
Jaxpr = extended.Jaxpr
set_current_trace = core.set_current_trace

REGION = "xla_amp_region"
"""Name scope of what a region inside a function has decided already."""


def typeof(value: Any) -> Any:
    """Abstract value of an array, tracer or scalar."""
    return core.typeof(value)


def trace(function: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: Any = None) -> ClosedJaxpr:
    """`function`, flat arrays to flat arrays, as a jaxpr for arguments of these types."""
    if debug_info is None:
        debug_info = core.DebugInfo("xla_amp", getattr(function, "__name__", "function"), None, None)
    else:
        debug_info = debug_info.with_unknown_names()
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(lu.wrap_init(function, debug_info=debug_info), list(avals))
    return ClosedJaxpr(jaxpr, consts)


def debug_info(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What JAX tells in errors about a function that is traced."""
    from jax._src import api_util

    return api_util.debug_info("xla_amp.jax.autocast", function, args, kwargs)


def without_constants(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr with its constants as leading arguments."""
    from jax._src.interpreters import partial_eval as pe

    return pe.convert_constvars_jaxpr(closed.jaxpr)


def with_dtype(aval: Any, dtype: Any) -> Any:
    """`aval` with another dtype, not weakly typed."""
    return aval.update(dtype=dtype, weak_type=False)


def slice_aval(aval: Any, length: int) -> Any:
    """Type of one step of a scanned array."""
    return extended.mapped_aval(length, 0, aval)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants a ``scan`` equation has, and how many values it carries; the arrays of steps follow them."""
    if "ft_in" in params:  # JAX 0.11
        constants, carried, _ = params["ft_in"].unpack()
        return len(constants), len(carried)
    return params["num_consts"], params["num_carry"]


def scan_params(params: dict[str, Any], body: ClosedJaxpr, constants: int) -> dict[str, Any]:
    """The parameters of a ``scan`` equation with another body, which takes `constants` constants."""
    if "ft_in" not in params:
        return {**params, "jaxpr": body, "num_consts": constants}
    from jax._src import flattree  # type: ignore[attr-defined, unused-ignore]  # JAX 0.11

    _, carried, steps = params["ft_in"].unpack()
    return {**params, "jaxpr": body, "ft_in": flattree.pack((flattree.nones(constants), carried, steps))}


@contextlib.contextmanager
def equation(eqn: Any) -> Any:
    """Inside, what is bound has the name scopes, source line and context of `eqn`."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def scopes(eqn: Any) -> tuple[Any, ...]:
    """Name scopes and transformations around an equation, outermost first."""
    return eqn.source_info.name_stack.stack


def is_region(scope: Any) -> bool:
    """Whether a name scope marks what an inner region has decided."""
    return bool(scope.name == REGION)


def is_transpose(scope: Any) -> bool:
    """Whether a name scope says that this is part of a backward pass."""
    return isinstance(scope, source_info_util.Transform) and scope.name == "transpose"


def depth() -> int:
    """Number of name scopes and transformations that are open."""
    return len(source_info_util.current_name_stack())


def differentiates(depth: int) -> bool:
    """Whether a derivative is being taken that was asked for inside the first `depth` scopes."""
    stack = source_info_util.current_name_stack().stack
    return len(stack) > depth and any(
        isinstance(scope, source_info_util.Transform) and scope.name in ("jvp", "transpose") for scope in stack[depth:]
    )


def location(eqn: Any | None) -> str:
    """The user's ``file:line`` of an equation, or of what runs now."""
    source = source_info_util.current() if eqn is None else eqn.source_info
    frame = source_info_util.user_frame(source.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame is not None else ""


def current_trace() -> Any:
    """The innermost trace."""
    return core.trace_ctx.trace


def is_running(trace: Any) -> bool:
    """Whether `trace` computes at once and writes no program."""
    return isinstance(trace, core.EvalTrace)


def is_concrete(value: Any) -> bool:
    """Whether `value` is an array and not a tracer."""
    return not isinstance(value, core.Tracer)


def fun(function: Callable[..., Any], like: Any) -> Any:
    """`function` as JAX passes functions of custom derivatives on, with the names of `like`."""
    return lu.wrap_init(function, debug_info=like.debug_info)


def evaluate(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr as it is."""
    return list(core.eval_jaxpr(closed.jaxpr, closed.consts, *values))


def def_linearization(primitive: Any, rule: Callable[..., tuple[Any, Any, Any, Callable[..., Any]]]) -> None:
    """Says how `primitive` is linearized.

    Args:
        primitive: with one result.
        rule: ``rule(is_vjp, nonzero, *primals, **params)`` gives the result, whether its tangent is nonzero, residuals,
            and a function from residuals and tangents to the result's tangent.
    """
    from jax._src.interpreters import ad as private

    def structured(*args: Any, **params: Any) -> tuple[Any, Any, Any, None, Callable[..., Any]]:
        out, nonzero, residuals, linear = rule(*args, **params)
        return out, nonzero, residuals, None, lambda residuals, _, *tangents: linear(residuals, *tangents)

    # Since 0.11.1 rules return structured residuals too.
    private.primitive_linearizations[primitive] = structured if jax.__version_info__ >= (0, 11, 1) else rule


def bind(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds with the parameters of an equation; always a list."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def custom_jvp_rule(params: dict[str, Any], primitive: Any) -> Callable[..., Sequence[Any]]:
    """The rule of a ``custom_jvp`` equation: primals and tangents in, results and their tangents out."""
    _, rule = primitive.get_bind_params(params)["subfuns"]
    return rule.call_wrapped


def custom_vjp_rules(
    params: dict[str, Any], primitive: Any
) -> tuple[Callable[..., Sequence[Any]], BackwardRule, Callable[[], Any]]:
    """The rules of a ``custom_vjp`` equation.

    Returns:
        The forward rule (values, each followed by whether it is differentiated, to residuals and results), the backward
        rule (residuals and cotangents to cotangents), and what gives the number of residuals that the forward rule
        returns and, for each residual, the argument that it is, or None.
    """
    _, forward, backward = primitive.get_bind_params(params)["subfuns"]

    def residuals() -> tuple[int, list[int | None]]:
        _, tree, forwarded = params["out_trees"]()
        return tree.num_leaves - sum(index is not None for index in forwarded), forwarded

    return forward.call_wrapped, BackwardRule(backward), residuals


_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")
"""Whether backward rules of ``custom_vjp`` return a dict of what they log beside the cotangents: JAX 0.11.2."""


class BackwardRule:
    """A flat backward rule of ``custom_vjp`` as a function to a list: the cotangents, then what is logged.

    Args:
        rule: as JAX passes it.
    """

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self._logs: Any = None

    def __call__(self, *values: Any) -> list[Any]:
        cotangents, logs = self._rule.call_wrapped(*values) if _LOGS else (self._rule.call_wrapped(*values), None)
        logged, self._logs = jax.tree.flatten(logs)
        return [*cotangents, *logged]

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], dict[str, Any] | None]:
        """Cotangents, and the dict of what is logged, of a list such as the last call gave."""
        count = len(outs) - self._logs.num_leaves
        return list(outs[:count]), jax.tree.unflatten(self._logs, outs[count:])


def rule_returns(cotangents: list[Any], logs: dict[str, Any] | None) -> Any:
    """What a flat backward rule of ``custom_vjp`` returns."""
    return (cotangents, logs) if _LOGS else cotangents


def defvjp(function: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, Any]]) -> None:
    """``function.defvjp`` with a backward rule that returns cotangents and what is logged."""
    if _LOGS:
        function.defvjp_with_logs(forward, backward)
    else:
        function.defvjp(forward, lambda *values: backward(*values)[0])


def is_zero(cotangent: Any) -> bool:
    """Whether a rule returned JAX's symbolic zero."""
    return isinstance(cotangent, ad.Zero) or type(cotangent).__name__ in ("Zero", "SymbolicZero")


def per_operand() -> dict[str, Any]:
    """Parameters of ``jit`` that have an entry for each operand, and the entry of an operand that is added."""
    from jax._src.sharding_impls import UNSPECIFIED

    return {"donated_invars": False, "in_layouts": None, "in_shardings": UNSPECIFIED}


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The programs among the parameters of an equation."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def typeof_tangent(aval: Any) -> Any:
    """Type of a tangent of a value of type `aval`."""
    return aval.to_tangent_aval()


def is_array(value: Any) -> bool:
    """Whether `value` is a JAX array or tracer."""
    return isinstance(value, jax.Array)
