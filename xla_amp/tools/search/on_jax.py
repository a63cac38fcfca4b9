"""`search` for JAX: the operations of a function that must stay float32."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common import compiling, events
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import LowDtype
from xla_amp.errors import RuleWarning, SearchError
from xla_amp.jax import compat
from xla_amp.jax.api import autocast
from xla_amp.jax.loss_scale import wide
from xla_amp.tools.search import Plan, fronts
from xla_amp.tools.search.fronts import SearchResult

_Arrays: TypeAlias = dict[int, Any]
"""Arrays by their places among the leaves of the arguments."""


def search(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    budget: float | Mapping[str, float],
    argnums: int | Sequence[int] = 0,
    low: LowDtype = "bfloat16",
) -> SearchResult:
    """The policy that keeps the fewest operations in float32 while a function's error stays within `budget`.

    Every plan runs as ``autocast(function, policy=plan)``, with its gradients, and is compared with float32 on the same
    arguments.  The result is checked on arguments that the search has not used.

    Args:
        function: a loss, or any function of pytrees.  Of a loss the gradients are measured, too.
        args: two or more tuples of arguments, one for each batch: ``[(params, batch) for batch in batches]``.  The last
            quarter only checks the result.
        budget: largest accepted relative error of the loss (of all results of a function that is no loss), or of
            several quantities: ``{"loss": 1e-3, "gradients": 1e-2}``.  The error of the gradients is that of all as one
            vector.  Quantities without a budget are reported, and must be finite.
        argnums: arguments whose floating arrays the gradients are for.
        low: the low dtype.

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
    rows = [row if isinstance(row, tuple) else (row,) for row in args]
    if not rows:
        raise SearchError("no arguments: give two or more tuples, [(params, batch) for batch in batches]")
    numbers = {argnums} if isinstance(argnums, int) else set(argnums)
    program = JaxProgram(function, rows, numbers, low)
    return fronts.searched(program, budget=budget, device=jax.default_backend())


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
        self._compiled: dict[Any, Callable[..., dict[str, list[Any]]]] = {}
        work = 3 * math.fsum(record.flops or 0 for record in self.records(None))  # with the backward pass
        self._options = compiling.quick_options(jax.default_backend(), work)
        """Of XLA, the same for every plan and for float32."""

    def run(self, batch: int, plan: Plan | None, *, region: bool = True) -> fronts.Quantities:
        """The loss and its gradients, or the floating results, on one tuple of arguments."""
        call, chosen, others, constants = self._split(batch, plan, region)
        key = constants, plan, region
        if key not in self._compiled:
            if len(self._compiled) > 8:  # executables of plans that were measured
                self._compiled.clear()
            self._compiled[key] = jax.jit(functools.partial(_quantities, call), compiler_options=dict(self._options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuleWarning)
            found = jax.device_get(self._compiled[key](chosen, others))
        if not all(found.values()):
            raise SearchError("the function returns no floating array: there is no error to measure")
        return {name: found[name] for name in ("loss", "gradients", "output") if name in found}

    def records(self, plan: Plan | None, *, region: bool = True) -> list[DecisionRecord]:
        """The decisions about the forward operations of a run."""
        call, chosen, others, _ = self._split(0, plan, region)
        with warnings.catch_warnings(), compat.retraced(), events.capture() as records:
            warnings.simplefilter("ignore", RuleWarning)
            jax.eval_shape(call, chosen, others)
        return records

    def _split(self, batch: int, plan: Plan | None, region: bool) -> tuple[Callable[..., Any], _Arrays, _Arrays, Any]:
        """The function of the arrays among its arguments: those that the gradients are for, and the others.

        What else is among the arguments is constant, and is in the last item, which has the form of the arguments.
        """
        row, function = self._rows[batch], self._function
        if region:
            function = autocast(function, policy=self.policy(plan))
        leaves, tree = jax.tree.flatten(row)
        owners = [number for number, argument in enumerate(row) for _ in jax.tree.leaves(argument)]
        arrays = {place: leaf for place, leaf in enumerate(leaves) if _is_array(leaf)}
        chosen = {n: leaf for n, leaf in arrays.items() if owners[n] in self._argnums and _is_floating(leaf)}
        others = {n: leaf for n, leaf in arrays.items() if n not in chosen}
        constants = tuple(None if n in arrays else id(leaf) for n, leaf in enumerate(leaves))

        def call(chosen: _Arrays, others: _Arrays) -> Any:
            filled = dict(enumerate(leaves)) | others | chosen
            return function(*jax.tree.unflatten(tree, filled.values()))

        return call, chosen, others, (tree, constants)


def _quantities(call: Callable[..., Any], chosen: _Arrays, others: _Arrays) -> dict[str, list[Any]]:
    result = _loss(jax.eval_shape(call, chosen, others))
    if not _is_floating(result) or result.size != 1:
        return {"output": [wide(leaf) for leaf in jax.tree.leaves(call(chosen, others)) if _is_floating(leaf)]}
    if not chosen:
        return {"loss": [wide(_loss(call(chosen, others)))]}
    value, gradients = jax.value_and_grad(lambda chosen: _loss(call(chosen, others)))(chosen)
    return {"loss": [wide(value)], "gradients": [wide(each) for each in gradients.values()]}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _loss(result: Any) -> Any:
    """The loss in a result: itself, or the first of ``(loss, auxiliary)``."""
    found = result[0] if isinstance(result, tuple) and result else result
    return found.reshape(()) if _is_floating(found) and found.size == 1 and hasattr(found, "reshape") else found
