"""Dynamic loss scaling: check and unscale gradients, update the scale.

Neither operation reads a value back to the host: both are part of the program in which they are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xla_amp.common import loss_scaling
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register


@register("_amp_foreach_non_finite_check_and_unscale_", mutates=("self", "found_inf"))
def non_finite_check_and_unscale(
    grads: Sequence[jax.Array], found_inf: jax.Array, inv_scale: jax.Array, *, replicas: str | None
) -> list[jax.Array]:
    """Gradients times `inv_scale`, and `found_inf`, which becomes 1 if a gradient is not finite.

    A flag that is set stays set.  If one of several processes finds an overflow, the flag is set in all, so that all
    skip the same steps, also when their gradients were not reduced.  The product is formed in the opmath dtype and
    rounded once.  The check reads the gradients before the product, so an overflow that an `inv_scale` above 1 causes
    is not found, as in torch.
    """
    finite = [jnp.all(jnp.isfinite(grad)) for grad in grads]
    unscaled = []
    for grad in grads:
        wide = up(grad)
        unscaled.append(wide * as_dtype(inv_scale, wide.dtype).reshape(()))
    # XLA must not fuse the reduction of all flags into every update that reads it: such a program grows with the
    # square of the number of gradients.  The barrier prevents that, except on XLA:CPU, which drops it early and
    # expands a reduction of stacked flags into a chain of operations; the negation between the two prevents this.
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
    """The next scale and growth tracker: `xla_amp.common.loss_scaling.update`."""
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
