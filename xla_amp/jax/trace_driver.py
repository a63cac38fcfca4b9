"""The trace driver: a JAX trace that applies autocast while the function runs.

`AutocastTrace` is JAX's current trace while the region is open.  Its values are those of its parent trace: nothing is
wrapped, and every transformation around the region sees the primitives that the interpreter binds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_amp.errors import DriverError
from xla_amp.jax import compat, override_scope
from xla_amp.jax.decisions import Settings, dtype_of
from xla_amp.jax.higher_order.common import cast, evaluate_rule
from xla_amp.jax.higher_order.handlers import HIGHER_ORDER_RULES
from xla_amp.jax.interpreter import Interpreter


class AutocastTrace(compat.Trace):
    """JAX's current trace inside a region.

    Args:
        parent: the trace outside, which gets the primitives that the interpreter binds.
        settings: of the region.
    """

    __slots__ = ("_depth", "interpreter", "parent", "settings")

    def __init__(self, parent: Any, settings: Settings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parent = parent
        self.settings = settings
        self.requires_low = False
        self.interpreter = Interpreter(settings, HIGHER_ORDER_RULES)
        self._depth = compat.name_stack_depth()
        # Values inside belong to the parent. flax.nnx compares trace levels before it writes to a variable, so it must
        # find the parent's. Under eager evaluation jit's caches must find a different one.
        if not compat.is_eager(parent):
            self._weakref = parent._weakref

    def stage_value(self, value: Any) -> Any:
        return self.parent.stage_value(value)

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if compat.is_differentiating(self._depth):
            raise DriverError(
                f"{primitive.name} is differentiated by a jax.grad or jax.jvp that was called inside an open autocast "
                "region: the derivative would get other dtypes than the value. Open the region inside the function "
                "that is differentiated, or use autocast(function), whose jaxpr driver supports whole training steps"
            )
        for value in tracers:
            if self.interpreter.table.get(value) is None:
                self.interpreter.table.mark_weight(value)  # not computed in this region, so it comes from outside
        with compat.set_current_trace(self.parent):
            outs = self._mark_computed(self.interpreter.process_primitive(primitive, list(tracers), params))
        return outs if primitive.multiple_results else outs[0]

    def _mark_computed(self, outs: Any) -> Any:
        for out in outs:
            self.interpreter.table.mark_computed(out)
        return outs

    def process_call(self, primitive: Any, function: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        return function.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Any, function: Any, rule: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        # JAX checks the dtypes that a rule returns against its arguments and against the function's results inside the
        # rule. So both are traced as written, and interpreted afterwards.
        dtypes: list[Any] = []

        def body(*values: Any) -> list[Any]:
            outs = self._interpret(function.call_wrapped, function.debug_info, values)
            dtypes[:] = map(dtype_of, outs)
            return outs

        def derivative(*values: Any) -> list[Any]:
            outs = self._interpret(rule.call_wrapped, rule.debug_info, values)
            primal, tangent = outs[: len(outs) // 2], outs[len(outs) // 2 :]
            types = dtypes or [dtype_of(out) for out in primal]
            return [cast(out, dtype) for out, dtype in zip((*primal, *tangent), (*types, *types), strict=True)]

        functions = (compat.wrap_function(body, function), compat.wrap_function(derivative, rule))
        with compat.set_current_trace(self.parent):
            return self._mark_computed(primitive.bind(*tracers, subfuns=functions, **params))

    def process_custom_vjp_call(
        self, primitive: Any, function: Any, forward: Any, backward: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        rule = compat.BackwardRule(backward)

        def derivative(*values: Any) -> Any:
            outs = self._interpret(rule, backward.debug_info, values, backward=True)
            return compat.backward_result(*rule.split(outs))

        functions = [
            compat.wrap_function(self._reopen(wrapped.call_wrapped), wrapped) for wrapped in (function, forward)
        ]
        functions.append(compat.wrap_function(derivative, backward))
        with compat.set_current_trace(self.parent):
            return self._mark_computed(primitive.bind(*tracers, subfuns=tuple(functions), **params))

    def process_shard_map(
        self, primitive: Any, function: Callable[..., Any], tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        with compat.set_current_trace(self.parent):
            return self.parent.process_shard_map(primitive, self._reopen(function), tracers, **params)

    def _reopen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with this region open on the trace that is current when it is called."""

        def run(*values: Any) -> Any:
            trace = AutocastTrace(compat.current_trace(), self.settings)
            with compat.set_current_trace(trace), override_scope.traced_here(self.settings.current_policy()):
                return function(*values)

        return run

    def _interpret(
        self, function: Callable[..., Sequence[Any]], debug_info: Any, values: Sequence[Any], *, backward: bool = False
    ) -> list[Any]:
        """Traces a function of a custom derivative as written, then evaluates the jaxpr under autocast.

        Args:
            function: flat values to flat values.
            debug_info: names for JAX's errors.
            values: its arguments, symbolic zeros among them.
            backward: whether it is a backward rule: its results keep the dtypes that it gave them.
        """
        interpreter = Interpreter(self.settings, HIGHER_ORDER_RULES, backward=backward)
        weights = [False] * len(values)
        return evaluate_rule(interpreter, function, debug_info, values, weights=weights, keep_dtypes=backward)
