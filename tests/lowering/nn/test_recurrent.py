"""Fused recurrent cells against torch's unfused ones, and layers as one loop against the unrolled layer."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from harness import TOLERANCE, compare, lowered_here, run, sample, to_tensor

from xla_amp.lowering.nn import recurrent

T, B, N = 5, 3, 4
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [sample(*shape, dtype=dtype, low=-1, high=1, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def lstm(x: torch.Tensor, g: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, update, o = (x + g).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * update.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: torch.Tensor, g: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (xr, xz, xn), (gr, gz, gn) = x.chunk(3, -1), g.chunk(3, -1)
    z = (xz + gz).sigmoid()
    return (1 - z) * (xn + (xr + gr).sigmoid() * gn).tanh() + z * h, c


CELLS = {
    "gru": (3, gru),
    "lstm": (4, lstm),
    "relu": (1, lambda x, g, h, c: ((x + g).relu(), c)),
    "tanh": (1, lambda x, g, h, c: ((x + g).tanh(), c)),
}


def test_every_cell_is_tested():
    assert CELLS.keys() == recurrent.CELLS.keys()


@dtypes
@pytest.mark.parametrize("bias", [False, True])
def test_lstm_cell(dtype, bias):
    shapes = [(B, 4 * N), (B, 4 * N), (B, N)] + [(4 * N,)] * 2 * bias
    x, g, c, *biases = sources = leaves(*shapes, dtype=dtype)
    hy, cy = lstm(x + biases[0] if bias else x, g + biases[1] if bias else g, c, c)
    hy_grad, cy_grad = sample(B, N, dtype=dtype, seed=8), sample(B, N, dtype=dtype, seed=9)
    got = run("_thnn_fused_lstm_cell", *(s.detach() for s in sources))
    compare(got[0], hy.detach())
    compare(got[1], cy.detach())
    for grads in ((hy_grad, cy_grad), (hy_grad, None), (None, cy_grad)):
        loss = sum((y * g).sum() for y, g in zip((hy, cy), grads, strict=True) if g is not None)
        want = torch.autograd.grad(loss, sources, retain_graph=True)
        like = [want[0], want[2], want[3] if bias else None]
        backward = run("_thnn_fused_lstm_cell_backward_impl", *grads, c.detach(), *got[1:], bias)
        for name, actual, expected in zip(("gates", "cx", "bias"), backward, like, strict=True):
            if expected is not None:
                compare(actual, expected, where=name)


@dtypes
@pytest.mark.parametrize("bias", [False, True])
def test_gru_cell(dtype, bias):
    shapes = [(B, 3 * N), (B, 3 * N), (B, N)] + [(3 * N,)] * 2 * bias
    x, g, h, *biases = sources = leaves(*shapes, dtype=dtype)
    hy, _ = gru(x + biases[0] if bias else x, g + biases[1] if bias else g, h, h)
    grad = sample(B, N, dtype=dtype, seed=8)
    got = run("_thnn_fused_gru_cell", *(s.detach() for s in sources))
    compare(got[0], hy.detach())
    want = [*torch.autograd.grad(hy, sources, grad), *([] if bias else [None, None])]
    for actual, expected in zip(run("_thnn_fused_gru_cell_backward", grad, got[1], bias), want, strict=True):
        if expected is not None:
            compare(actual, expected)


def unrolled(
    mode: str, reverse: bool, tensors: list[Any], lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, weight, bias, h, c = tensors
    outputs, states = [], []
    for time in reversed(range(T)) if reverse else range(T):
        new, new_c = CELLS[mode][1](inputs[time], torch.nn.functional.linear(h, weight, bias), h, c)
        alive = torch.tensor(True) if lengths is None else (lengths > time)[:, None]
        h, c = torch.where(alive, new, h), torch.where(alive, new_c, c)
        outputs.append(h)
        states.append(c)
    steps = torch.stack(outputs), torch.stack(states)
    return tuple(s.flip(0) for s in steps) if reverse else steps


def call(name: str, *arguments: Any) -> list[Any]:
    return lowered_here(f"xla_amp::{name}", *arguments, platform="cpu")


def tensors(arrays: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    with jax.enable_x64(True):
        return [to_tensor(array, dtype) for array in arrays if array is not None]


@pytest.mark.parametrize("mode", CELLS)
@pytest.mark.parametrize(
    ("reverse", "bias", "lengths"),
    [(False, True, None), (True, False, None), (False, False, [5, 3, 1]), (True, True, [4, 4, 2])],
)
def test_layer(mode, reverse, bias, lengths):
    lengths = None if lengths is None else torch.tensor(lengths)
    dtype, gates = torch.float64, CELLS[mode][0] * N
    inputs, weight, b, h, c = leaves((T, B, gates), (gates, N), (gates,), (B, N), (B, N), dtype=dtype)
    operands = [inputs, weight, b if bias else None, h, c if mode == "lstm" else c[:, :0]]
    outputs, states = unrolled(mode, reverse, operands, lengths)
    found = call("recurrent_layer", mode, *operands[:3], None, *operands[3:], lengths, reverse)
    saved = tensors(found, dtype)
    compare(saved[0], outputs.detach())
    compare(saved[1], states.detach())

    grads = [sample(*y.shape, dtype=dtype, seed=20 + i) for i, y in enumerate((outputs, states))]
    sources = [inputs, weight, h, *([c] if mode == "lstm" else []), *([b] if bias else [])]
    want = torch.autograd.grad(sum((y * g).sum() for y, g in zip((outputs, states), grads, strict=True)), sources)
    plain = (inputs, weight, None, h, operands[4], lengths)
    dx, dw, db, dh, dc = tensors(call("recurrent_layer_backward", mode, *grads, *plain, *saved, reverse), dtype)
    for actual, expected in zip(
        (dx, dw, dh, *([dc] if mode == "lstm" else []), *([db] if bias else [])), want, strict=True
    ):
        compare(actual, expected)


def test_half_types_are_computed_in_float32_and_states_kept_in_their_own():
    dtype = torch.bfloat16
    operands = [sample(T, B, 4 * N), sample(4 * N, N), sample(4 * N), sample(B, N), sample(B, N)]
    low = [x.to(dtype) for x in operands]
    outputs, states = unrolled("lstm", False, [x.double() for x in low])
    found = call("recurrent_layer", "lstm", *low[:3], None, *low[3:], None, False)
    assert [str(x.dtype) for x in found] == ["bfloat16"] * 3
    for got, want in zip(tensors(found[:2], dtype), (outputs, states), strict=True):
        compare(got, want.to(dtype), rtol=0.0, atol=2 * TOLERANCE[dtype])
