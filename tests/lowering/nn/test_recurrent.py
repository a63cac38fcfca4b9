"""Recurrent layers as one loop: every cell has a test, and half types are computed in float32."""

from __future__ import annotations

import jax
import torch
from harness import TOLERANCE, compare, lowering_of, sample, to_array, to_tensor

T, B, N = 5, 3, 4


def unrolled_lstm(inputs, weight, bias, h, c):
    outputs, states = [], []
    for x in inputs:
        i, f, update, o = (x + torch.nn.functional.linear(h, weight, bias)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * update.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
        states.append(c)
    return torch.stack(outputs), torch.stack(states)


def test_half_types_are_computed_in_float32_and_states_kept_in_their_own():
    dtype = torch.bfloat16
    operands = [sample(T, B, 4 * N), sample(4 * N, N), sample(4 * N), sample(B, N), sample(B, N)]
    low = [x.to(dtype) for x in operands]
    layer = lowering_of("xla_amp::recurrent_layer").function

    def lstm(inputs, weight, bias, *states):
        return layer("lstm", inputs, weight, bias, None, *states, None, False, platform="cpu")

    with jax.enable_x64(True):
        found = jax.jit(lstm)(*map(to_array, low))
        assert [str(x.dtype) for x in found] == ["bfloat16"] * 3
        results = [to_tensor(array, dtype) for array in found[:2]]
    for got, want in zip(results, unrolled_lstm(*(x.double() for x in low)), strict=True):
        compare(got, want.to(dtype), rtol=0.0, atol=2 * TOLERANCE[dtype])
