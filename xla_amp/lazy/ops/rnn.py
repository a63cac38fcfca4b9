"""Kernels for nn.LSTM, nn.GRU and nn.RNN: one operation for each layer (`xla_amp.lowering.nn.recurrent`).

torch's composite records every cell of every time step, so recording and compiling time grow with the sequence.
Packed sequences are computed padded, with their lengths as data (`packed`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_amp.lazy.ops import packed
from xla_amp.lazy.ops.checks.meta_results import SHAPES
from xla_amp.lazy.ops.composites import is_transformed
from xla_amp.lazy.ops.operators import on_key

aten = torch.ops.aten
_library = torch.library.Library("xla_amp", "FRAGMENT")
_library.define(
    "recurrent_layer(str mode, Tensor inputs, Tensor weight, Tensor? bias, Tensor? projection, Tensor hidden, "
    "Tensor state, Tensor? lengths, bool reverse) -> (Tensor outputs, Tensor states, Tensor gates)"
)
_library.define(
    "recurrent_layer_backward(str mode, Tensor grad_outputs, Tensor grad_states, Tensor inputs, Tensor weight, "
    "Tensor? projection, Tensor hidden, Tensor state, Tensor? lengths, Tensor outputs, Tensor states, Tensor gates, "
    "bool reverse) -> (Tensor inputs, Tensor weight, Tensor bias, Tensor projection, Tensor hidden, Tensor state)"
)
_forward = torch.ops.xla_amp.recurrent_layer.default
_backward = torch.ops.xla_amp.recurrent_layer_backward.default


def _layer_shapes(
    mode: str, inputs: Any, weight: Any, bias: Any, projection: Any, hidden: Any, state: Any, *rest: Any
) -> Any:
    steps = inputs.shape[0]
    return hidden.new_empty((steps, *hidden.shape)), state.new_empty((steps, *state.shape)), torch.empty_like(inputs)


def _layer_backward_shapes(
    mode: str, grad_outputs: Any, grad_states: Any, inputs: Any, weight: Any, projection: Any, hidden: Any, state: Any,
    *rest: Any,
) -> Any:  # fmt: skip
    of_bias = weight.new_empty(weight.shape[:1])
    of_projection = weight.new_empty((0,)) if projection is None else projection
    return tuple(map(torch.empty_like, (inputs, weight, of_bias, of_projection, hidden, state)))


SHAPES[_forward] = _layer_shapes
SHAPES[_backward] = _layer_backward_shapes


class _Layer(torch.autograd.Function):
    """One direction of one layer; arguments as `xla_amp.lowering.nn.recurrent.layer` takes them."""

    @staticmethod
    def forward(ctx: Any, mode: str, lengths: Any, reverse: bool, *tensors: Any) -> Any:
        results = _forward(mode, *tensors, lengths, reverse)
        ctx.save_for_backward(*tensors, *results)
        ctx.options = mode, lengths, reverse
        return results[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mode, lengths, reverse = ctx.options
        tensors, results = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        if torch.is_grad_enabled():  # with create_graph=True
            return None, None, None, *_differentiable(mode, lengths, reverse, tensors, grads)
        inputs, weight, _, *rest = tensors
        found = _backward(mode, *grads, inputs, weight, *rest, lengths, *results, reverse)
        return None, None, None, *(None if x is None else dx for x, dx in zip(tensors, found, strict=True))


_CELLS: dict[str, Callable[..., Sequence[Any]]] = {
    "gru": lambda x, g, h, c: (aten._thnn_fused_gru_cell(x, g, h)[0], c),
    "lstm": lambda x, g, h, c: aten._thnn_fused_lstm_cell(x, g, c)[:2],
    "relu": lambda x, g, h, c: (torch.relu(x + g), c),
    "tanh": lambda x, g, h, c: (torch.tanh(x + g), c),
}
"""Mode -> the cell of torch's operations: (input gates, hidden gates, hidden state, cell state) to the new states."""


