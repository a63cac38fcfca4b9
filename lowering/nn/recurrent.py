"""Recurrent layers as one loop over time, and torch's fused LSTM and GRU cells.

A layer unrolled into cells is a program that grows with the sequence; a loop is compiled once for one time step.
`layer` and `layer_backward` are custom operations (``xla_amp::recurrent_layer``); the engine replaces the layers of
``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` by them.

A cell is an elementwise function of its gates.  The matrix products are outside of it, so the weight's gradient is one
product over all time steps.  Half types are computed in float32; states are stored in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.linalg.contraction import contract
from xla_amp.lowering.operand import as_dtype, opmath, up
from xla_amp.lowering.registry import register

RnnCell = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(input gates, hidden gates, hidden state, cell state) -> the new states."""


def _parts(gates: jax.Array, count: int) -> list[jax.Array]:
    return jnp.split(gates, count, axis=-1)


def _lstm(x: jax.Array, g: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    i, f, update, o = _parts(x + g, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(update)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(x: jax.Array, g: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    (xr, xz, xn), (gr, gz, gn) = _parts(x, 3), _parts(g, 3)
    z = jax.nn.sigmoid(xz + gz)
    n = jnp.tanh(xn + jax.nn.sigmoid(xr + gr) * gn)
    return n + z * (h - n), c


def _tanh(x: jax.Array, g: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(x + g), c


def _relu(x: jax.Array, g: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.relu(x + g), c


CELLS: dict[str, RnnCell] = {"gru": _gru, "lstm": _lstm, "relu": _relu, "tanh": _tanh}


# -- whole layers -----------------------------------------------------------------------------------------------------


def _in_opmath(cell: RnnCell) -> RnnCell:
    return lambda *operands: cell(*(up(x) for x in operands))


@register("xla_amp::recurrent_layer")
def layer(
    mode: str,
    inputs: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
    hidden: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    reverse: bool,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One direction of one layer.

    Args:
        mode: a name in `CELLS`.
        inputs: [time, batch, gates], the input multiplied by its weight, plus its bias.
        weight: [gates, hidden].
        bias: [gates], added to the hidden state's product, or ``None``.
        projection: [hidden, cell], by which an LSTM's hidden state is multiplied, or ``None``.
        hidden, state: [batch, hidden], initial hidden and cell state (cells without a cell state return it unchanged).
        lengths: [batch], time steps of each sequence, or ``None`` if all are used; after them states stay as they are.
        reverse: whether time runs backwards.

    Returns:
        Hidden and cell states after each time step, [time, batch, hidden], and the hidden gates.
    """
    cell = _in_opmath(CELLS[mode])

    def step(carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array | None]) -> Any:
        (h, c), (x, alive) = carry, now
        gates = as_dtype(contract(h, weight, ((1,), (1,)), platform=platform), opmath(h.dtype))
        gates = as_dtype(gates if bias is None else gates + up(bias), x.dtype)
        new, new_c = cell(x, gates, h, c)
        if projection is not None:
            new = contract(as_dtype(new, x.dtype), projection, ((1,), (1,)), platform=platform)
        h, c = _where(alive, as_dtype(new, h.dtype), h), _where(alive, as_dtype(new_c, c.dtype), c)
        return (h, c), (h, c, gates)

    times = inputs, _alive(lengths, len(inputs))
    steps: tuple[jax.Array, jax.Array, jax.Array] = lax.scan(step, (hidden, state), times, reverse=reverse)[1]
    return steps


def _used(lengths: jax.Array, steps: int) -> jax.Array:
    """Which sequences have each time step, [time, batch]."""
    return jnp.arange(steps)[:, None] < lengths


def _alive(lengths: jax.Array | None, steps: int) -> jax.Array | None:
    """`_used` as [time, batch, 1]; ``None`` if all are used."""
    return None if lengths is None else _used(lengths, steps)[:, :, None]


def _where(alive: jax.Array | None, new: jax.Array, old: Any) -> jax.Array:
    return new if alive is None else jnp.where(alive, new, old)


@register("xla_amp::recurrent_layer_backward")
def layer_backward(
    mode: str,
    grad_outputs: jax.Array,
    grad_states: jax.Array,
    inputs: jax.Array,
    weight: jax.Array,
    projection: jax.Array | None,
    hidden: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    outputs: jax.Array,
    states: jax.Array,
    gates: jax.Array,
    reverse: bool,
    *,
    platform: str,
) -> tuple[jax.Array | None, ...]:
    """Gradients of inputs, weight, bias, projection, hidden and state; takes the arguments and results of `layer`."""
    cell = _in_opmath(CELLS[mode])

    def previous(first: jax.Array, after: jax.Array) -> jax.Array:
        return jnp.concatenate([after[1:], first[None]] if reverse else [first[None], after[:-1]])

    hiddens = previous(hidden, outputs)

    def step(carry: tuple[jax.Array, jax.Array], saved: tuple[Any, ...]) -> Any:
        grad_output, grad_state, x, g, h, c, alive = saved
        dh, dc = carry[0] + up(grad_output), carry[1] + up(grad_state)
        (full, _), pullback = jax.vjp(cell, x, g, h, c)
        low, dfull = as_dtype(dh, x.dtype), dh
        if projection is not None:
            dfull = as_dtype(contract(low, projection, ((1,), (0,)), platform=platform), full.dtype)
        dx, dg, dh_direct, dc_before = pullback((dfull, dc))
        dx, dg = _where(alive, dx, 0), _where(alive, dg, 0)
        dh_before = as_dtype(contract(dg, weight, ((1,), (0,)), platform=platform), opmath(x.dtype)) + up(dh_direct)
        before = _where(alive, dh_before, dh), _where(alive, up(dc_before), dc)
        return before, (dx, dg, None if projection is None else (_where(alive, low, 0), as_dtype(full, x.dtype)))

    start = jnp.zeros(hidden.shape, opmath(hidden.dtype)), jnp.zeros(state.shape, opmath(state.dtype))
    alive = _alive(lengths, len(inputs))
    steps = (grad_outputs, grad_states, inputs, gates, hiddens, previous(state, states), alive)
    (dh, dc), (dx, dg, projected) = lax.scan(step, start, steps, reverse=not reverse)

    def over_time(x: jax.Array, y: jax.Array) -> jax.Array:
        return contract(_flat(x), _flat(y), ((0,), (0,)), platform=platform, wide=True)

    dprojection = None if projected is None else over_time(*projected)
    return dx, over_time(dg, hiddens), jnp.sum(up(_flat(dg)), axis=0), dprojection, dh, dc


def _flat(steps: jax.Array) -> jax.Array:
    return steps.reshape(-1, steps.shape[-1])


# -- packed sequences -------------------------------------------------------------------------------------------------


@register("xla_amp::packed_rows")
def packed_rows(padded: jax.Array, lengths: jax.Array, rows: int) -> jax.Array:
    """[time, batch, ...] to the [rows, ...] of a packed sequence; `lengths` decrease and add up to `rows`."""
    _, starts = _starts(lengths, len(padded))
    row = jnp.arange(rows)
    time = jnp.searchsorted(starts, row, side="right") - 1
    return padded[time, row - starts[time]]


@register("xla_amp::padded_rows")
def padded_rows(rows: jax.Array, lengths: jax.Array, steps: int) -> jax.Array:
    """The rows of a packed sequence to [time, batch, ...], with zeros after the end of each sequence."""
    alive, starts = _starts(lengths, steps)
    places = starts[:, None] + jnp.arange(len(lengths))
    return jnp.where(alive.reshape(*alive.shape, *(1,) * (rows.ndim - 1)), rows[jnp.where(alive, places, 0)], 0)


def _starts(lengths: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """`_used`, and the row at which each time step begins."""
    alive = _used(lengths, steps)
    sizes = jnp.sum(alive, axis=1)
    return alive, jnp.cumsum(sizes) - sizes


# -- single cells: torch's fused operations on accelerators -----------------------------------------------------------


def _gates(gates: jax.Array, bias: jax.Array | None) -> jax.Array:
    return up(gates) if bias is None else up(gates) + up(bias)


@register("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: jax.Array,
    hidden_gates: jax.Array,
    cx: jax.Array,
    input_bias: jax.Array | None = None,
    hidden_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(hy, cy, workspace): the workspace holds the gates before their activation."""
    gates = _gates(input_gates, input_bias) + _gates(hidden_gates, hidden_bias)
    hy, cy = _lstm(gates, jnp.zeros_like(gates), cx, up(cx))
    return hy, cy, gates


@register("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: jax.Array | None,
    grad_cy: jax.Array | None,
    cx: jax.Array,
    cy: jax.Array,
    workspace: jax.Array,
    has_bias: bool,
) -> tuple[jax.Array | None, ...]:
    """Gradients of the input and hidden gates (equal), of cx, and of both biases (equal)."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    gates, wide_cx = up(workspace), up(cx)
    grads = tuple(jnp.zeros_like(wide_cx) if grad is None else up(grad) for grad in (grad_hy, grad_cy))
    _, pullback = jax.vjp(lambda gates, c: _lstm(gates, jnp.zeros_like(gates), c, c), gates, wide_cx)
    grad_gates, grad_cx = pullback(grads)
    return grad_gates, grad_cx, jnp.sum(grad_gates, axis=0) if has_bias else None


@register("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: jax.Array,
    hidden_gates: jax.Array,
    hx: jax.Array,
    input_bias: jax.Array | None = None,
    hidden_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(hy, workspace): the workspace holds r, z and both parts of n before their activation, and hx."""
    x, g, h = _gates(input_gates, input_bias), _gates(hidden_gates, hidden_bias), up(hx)
    (xr, xz, xn), (hr, hz, hn) = _parts(x, 3), _parts(g, 3)
    return _gru(x, g, h, h)[0], jnp.concatenate([xr + hr, xz + hz, xn, hn, h], axis=-1)


@register("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad: jax.Array, workspace: jax.Array, has_bias: bool) -> tuple[jax.Array | None, ...]:
    """Gradients of input gates, hidden gates, hx, input bias and hidden bias."""
    *gates, hn, hx = _parts(up(workspace), 5)
    x, g = jnp.concatenate(gates, axis=-1), jnp.concatenate([*map(jnp.zeros_like, gates[:2]), hn], axis=-1)
    _, pullback = jax.vjp(lambda x, g, h: _gru(x, g, h, h)[0], x, g, hx)
    inputs, hidden, grad_hx = pullback(up(grad))
    biases = (jnp.sum(inputs, axis=0), jnp.sum(hidden, axis=0)) if has_bias else (None, None)
    return inputs, hidden, grad_hx, *biases
