"""The two kernels of dynamic loss scaling, with torch's names and meanings.

Neither reads a value back: both are part of whatever program they are recorded in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xla_amp import loss_scaling
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register


@register("_amp_foreach_non_finite_check_and_unscale_", mutates=("self", "found_inf"))
def non_finite_check_and_unscale(
    grads: Sequence[jax.Array], found_inf: jax.Array, inv_scale: jax.Array, *, replicas: str | None
) -> list[jax.Array]:
    """Gradients times `inv_scale`, and `found_inf`, which becomes 1 where a gradient is not finite.

    A flag that is set stays set.  With several processes it is set on all where one finds something, so that all skip
    the same steps, also when their gradients were not reduced.  The product is formed in the opmath dtype and rounded
    once.  The check reads the gradients as they came, so an `inv_scale` above 1 that overflows them goes unnoticed, as
    in torch.
    """
    finite = [jnp.all(jnp.isfinite(grad)) for grad in grads]
    unscaled = []
    for grad in grads:
        wide = up(grad)
        unscaled.append(wide * as_dtype(inv_scale, wide.dtype).reshape(()))
    # XLA must not work this out anew, from one flag for each gradient, in every update that reads it: such a program
    # grows with the square of their number.  It keeps the barrier until it has made its kernels, but on a CPU, where it
    # takes a reduction of the stacked flags apart into a chain of operations unless something lies between the two.
    found = jnp.any(~jnp.stack(finite)) if finite else jnp.zeros((), bool)
    if replicas is not None:
        found = jax.lax.pmax(found.astype(jnp.int32), replicas) != 0
    found = jax.lax.optimization_barrier(found)
    return [*unscaled, jnp.where(found, jnp.ones((), found_inf.dtype), found_inf)]


def _multiply(scale: jax.Array, factor: Any) -> jax.Array:
    """The product formed in float64 and rounded once, as torch does."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    return as_dtype(as_dtype(scale, wide) * as_dtype(factor, wide), scale.dtype)


@register(
    "_amp_update_scale_",
    mutates=("self", "growth_tracker"),
    lifted=("scale_growth_factor", "scale_backoff_factor"),
)
def update_scale(
    scale: jax.Array,
    growth_tracker: jax.Array,
    found_inf: jax.Array,
    scale_growth_factor: Any,
    scale_backoff_factor: Any,
    growth_interval: Any,
) -> tuple[jax.Array, jax.Array]:
    """The next scale and growth tracker: `xla_amp.loss_scaling.update`."""
    return loss_scaling.update(
        scale,
        growth_tracker,
        found_inf.reshape(()),
        scale_growth_factor,
        scale_backoff_factor,
        growth_interval,
        where=jnp.where,
        multiply=_multiply,
    )
