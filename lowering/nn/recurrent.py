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
    hidden: jax.Array,
    state: jax.Array,
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
        hidden, state: [batch, hidden], initial hidden and cell state (cells without a cell state return it unchanged).
        reverse: whether time runs backwards.

    Returns:
        Hidden and cell states after each time step, [time, batch, hidden], and the hidden gates.
    """
    cell = _in_opmath(CELLS[mode])

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
        h, c = carry
        gates = as_dtype(contract(h, weight, ((1,), (1,)), platform=platform), opmath(h.dtype))
        gates = as_dtype(gates if bias is None else gates + up(bias), x.dtype)
        h, c = (as_dtype(new, old.dtype) for new, old in zip(cell(x, gates, h, c), carry, strict=True))
        return (h, c), (h, c, gates)

    steps: tuple[jax.Array, jax.Array, jax.Array] = lax.scan(step, (hidden, state), inputs, reverse=reverse)[1]
    return steps


@register("xla_amp::recurrent_layer_backward")
def layer_backward(
    mode: str,
    grad_outputs: jax.Array,
    grad_states: jax.Array,
    inputs: jax.Array,
    weight: jax.Array,
    hidden: jax.Array,
    state: jax.Array,
    outputs: jax.Array,
    states: jax.Array,
    gates: jax.Array,
    reverse: bool,
    *,
    platform: str,
) -> tuple[jax.Array, ...]:
    """Gradients of inputs, weight, bias, hidden and state; takes the arguments and results of `layer`."""
    cell = _in_opmath(CELLS[mode])

    def previous(first: jax.Array, after: jax.Array) -> jax.Array:
        return jnp.concatenate([after[1:], first[None]] if reverse else [first[None], after[:-1]])

    hiddens = previous(hidden, outputs)

    def step(carry: tuple[jax.Array, jax.Array], saved: tuple[jax.Array, ...]) -> Any:
        (dh, dc), (grad_output, grad_state, x, g, h, c) = carry, saved
        _, pullback = jax.vjp(cell, x, g, h, c)
        dx, dg, dh_direct, dc = pullback((dh + up(grad_output), dc + up(grad_state)))
        dh = as_dtype(contract(dg, weight, ((1,), (0,)), platform=platform), opmath(x.dtype)) + up(dh_direct)
        return (dh, up(dc)), (dx, dg)

    start = jnp.zeros(hidden.shape, opmath(hidden.dtype)), jnp.zeros(state.shape, opmath(state.dtype))
    steps = (grad_outputs, grad_states, inputs, gates, hiddens, previous(state, states))
    (dh, dc), (dx, dg) = lax.scan(step, start, steps, reverse=not reverse)
    flat_gates, flat_hiddens = dg.reshape(-1, dg.shape[-1]), hiddens.reshape(-1, hiddens.shape[-1])
    dw = contract(flat_gates, flat_hiddens, ((0,), (0,)), platform=platform, wide=True)
    return dx, dw, jnp.sum(up(flat_gates), axis=0), dh, dc


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
    """(hy, cy, workspace): the workspace holds the gates after their activation."""
    i, f, update, o = _parts(_gates(input_gates, input_bias) + _gates(hidden_gates, hidden_bias), 4)
    i, f, update, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(update), jax.nn.sigmoid(o)
    cy = f * up(cx) + i * update
    return o * jnp.tanh(cy), cy, jnp.concatenate([i, f, update, o], axis=-1)


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
    i, f, update, o = _parts(up(workspace), 4)
    squashed = jnp.tanh(up(cy))
    dh = jnp.zeros_like(squashed) if grad_hy is None else up(grad_hy)
    dc = dh * o * (1 - squashed * squashed) + (0 if grad_cy is None else up(grad_cy))
    gates = jnp.concatenate(
        [
            dc * update * i * (1 - i),
            dc * up(cx) * f * (1 - f),
            dc * i * (1 - update * update),
            dh * squashed * o * (1 - o),
        ],
        axis=-1,
    )
    return gates, dc * f, jnp.sum(gates, axis=0) if has_bias else None


@register("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: jax.Array,
    hidden_gates: jax.Array,
    hx: jax.Array,
    input_bias: jax.Array | None = None,
    hidden_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(hy, workspace): the workspace holds r, z and n after their activation, hx, and the hidden part of n."""
    (xr, xz, xn), (hr, hz, hn) = (
        _parts(_gates(input_gates, input_bias), 3),
        _parts(_gates(hidden_gates, hidden_bias), 3),
    )
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return n + z * (up(hx) - n), jnp.concatenate([r, z, n, up(hx), hn], axis=-1)


@register("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad: jax.Array, workspace: jax.Array, has_bias: bool) -> tuple[jax.Array | None, ...]:
    """Gradients of input gates, hidden gates, hx, input bias and hidden bias."""
    grad = up(grad)
    r, z, n, hx, hn = _parts(up(workspace), 5)
    dz = grad * (hx - n) * z * (1 - z)
    dn = grad * (1 - z) * (1 - n * n)
    dr = dn * hn * r * (1 - r)
    inputs = jnp.concatenate([dr, dz, dn], axis=-1)
    hidden = jnp.concatenate([dr, dz, dn * r], axis=-1)
    biases = (jnp.sum(inputs, axis=0), jnp.sum(hidden, axis=0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *biases
