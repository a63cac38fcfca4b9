"""`skip_nonfinite`: an optax transformation that stands still where gradients are not finite."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from xla_amp.errors import EngineError, PolicyError
from xla_amp.jax.loss_scale import LossScale, all_finite, is_inexact, select
from xla_amp.jax.select_branches import without_conditionals

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]

_Conditionals: TypeAlias = Literal["keep", "select"]


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    inner: Any
    """State of the wrapped transformation: after a skipped step the one from before it, step counts included."""
    skipped: jax.Array
    """Steps skipped, all of them, int32."""
    skipped_in_a_row: jax.Array
    """Of these the newest without a clean step between, int32; it keeps growing where the model diverged."""
    finite: jax.Array
    """Whether the newest step was taken, bool."""
    loss_scale: LossScale | None
    """The scale for the next loss, if it was given to `skip_nonfinite`."""


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    loss_scale: LossScale | None = None,
    axis_name: Any = None,
    conditionals: _Conditionals = "keep",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax transformation so that a step with an inf or nan among the gradients changes nothing.

    The inner update always runs and a select takes its results or the old state; there is no conditional, for which a
    GPU's host must wait and which ``optax.apply_if_finite`` has.
    Every skipped step is counted, and none is ever taken because too many were skipped.

    The updates of a skipped step are -0.0, so that adding them leaves parameters as they are, the sign of zero too.
    (XLA flushes subnormal parameters to zero when it adds anything to them; ``select(state.finite, new, params)``
    keeps also those.)

    Args:
        inner: any ``GradientTransformation``; extra arguments of ``update`` are passed on to it.
        loss_scale: a first scale, if this transformation is to look after it: ``update`` then expects gradients of
            the scaled loss, divides them by ``state.loss_scale`` in float32 and moves the scale.  Leave it out with
            `xla_amp.jax.value_and_grad`, which does the same itself.
        axis_name: axes of `jax.pmap` or `jax.shard_map` on which all devices must agree.  Under `jax.jit` with
            shardings they agree by themselves.
        conditionals: what becomes of conditionals that `inner` has itself (``optax.novograd``, ``optax.MultiSteps``):
            they stay, or ``"select"``: all branches run every step and a select takes from one.

    Returns:
        A transformation whose ``update(grads, state, params=None, *, finite=None, **extra)`` also skips where the
        flag `finite` is false.

    Raises:
        EngineError: optax is not installed.
        PolicyError: `conditionals` is neither of the two.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = skip_nonfinite(optax.adam(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
        >>> optax.apply_updates(params, updates)["w"].tolist(), int(state.skipped), int(state.inner[0].count)
        ([1.0, 1.0], 1, 0)
    """
    try:
        import optax
    except ImportError as error:
        raise EngineError("skip_nonfinite wraps optax transformations: pip install optax") from error

    if conditionals not in get_args(_Conditionals):
        raise PolicyError(f"skip_nonfinite(conditionals={conditionals!r}): expected 'keep' or 'select'")
    extended = optax.with_extra_args_support(inner)

    def run(updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        if conditionals == "keep":
            return extended.update(updates, state, params, **extra)
        return without_conditionals(functools.partial(extended.update, **extra), updates, state, params)

    def init(params: Any) -> SkipNonfiniteState:
        zero = jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(extended.init(params), zero, zero, jnp.asarray(True), loss_scale)

    def update(
        updates: Any, state: SkipNonfiniteState, params: Any = None, *, finite: Any = None, **extra: Any
    ) -> tuple[Any, SkipNonfiniteState]:
        scale = state.loss_scale
        if scale is not None:
            updates = scale.unscale(updates)
        clean = all_finite(updates)
        if finite is not None:
            clean = clean & finite
        if axis_name is not None:
            clean = jax.lax.pmin(clean.astype(jnp.int32), axis_name) != 0
        changes, inner_state = run(updates, state.inner, params, extra)
        skipped = (~clean).astype(jnp.int32)
        return select(clean, changes, jax.tree.map(_nothing, changes)), SkipNonfiniteState(
            inner=select(clean, inner_state, state.inner),
            skipped=state.skipped + skipped,
            skipped_in_a_row=(state.skipped_in_a_row + skipped) * skipped,
            finite=clean,
            loss_scale=None if scale is None else scale.update(clean),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _nothing(change: Any) -> Any:
    """What leaves a number as it is when it is added: -0.0, for 0.0 + -0.0 is 0.0 but -0.0 + 0.0 is not -0.0."""
    return jnp.full_like(change, -0.0) if is_inexact(change) else jnp.zeros_like(change)
