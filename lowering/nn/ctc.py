"""Connectionist temporal classification (Graves et al. 2006): the loss of all alignments of targets to a longer input.

The states of the recursion are the labels with blanks between and around them, 2 S + 1 of them; forward and backward
each are one loop over time.  Lengths are data, so a batch of other lengths runs the same executable.

As in torch, the gradient is that of the loss with respect to the *input of the log-softmax*, which it assumes before
`log_probs`; behind a log-softmax the two give the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype
from xla_amp.lowering.registry import register


class _Lattice:
    """The states of a batch, [batch, 2 S + 1], and what a step may do."""

    def __init__(
        self, log_probs: jax.Array, targets: jax.Array, lengths: jax.Array, target_lengths: jax.Array, blank: int
    ) -> None:
        self.lengths = lengths
        self.last = 2 * target_lengths[:, None]
        batch, width = targets.shape
        self.place = jnp.arange(2 * width + 1)[None, :]
        self.labels = jnp.full((batch, 2 * width + 1), blank, targets.dtype).at[:, 1::2].set(targets)
        inside = self.place <= self.last
        self.labels = jnp.where(inside, self.labels, blank)
        before = jnp.pad(self.labels[:, :-2], [(0, 0), (2, 0)], constant_values=blank)
        self.skips = (self.labels != blank) & (self.labels != before) & (self.place > 1)
        """Whether a state can follow the one two before: not over a blank, and not to the same label."""
        emitted = jnp.take_along_axis(
            log_probs, jnp.broadcast_to(self.labels, (log_probs.shape[0], *self.labels.shape)), -1
        )
        self.emitted = jnp.where(inside, emitted, -jnp.inf)
        """[time, batch, states] log-probability of each state's label; states past the target's end emit nothing."""

    def running(self, time: jax.Array) -> jax.Array:
        """Which of the batch still have input at `time`, as a column."""
        return time < self.lengths[:, None]


def _sum(*terms: jax.Array) -> jax.Array:
    """log(sum(exp)) over `terms`, without NaN where all are -inf."""
    top = jnp.max(jnp.stack(terms), 0)
    safe = jnp.where(jnp.isneginf(top), 0, top)
    return safe + jnp.log(sum(jnp.exp(term - safe) for term in terms))


def _shift(x: jax.Array, by: int) -> jax.Array:
    """Each state's value from `by` states before (after, if negative); -inf past the end."""
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

    A target without an alignment has the loss inf; torch itself replaces it afterwards where `zero_infinity` is set.
    """
    of = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)

    def step(alpha: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        time, emitted = at
        skip = jnp.where(of.skips, _shift(alpha, 2), -jnp.inf)
        moved = _sum(alpha, _shift(alpha, 1), skip) + emitted
        # Before the first step nothing has been emitted: the path starts in one of the first two states.
        new = jnp.where(time == 0, jnp.where(of.place < 2, emitted, -jnp.inf), moved)
        new = jnp.where(of.running(time), new, -jnp.inf)
        return jnp.where(of.running(time), new, alpha), new

    times = jnp.arange(log_probs.shape[0])
    start = jnp.full(of.labels.shape, -jnp.inf, log_probs.dtype)
    final, alphas = lax.scan(step, start, (times, of.emitted))
    ends = jnp.where((of.place == of.last) | (of.place == of.last - 1), final, -jnp.inf)
    top = jnp.max(ends, -1)
    safe = jnp.where(jnp.isneginf(top), 0, top)
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
    """The gradient of `log_probs`; zero behind each input's end."""
    of = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)

    def step(beta: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        time, emitted = at
        # A state can be skipped to from two before it, so the permission is read there.
        skip = _shift(jnp.where(of.skips, beta, -jnp.inf), -2)
        moved = _sum(beta, _shift(beta, -1), skip) + emitted
        ends = jnp.where((of.place == of.last) | (of.place == of.last - 1), emitted, -jnp.inf)
        new = jnp.where(time == of.lengths[:, None] - 1, ends, moved)
        new = jnp.where(of.running(time), new, -jnp.inf)
        return new, new

    times = jnp.arange(log_probs.shape[0])
    start = jnp.full(of.labels.shape, -jnp.inf, log_probs.dtype)
    _, betas = lax.scan(step, start, (times, of.emitted), reverse=True)
    joint = jnp.moveaxis(log_alpha, 1, 0) + betas
    possible = ~jnp.isneginf(joint)
    posterior = jnp.where(possible, jnp.exp(jnp.where(possible, joint - of.emitted, 0) + losses[:, None]), 0)
    steps, batch, classes = log_probs.shape
    rows = jnp.arange(batch)[:, None]
    occupied = jnp.zeros((steps, batch, classes), log_probs.dtype).at[:, rows, of.labels].add(posterior)
    result = (jnp.exp(log_probs) - occupied) * as_dtype(grad, log_probs.dtype)[None, :, None]
    impossible = jnp.isinf(losses)[None, :, None]
    result = jnp.where(impossible, 0 if zero_infinity else jnp.nan, result)
    return jnp.where((times[:, None] < input_lengths[None, :])[..., None], result, 0)
