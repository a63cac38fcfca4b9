"""Mantissas, exponents and hashes against torch on the CPU."""

from __future__ import annotations

import math

import torch
from harness import check, check_rows, row, run, sample

EDGES = [0.0, -0.0, 1.0, -1.5, 3e38, -7e-30, math.inf, -math.inf, math.nan]

ROWS = [
    row("frexp.Tensor", "fdhb", lambda dtype: (torch.tensor(EDGES).to(dtype),), rtol=0, atol=0),
    row("hash_tensor", "fdhbiut", lambda dtype: (sample(3, 4, dtype=dtype),)),
    row("hash_tensor", "fi", lambda dtype: (sample(3, 4, dtype=dtype), [1]), keepdim=True),
    row("hash_tensor", "fi", lambda dtype: (sample(3, 4, 2, dtype=dtype), [0, -1])),
    row("hash_tensor", "i", lambda dtype: (sample(dtype=dtype),)),
]


def test_against_torch():
    check_rows(ROWS)


def test_a_hash_sees_one_bit():
    x = sample(64)
    other = x.clone()
    other[17] = torch.nextafter(x[17], torch.tensor(9.0))
    first, second = (run("hash_tensor", each)[0] for each in (x, other))
    assert first.item() != second.item()
    check("hash_tensor", other)
