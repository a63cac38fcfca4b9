"""`search` for JAX: the operations of a function that must stay float32."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common import compiling, events
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import LowDtype
from xla_amp.errors import RuleWarning, SearchError
from xla_amp.jax import compat
from xla_amp.jax.api import autocast
from xla_amp.tools.search import Plan, SearchResult, fronts


def search(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    budget: float | Mapping[str, float],
    argnums: int | Sequence[int] = 0,
    low: LowDtype = "bfloat16",
    held_out: int | None = None,
    **left: Any,
) -> SearchResult:
    """The policy that keeps the fewest operations in float32 while a function's error stays within `budget`.

    Every plan runs as ``autocast(function, policy=plan)``, with its gradients, and is compared with float32 on the same
    arguments.  The result is checked on arguments that the search has not used.

    Args:
        function: a loss, or any function of pytrees.  Of a loss the gradients are measured, too.
        args: three or more tuples of arguments, one for each batch: ``[(params, batch) for batch in batches]``.
        budget: largest accepted relative error of the loss (of all results of a function that is no loss), or of
            several quantities: ``{"loss": 1e-3, "gradients": 1e-2}``.  The error of the gradients is that of all as one
            vector.  Quantities without a budget are reported, and must be finite.
        argnums: arguments whose floating arrays the gradients are for.
        low: the low dtype.
        held_out: number of the last tuples of arguments, which only check the result; None is a quarter, at least one.
        left: arguments of the release before, which raise.

    Returns:
        The plan, and its achieved errors.  If no plan is within the budget, which only a function that is not
        reproducible or not float32 can cause, ``result.met`` is False and an `XlaAmpWarning` is issued.

    Raises:
        SearchError: the arguments do not fit a search.

    Example:
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> w = jnp.ones((8, 8))
        >>> batches = [jax.random.normal(jax.random.key(i), (4, 8)) for i in range(4)]
        >>> search(loss, [(w, x) for x in batches], budget=0.1).policy.decide("mm").cast
        'low'
    """
    fronts.check_left(left)
    fronts.check_low(low)
    rows = [row if isinstance(row, tuple) else (row,) for row in args]
    if not rows:
        raise SearchError("no arguments: give three or more tuples, [(params, batch) for batch in batches]")
    numbers = {argnums} if isinstance(argnums, int) else set(argnums)
    program = JaxProgram(function, rows, numbers, low)
    program.look()
    return fronts.searched(program, budget=budget, held_out=held_out, device=jax.default_backend())


class JaxProgram(fronts.MeasuredProgram):
    """A function of JAX as a program of a search."""

    overflow_finder = "xla_amp.jax.find_overflow()"

    def __init__(
        self, function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], argnums: set[int], low: LowDtype
    ) -> None:
        super().__init__(low, len(rows))
        self._function = function
        self._rows = rows
        self._argnums = argnums
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._is_loss = _is_loss(jax.eval_shape(self._of_arrays(0, function), self._arrays(0)))
        self._options: dict[str, bool | int] = {}
        """Of XLA, the same for every plan and for float32."""

    @property
    def has_gradients(self) -> bool:
        """Whether the function is a loss of floating arrays."""
        return self._is_loss and bool(self._differentiated(0))

    def look(self) -> None:
        """Chooses XLA's options by the work of a run."""
        records = self.records(None)
        work = (3 if self.has_gradients else 1) * math.fsum(record.flops or 0 for record in records)
        self._options = compiling.quick_options(jax.default_backend(), work)

    def _arrays(self, index: int) -> list[Any]:
        return [leaf for leaf in jax.tree.leaves(self._rows[index]) if _is_array(leaf)]

    def _of_arrays(self, index: int, function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        """`function` of the arrays in its arguments; what else is in them is constant."""
        leaves, tree = jax.tree.flatten(self._rows[index])
        places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]

        def call(arrays: list[Any]) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            return function(*jax.tree.unflatten(tree, filled))

        return call

    def _differentiated(self, index: int) -> list[int]:
        """Positions among the arrays of the floating ones in ``argnums``."""
        owners = [
            number
            for number, argument in enumerate(self._rows[index])
            for leaf in jax.tree.leaves(argument)
            if _is_array(leaf)
        ]
        arrays = self._arrays(index)
        return [
            place
            for place, (owner, array) in enumerate(zip(owners, arrays, strict=True))
            if owner in self._argnums and jnp.issubdtype(array.dtype, jnp.floating)
        ]

    def _program(
        self, index: int, plan: Plan | None, region: bool, options: Mapping[str, bool | int]
    ) -> Callable[[list[Any]], dict[str, list[Any]]]:
        leaves, tree = jax.tree.flatten(self._rows[index])
        constants = tuple(None if _is_array(leaf) else id(leaf) for leaf in leaves)
        key = (tree, constants, plan, region, tuple(options))
        if key not in self._compiled:
            low = autocast(self._function, policy=self.policy(plan)) if region else self._function
            call = self._of_arrays(index, low)
            places = self._differentiated(index)

            def run(arrays: list[Any]) -> dict[str, list[Any]]:
                if not self._is_loss:
                    return {"output": [_wide(leaf) for leaf in jax.tree.leaves(call(arrays)) if _is_floating(leaf)]}
                if not places:
                    return {"loss": [_wide(_loss(call(arrays)))]}

                def loss(chosen: list[Any]) -> Any:
                    filled = list(arrays)
                    for place, array in zip(places, chosen, strict=True):
                        filled[place] = array
                    return _loss(call(filled))

                value, gradients = jax.value_and_grad(loss)([arrays[place] for place in places])
                return {"loss": [_wide(value)], "gradients": [_wide(each) for each in gradients]}

            if len(self._compiled) > 8:  # executables of plans that were measured
                self._compiled.clear()
            self._compiled[key] = jax.jit(run, compiler_options=dict(options))
        return self._compiled[key]

    def run(self, batch: int, plan: Plan | None, *, region: bool = True) -> fronts.Quantities:
        """The loss and its gradients, or the floating results, on one tuple of arguments."""
        return self._run_on(self._arrays(batch), batch, plan, region)

    def _run_on(self, arrays: list[Any], index: int, plan: Plan | None, region: bool) -> fronts.Quantities:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuleWarning)
            found = jax.device_get(self._program(index, plan, region, self._options)(arrays))
        if not found[next(iter(found))]:
            raise SearchError("the function returns no floating array: there is no error to measure")
        return {name: found[name] for name in ("loss", "gradients", "output") if name in found}

    def noise(self) -> dict[str, float]:
        """Errors of float32 with each element of the arguments moved to one of its neighbours."""
        draw = np.random.default_rng(0)
        moved = []
        for array in self._arrays(0):
            if array.dtype == np.float32:
                host = np.asarray(array)
                away = np.where(draw.integers(0, 2, host.shape), np.inf, -np.inf).astype(np.float32)
                moved.append(jnp.asarray(np.nextafter(host, away)))
            else:
                moved.append(array)
        return self.errors(self._run_on(moved, 0, None, region=False), 0)

    def records(self, plan: Plan | None) -> list[DecisionRecord]:
        """The forward operations of a run."""
        low = autocast(self._function, policy=self.policy(plan))
        with warnings.catch_warnings(), compat.retraced(), events.capture() as records:
            warnings.simplefilter("ignore", RuleWarning)
            jax.eval_shape(self._of_arrays(0, low), self._arrays(0))
        names = {record.policy for record in records} - {self.policy(plan).name}
        if names:
            raise SearchError(
                f"the function opens an autocast region (policy {', '.join(sorted(names))}), whose rules would hide "
                "those of the plan: give search the function without it"
            )
        return records


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf


def _is_loss(result: Any) -> bool:
    found = _loss(result)
    return _is_floating(found) and found.size == 1


def _loss(result: Any) -> Any:
    """The loss in a result: itself, or the first of ``(loss, auxiliary)``."""
    found = result[0] if isinstance(result, tuple) and result else result
    return (
        found.reshape(())
        if _is_floating(found) and getattr(found, "size", 0) == 1 and hasattr(found, "reshape")
        else found
    )
