"""Connectionist temporal classification loss (Graves et al. 2006): all alignments of a target to a longer input.

The recursion has 2 S + 1 states: the labels, with blanks between and around them.  Forward and backward are one loop
over time each.  Lengths are data, so batches of other lengths run the same executable.

As in torch, the gradient is with respect to the *input of the log-softmax* that is assumed to compute `log_probs`.
After a log-softmax, both gradients give the same result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype
from xla_amp.lowering.registry import register


class _Lattice:
    """The states of a batch, [batch, 2 S + 1], and the allowed transitions."""

    def __init__(
        self, log_probs: jax.Array, targets: jax.Array, lengths: jax.Array, target_lengths: jax.Array, blank: int
    ) -> None:
        self.lengths = lengths
        self.last = 2 * target_lengths[:, None]
        batch, width = targets.shape
        self.state = jnp.arange(2 * width + 1)[None, :]
        self.labels = jnp.full((batch, 2 * width + 1), blank, targets.dtype).at[:, 1::2].set(targets)
        inside = self.state <= self.last
        self.labels = jnp.where(inside, self.labels, blank)
        before = jnp.pad(self.labels[:, :-2], [(0, 0), (2, 0)], constant_values=blank)
        self.skips = (self.labels != blank) & (self.labels != before) & (self.state > 1)
        """Whether a state can follow the second state before it: it is no blank, and the labels differ."""
        emitted = jnp.take_along_axis(
            log_probs, jnp.broadcast_to(self.labels, (log_probs.shape[0], *self.labels.shape)), -1
        )
        self.emitted = jnp.where(inside, emitted, -jnp.inf)
        """[time, batch, states]: log-probability of each state's label; -inf for states past the target's end."""

    def running(self, time: jax.Array) -> jax.Array:
        """[batch, 1]: which samples still have input at `time`."""
        return time < self.lengths[:, None]


def _logsumexp(*terms: jax.Array) -> jax.Array:
    """log(sum(exp)) over `terms`, without NaN where all are -inf."""
    maximum = jnp.max(jnp.stack(terms), 0)
    safe = jnp.where(jnp.isneginf(maximum), 0, maximum)
    return safe + jnp.log(sum(jnp.exp(term - safe) for term in terms))


def _shift(x: jax.Array, by: int) -> jax.Array:
    """The value `by` states before each state (after, if negative); -inf past the end."""
    before, after = max(by, 0), max(-by, 0)
    return jnp.pad(x, [(0, 0), (before, after)], constant_values=-jnp.inf)[:, after : after + x.shape[1]]


@register("_ctc_loss.Tensor")
def ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(losses [batch], log_alpha [batch, time, states]); log_probs [time, batch, classes], targets [batch, S].

    The loss of a target without an alignment is inf; with `zero_infinity` torch itself replaces it afterwards.  Half
    types are computed in float32, and the results rounded.
    """
    losses, log_alpha = _forward(_wide(log_probs), targets, input_lengths, target_lengths, blank)
    return as_dtype(losses, log_probs.dtype), as_dtype(log_alpha, log_probs.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return as_dtype(x, jnp.promote_types(x.dtype, jnp.float32))


def _forward(
    log_probs: jax.Array, targets: jax.Array, input_lengths: jax.Array, target_lengths: jax.Array, blank: int
) -> tuple[jax.Array, jax.Array]:
    lattice = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)

    def step(alpha: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        time, emitted = inputs
        skip = jnp.where(lattice.skips, _shift(alpha, 2), -jnp.inf)
        moved = _logsumexp(alpha, _shift(alpha, 1), skip) + emitted
        # The path starts in one of the first two states.
        new = jnp.where(time == 0, jnp.where(lattice.state < 2, emitted, -jnp.inf), moved)
        new = jnp.where(lattice.running(time), new, -jnp.inf)
        return jnp.where(lattice.running(time), new, alpha), new

    times = jnp.arange(log_probs.shape[0])
    start = jnp.full(lattice.labels.shape, -jnp.inf, log_probs.dtype)
    final, alphas = lax.scan(step, start, (times, lattice.emitted))
    ends = jnp.where((lattice.state == lattice.last) | (lattice.state == lattice.last - 1), final, -jnp.inf)
    maximum = jnp.max(ends, -1)
    safe = jnp.where(jnp.isneginf(maximum), 0, maximum)
    losses = -(safe + jnp.log(jnp.sum(jnp.exp(ends - safe[:, None]), -1)))
    losses = jnp.where((input_lengths == 0) & (target_lengths == 0), 0, losses)
    return losses, jnp.moveaxis(alphas, 0, 1)


@register("_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    losses: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    """The gradient of `log_probs`; zero past each input's end."""
    dtype, log_probs = log_probs.dtype, _wide(log_probs)
    if dtype != log_probs.dtype:  # rounded sums of logarithms are no probabilities
        losses, log_alpha = _forward(log_probs, targets, input_lengths, target_lengths, blank)
    lattice = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)

    def step(beta: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        time, emitted = inputs
        # `skips` belongs to the target of a transition, here the second state after.
        skip = _shift(jnp.where(lattice.skips, beta, -jnp.inf), -2)
        moved = _logsumexp(beta, _shift(beta, -1), skip) + emitted
        ends = jnp.where((lattice.state == lattice.last) | (lattice.state == lattice.last - 1), emitted, -jnp.inf)
        new = jnp.where(time == lattice.lengths[:, None] - 1, ends, moved)
        new = jnp.where(lattice.running(time), new, -jnp.inf)
        return new, new

    times = jnp.arange(log_probs.shape[0])
    start = jnp.full(lattice.labels.shape, -jnp.inf, log_probs.dtype)
    _, betas = lax.scan(step, start, (times, lattice.emitted), reverse=True)
    joint = jnp.moveaxis(log_alpha, 1, 0) + betas
    possible = ~jnp.isneginf(joint)
    posterior = jnp.where(possible, jnp.exp(jnp.where(possible, joint - lattice.emitted, 0) + losses[:, None]), 0)
    steps, batch, classes = log_probs.shape
    rows = jnp.arange(batch)[:, None]
    occupied = jnp.zeros((steps, batch, classes), log_probs.dtype).at[:, rows, lattice.labels].add(posterior)
    result = (jnp.exp(log_probs) - occupied) * as_dtype(grad, log_probs.dtype)[None, :, None]
    impossible = jnp.isinf(losses)[None, :, None]
    result = jnp.where(impossible, 0 if zero_infinity else jnp.nan, result)
    return as_dtype(jnp.where((times[:, None] < input_lengths[None, :])[..., None], result, 0), dtype)
