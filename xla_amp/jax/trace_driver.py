"""The trace driver: the rules are applied while the program runs, so it sees the dtypes that torch's would.

Its trace is JAX's current one while the region is open, and its values are those of the trace below: nothing is
wrapped, and every transformation around the region works on what the rules made of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from xla_amp.errors import DriverError
from xla_amp.jax import compat
from xla_amp.jax.decisions import Rules, dtype_of, is_float
from xla_amp.jax.interpreter import Walker


class RegionTrace(compat.Trace):
    """JAX's current trace inside a region.

    Args:
        parent: the trace outside, which gets every primitive after the rules.
        rules: what the region asks for.
    """

    __slots__ = ("_depth", "parent", "rules", "walker")

    def __init__(self, parent: Any, rules: Rules) -> None:
        super().__init__()
        self.parent = parent
        self.rules = rules
        self.requires_low = False
        self.walker = Walker(rules)
        self._depth = compat.depth()
        # Values inside are the parent's: whoever compares levels of traces (flax.nnx, before it writes to a variable)
        # must find the same one. Where nothing is traced outside, jit's own caches must find another one.
        if not compat.is_running(parent):
            self._weakref = parent._weakref

    def stage_value(self, value: Any) -> Any:
        return self.parent.stage_value(value)

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if compat.differentiates(self._depth):
            raise DriverError(
                f"{primitive.name} is differentiated by a jax.grad or jax.jvp that was called inside an open autocast "
                "region: the derivative would meet other dtypes than the value. Open the region inside the function "
                "that is differentiated, or make it autocast(function), whose jaxpr driver takes whole training steps"
            )
        for value in tracers:
            if self.walker.frame.note(value) is None:
                self.walker.frame.mark_weight(value)  # what this region has not made comes from outside
        with compat.set_current_trace(self.parent):
            outs = self._made(self.walker.apply(primitive, list(tracers), params))
        return outs if primitive.multiple_results else outs[0]

    def _made(self, outs: Any) -> Any:
        for out in outs:
            self.walker.frame.mark_made(out)
        return outs

    def process_call(self, primitive: Any, function: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        return function.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Any, function: Any, rule: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        # JAX holds what a rule returns against its arguments, and the function's results against both, inside of them:
        # they are traced as they are and walked afterwards.
        dtypes: list[Any] = []

        def body(*values: Any) -> list[Any]:
            outs = self._walked(function.call_wrapped, function.debug_info, values)
            dtypes[:] = map(dtype_of, outs)
            return outs

        def derivative(*values: Any) -> list[Any]:
            outs = self._walked(rule.call_wrapped, rule.debug_info, values)
            primal, tangent = outs[: len(outs) // 2], outs[len(outs) // 2 :]
            types = dtypes or [dtype_of(out) for out in primal]
            return [cast_like(out, dtype) for out, dtype in zip((*primal, *tangent), (*types, *types), strict=True)]

        functions = (compat.fun(body, function), compat.fun(derivative, rule))
        with compat.set_current_trace(self.parent):
            return self._made(primitive.bind(*tracers, subfuns=functions, **params))

    def process_custom_vjp_call(
        self, primitive: Any, function: Any, forward: Any, backward: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        rule = compat.BackwardRule(backward)

        def derivative(*values: Any) -> Any:
            return compat.rule_returns(*rule.split(self._walked(rule, backward.debug_info, values, back=True)))

        functions = [compat.fun(self._inside(each.call_wrapped), each) for each in (function, forward)]
        functions.append(compat.fun(derivative, backward))
        with compat.set_current_trace(self.parent):
            return self._made(primitive.bind(*tracers, subfuns=tuple(functions), **params))

    def process_shard_map(
        self, primitive: Any, function: Callable[..., Any], tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        with compat.set_current_trace(self.parent):
            return self.parent.process_shard_map(primitive, self._inside(function), tracers, **params)

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*values: Any) -> Any:
            with compat.set_current_trace(RegionTrace(compat.current_trace(), self.rules)):
                return function(*values)

        return inside

    def _walked(
        self, function: Callable[..., Sequence[Any]], debug_info: Any, values: Sequence[Any], *, back: bool = False
    ) -> list[Any]:
        """A function of a custom derivative, traced as it is, then walked.

        Args:
            function: flat values to flat values.
            debug_info: what JAX tells of it in errors.
            values: its arguments, symbolic zeros among them.
            back: whether it is a backward rule: its results keep the dtypes that it gave them.
        """
        zeros: list[Any] = []

        def nonzero(*given: Any) -> list[Any]:
            rest = iter(given)
            outs = function(*(value if compat.is_zero(value) else next(rest) for value in values))
            zeros[:] = [out if compat.is_zero(out) else None for out in outs]
            return [out for out in outs if not compat.is_zero(out)]

        given = [value for value in values if not compat.is_zero(value)]
        text = compat.trace(nonzero, [compat.typeof(value) for value in given], debug_info)
        outs = Walker(self.rules, backward=back).run(text, given, weights=[False] * len(given))
        if back:
            outs = [cast_like(out, aval.dtype) for out, aval in zip(outs, text.out_avals, strict=True)]
        kept = iter(outs)
        return [next(kept) if zero is None else zero for zero in zeros]


def cast_like(value: Any, dtype: Any) -> Any:
    """`value` in `dtype`, where casts apply to both."""
    given = dtype_of(value)
    return lax.convert_element_type(value, dtype) if is_float(given) and is_float(dtype) and given != dtype else value
