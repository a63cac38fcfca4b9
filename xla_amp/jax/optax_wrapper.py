"""`skip_nonfinite`: an optax wrapper that skips steps with nonfinite gradients, without a conditional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from xla_amp.errors import EngineError
from xla_amp.jax.loss_scale import LossScale, all_finite, is_inexact, on_all_devices, select

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    inner: Any
    """State of the wrapped transformation; a skipped step leaves it unchanged, step counts included."""
    skipped: jax.Array
    """Number of all skipped steps, int32."""
    skipped_in_a_row: jax.Array
    """Number of consecutive skipped steps up to now, int32; if it keeps growing, the model diverged."""
    finite: jax.Array
    """Whether the last step was taken, bool."""
    loss_scale: LossScale | None
    """The scale for the next loss, if one was passed to `skip_nonfinite`."""


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    loss_scale: LossScale | None = None,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax transformation so that a step with an inf or nan among the gradients changes nothing.

    The inner update always runs, and a select takes its results or the old state.  ``optax.apply_if_finite`` uses a
    conditional, which makes the host of a GPU wait.  Every skipped step is counted, and all nonfinite steps are
    skipped, however many there are.

    The updates of a skipped step are -0.0: adding them changes no parameter, not even the sign of a zero.  (XLA flushes
    subnormal parameters to zero in any addition; ``select(state.finite, new, params)`` keeps them.)

    Args:
        inner: any ``GradientTransformation``; extra arguments of ``update`` are passed on to it.
        loss_scale: initial scale, if this transformation manages it: ``update`` then expects gradients of the scaled
            loss, divides them by ``state.loss_scale`` in float32 and updates the scale.  Leave it out with
            `xla_amp.jax.value_and_grad`, which does the same.
        axis_name: axes of `jax.pmap` or `jax.shard_map` over which the finite flag is reduced.  `jax.jit` with
            shardings needs none.

    Returns:
        A transformation whose ``update(grads, state, params=None, *, finite=None, **extra)`` also skips the step if
        `finite` is false.

    Raises:
        EngineError: optax is not installed.
        TypeError: `inner` is no transformation, or `loss_scale` no `LossScale`.

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

    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(
            f"skip_nonfinite(inner): expected an optax transformation such as optax.adam(1e-3), got {inner!r}"
        )
    if not isinstance(loss_scale, LossScale | None):
        raise TypeError(
            f"skip_nonfinite(loss_scale={loss_scale!r}): expected xla_amp.jax.LossScale, got "
            f"{type(loss_scale).__name__}; write loss_scale=LossScale.dynamic(2.0**15)"
        )
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipNonfiniteState:
        counters = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        scale = jax.tree.map(jnp.copy, loss_scale)  # the state may be donated
        return SkipNonfiniteState(extended.init(params), *counters, jnp.asarray(True), scale)

    def update(
        updates: Any, state: SkipNonfiniteState, params: Any = None, *, finite: Any = None, **extra: Any
    ) -> tuple[Any, SkipNonfiniteState]:
        scale = state.loss_scale
        if scale is not None:
            updates = scale.unscale(updates)
        taken = all_finite(updates)
        if finite is not None:
            taken = taken & finite
        taken = on_all_devices(taken, axis_name)
        changes, inner_state = extended.update(updates, state.inner, params, **extra)
        skipped = (~taken).astype(jnp.int32)
        # -0.0 changes no number when it is added: 0.0 + -0.0 is 0.0, but -0.0 + 0.0 is 0.0.
        none = jax.tree.map(lambda each: jnp.full_like(each, -0.0 if is_inexact(each) else 0), changes)
        return select(taken, changes, none), SkipNonfiniteState(
            inner=select(taken, inner_state, state.inner),
            skipped=state.skipped + skipped,
            skipped_in_a_row=(state.skipped_in_a_row + skipped) * skipped,
            finite=taken,
            loss_scale=None if scale is None else scale.update(taken),
        )

    return optax.GradientTransformationExtraArgs(init, update)