def _differentiable(mode: str, lengths: Any, reverse: bool, tensors: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """The gradients of `tensors`, made of torch's operations, which have derivatives."""
    # As views, because one of them may depend on another, which is no part of this layer.
    parts: list[Any] = [None if x is None else x.view_as(x) for x in tensors]
    inputs, weight, bias, projection, h, c = parts
    outputs, states = [], []
    times = range(len(inputs))
    for time in reversed(times) if reverse else times:
        new, new_c = _CELLS[mode](inputs[time], torch.nn.functional.linear(h, weight, bias), h, c)
        if projection is not None:
            new = torch.nn.functional.linear(new, projection)
        if lengths is not None:
            alive = (lengths > time)[:, None]
            new, new_c = torch.where(alive, new, h), torch.where(alive, new_c, c)
        h, c = new, new_c
        outputs.append(h)
        states.append(c)
    order = -1 if reverse else 1
    results = torch.stack(outputs[::order]), torch.stack(states[::order])
    used = [(y, grad) for y, grad in zip(results, grads, strict=True) if y.requires_grad]
    wanted = [x for x in parts if x is not None and x.requires_grad]
    ys, of_ys = zip(*used, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, of_ys, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in parts]


def _run(mode: str, lengths: Any, reverse: bool, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        results: tuple[torch.Tensor, ...] = _Layer.apply(mode, lengths, reverse, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = _forward(mode, *tensors, lengths, reverse)
    return results[0], results[1]


def _layers(
    mode: str,
    x: torch.Tensor,
    lengths: torch.Tensor | None,
    start: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """(outputs [time, batch, hidden], last states...) of an input [time, batch, features]."""
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    lasts: list[list[torch.Tensor]] = [[], []]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weight, recurrent, *rest = params[index * each : (index + 1) * each]
            biases, projection = (rest[:2], rest[2:]) if has_biases else ([], rest)
            gates = torch.nn.functional.linear(x, weight, *biases[:1])
            # Under autocast the product has the low dtype; the fused cell needs one dtype for all operands.
            hidden, *state = (t[index].to(gates.dtype) for t in start)
            bias, project = (part[-1].to(gates.dtype) if part else None for part in (biases, projection))
            reverse = direction == 1
            operands = (recurrent.to(gates.dtype), bias, project, hidden, state[0] if state else hidden[:, :0])
            results = _run(mode, lengths, reverse, gates, *operands)
            outputs.append(results[0])
            for last, steps in zip(lasts, results, strict=True):
                last.append(steps[0 if reverse else -1])
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout > 0 and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x, *(torch.stack(last) for last in lasts[: len(start)])


def _fits(
    mode: str, x: torch.Tensor, batch: int, hx: Any, params: Sequence[torch.Tensor], has_biases: bool, networks: int
) -> bool:
    """Whether the device computes a network of so many layers and directions, each as one operation."""
    start, each = list(hx) if mode == "lstm" else [hx], 4 if has_biases else 2
    return (
        not is_transformed(x)
        and len(params) in (networks * each, networks * (each + 1))  # an LSTM's with a projection
        and all(t.device == x.device and t.dtype is x.dtype for t in (*start, *params))
        and all(t.dim() == 3 and t.shape[:2] == (networks, batch) for t in start)
    )


def _network(
    mode: str,
    composite: Callable[..., tuple[torch.Tensor, ...]],
    input: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """The ``input`` overloads of torch's recurrent networks: (outputs, last states...)."""
    options = has_biases, num_layers, dropout, train, bidirectional
    x = input.transpose(0, 1) if batch_first and input.dim() == 3 else input
    networks = num_layers * (1 + bidirectional)
    if x.dim() != 3 or len(x) == 0 or not _fits(mode, x, x.shape[1], hx, params, has_biases, networks):
        return composite(input, hx, params, *options, batch_first)  # which also raises torch's errors
    y, *lasts = _layers(mode, x, None, hx if mode == "lstm" else [hx], params, *options)
    return y.transpose(0, 1) if batch_first else y, *lasts


def _packed_network(
    mode: str,
    composite: Callable[..., tuple[torch.Tensor, ...]],
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """The ``data`` overloads, of packed sequences: (rows of the outputs, last states...)."""
    given = has_biases, num_layers, *options
    networks = num_layers * (1 + options[-1])
    fits = data.dim() == 2 and packed.is_packed(data, batch_sizes)
    if not fits or not _fits(mode, data, int(batch_sizes[0]), hx, params, has_biases, networks):
        return composite(data, batch_sizes, hx, params, *given)
    lengths, steps = packed.padded_shape(data, batch_sizes)
    start = hx if mode == "lstm" else [hx]
    y, *lasts = _layers(mode, packed.unpack(data, lengths, steps), lengths.on_device, start, params, *given)
    return packed.pack(y, lengths), *lasts


_NAMES = {"gru": "gru", "lstm": "lstm", "relu": "rnn_relu", "tanh": "rnn_tanh"}
KERNELS: dict[str, Callable[..., Any]] = dict(packed.KERNELS)
"""ATen name -> function for tensors of the device, with or without gradients."""
for _mode, _name in _NAMES.items():
    for _overload, _kernel in (("input", _network), ("data", _packed_network)):
        # The CPU's kernel is torch's composite in C++, as for each device.  Not `decompose`, which takes torch's
        # decomposition in Python: torch 2.11's gives the last states of an LSTM with projections a dimension too many.
        _composite = on_key(f"{_name}.{_overload}", "CPU")
        KERNELS[f"{_name}.{_overload}"] = functools.partial(_kernel, _mode, _composite)
