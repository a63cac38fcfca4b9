"""Kernels for nn.LSTM, nn.GRU and nn.RNN: one operation for each layer (`xla_amp.lowering.nn.recurrent`).

torch's composite records every cell of every time step, so recording and compiling time grow with the sequence.
Packed sequences and LSTM projections use the composite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_amp.lazy.ops.checks.meta_results import SHAPES
from xla_amp.lazy.ops.composites import is_transformed

aten = torch.ops.aten
_library = torch.library.Library("xla_amp", "FRAGMENT")
_library.define(
    "recurrent_layer(str mode, Tensor inputs, Tensor weight, Tensor? bias, Tensor hidden, Tensor state, bool reverse)"
    " -> (Tensor outputs, Tensor states, Tensor gates)"
)
_library.define(
    "recurrent_layer_backward(str mode, Tensor grad_outputs, Tensor grad_states, Tensor inputs, Tensor weight, "
    "Tensor hidden, Tensor state, Tensor outputs, Tensor states, Tensor gates, bool reverse)"
    " -> (Tensor inputs, Tensor weight, Tensor bias, Tensor hidden, Tensor state)"
)
_forward = torch.ops.xla_amp.recurrent_layer.default
_backward = torch.ops.xla_amp.recurrent_layer_backward.default


def _layer_shapes(mode: str, inputs: Any, weight: Any, bias: Any, hidden: Any, state: Any, reverse: bool) -> Any:
    steps = inputs.shape[0]
    return hidden.new_empty((steps, *hidden.shape)), state.new_empty((steps, *state.shape)), torch.empty_like(inputs)


def _layer_backward_shapes(
    mode: str, grad_outputs: Any, grad_states: Any, inputs: Any, weight: Any, hidden: Any, state: Any, *rest: Any
) -> Any:
    bias = weight.new_empty(weight.shape[:1])
    return torch.empty_like(inputs), torch.empty_like(weight), bias, torch.empty_like(hidden), torch.empty_like(state)


SHAPES[_forward] = _layer_shapes
SHAPES[_backward] = _layer_backward_shapes


class _Layer(torch.autograd.Function):
    """One direction of one layer; arguments as `xla_amp.lowering.nn.recurrent.layer` takes them."""

    @staticmethod
    def forward(ctx: Any, mode: str, reverse: bool, *tensors: Any) -> Any:
        results = _forward(mode, *tensors, reverse)
        ctx.save_for_backward(*tensors, *results)
        ctx.options = mode, reverse
        return results[:2]

    @staticmethod
    def backward(ctx: Any, grad_outputs: Any, grad_states: Any) -> Any:
        mode, reverse = ctx.options
        inputs, weight, bias, hidden, state, *results = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph=True
            operands = inputs, weight, bias, hidden, state
            return None, None, *_differentiable(mode, reverse, operands, grad_outputs, grad_states)
        found = list(_backward(mode, grad_outputs, grad_states, inputs, weight, hidden, state, *results, reverse))
        if bias is None:
            found[2] = None
        return None, None, *found


def _differentiable(mode: str, reverse: bool, tensors: Sequence[Any], grad_outputs: Any, grad_states: Any) -> list[Any]:
    """The gradients of `tensors`, made of torch's operations, which have derivatives."""
    # As views, because one of them may depend on another, which is no part of this layer.
    parts: list[Any] = [None if x is None else x.view_as(x) for x in tensors]
    inputs, weight, bias, hidden, state = parts
    gates = inputs.shape[-1]
    params = [torch.eye(gates, device=inputs.device, dtype=inputs.dtype), weight]
    params += [] if bias is None else [inputs.new_zeros(gates), bias]
    x = inputs.flip(0) if reverse else inputs
    start = [hidden[None], state[None]] if mode == "lstm" else hidden[None]
    y, *last = _COMPOSITES[mode](x, start, params, bias is not None, 1, 0.0, False, False, False)
    results, grads = [y.flip(0) if reverse else y], [grad_outputs]
    if mode == "lstm":
        results.append(last[1][0])
        grads.append(grad_states[0 if reverse else -1])
    wanted = [x for x in parts if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in parts]


def _run(mode: str, reverse: bool, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        results: tuple[torch.Tensor, ...] = _Layer.apply(mode, reverse, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = _forward(mode, *tensors, reverse)
    return results[0], results[1]


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
    start = list(hx) if mode == "lstm" else [hx]
    directions, each = (2 if bidirectional else 1), (4 if has_biases else 2)
    x = input.transpose(0, 1) if batch_first and input.dim() == 3 else input
    fits = (
        not is_transformed(x)
        and x.dim() == 3
        and x.shape[0] > 0
        and len(params) == num_layers * directions * each  # more with projections
        and all(t.device == input.device and t.dtype is input.dtype for t in (*start, *params))
        and all(t.dim() == 3 and t.shape[:2] == (num_layers * directions, x.shape[1]) for t in start)
    )
    if not fits:
        return composite(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )  # which also raises torch's errors
    lasts: list[list[torch.Tensor]] = [[], []]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weight, recurrent, *biases = params[index * each : (index + 1) * each]
            gates = torch.nn.functional.linear(x, weight, *biases[:1])
            # Under autocast the product has the low dtype; the fused cell needs one dtype for all operands.
            hidden, *state = (t[index].to(gates.dtype) for t in start)
            bias = biases[1].to(gates.dtype) if biases else None
            reverse = direction == 1
            operands = (gates, recurrent.to(gates.dtype), bias, hidden, state[0] if state else hidden[:, :0])
            results = _run(mode, reverse, *operands)
            outputs.append(results[0])
            for last, steps in zip(lasts, results, strict=True):
                last.append(steps[0 if reverse else -1])
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout > 0 and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    y = x.transpose(0, 1) if batch_first else x
    return y, *(torch.stack(last) for last in lasts[: len(start)])


_MODES = {"gru": aten.gru.input, "lstm": aten.lstm.input, "relu": aten.rnn_relu.input, "tanh": aten.rnn_tanh.input}
# Not `decompose`, which takes torch's decomposition in Python: torch 2.11's gives the last states of an LSTM with
# projections a dimension too many.
_CPU = torch.DispatchKeySet(torch.DispatchKey.CPU)  # its kernel is torch's composite in C++, as for each device
_COMPOSITES = {mode: functools.partial(operator.redispatch, _CPU) for mode, operator in _MODES.items()}
KERNELS: dict[str, Callable[..., Any]] = {
    str(operator).removeprefix("aten."): functools.partial(_network, mode, _COMPOSITES[mode])
    for mode, operator in _MODES.items()
}
"""ATen name -> function for tensors of the device, with or without gradients."""
