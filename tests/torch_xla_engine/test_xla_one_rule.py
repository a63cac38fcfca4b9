"""One rule, one meaning: the programs of `tests/policy/test_one_rule_one_meaning.py` on torch_xla's device."""

from __future__ import annotations

import pytest
import torch
from helpers.rule_programs import CASTS, PRODUCTS, expected, run_in_torch, seen

import xla_amp


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast(cast):
    for program, record in run_in_torch(cast, torch.device("xla"), mixed_products=True):
        used, result = expected(program, cast, asks_result=True)
        assert seen(record)[0] == used, program.rule
        # torch_xla gives a product of two dtypes the first one, where torch's kernels refuse it.
        assert seen(record)[1] == result or (cast == "keep" and program.rule in PRODUCTS), program.rule


def test_the_risk_level_lean():
    x = torch.linspace(-2, 3, 64).reshape(8, 8).to("xla")
    with xla_amp.autocast("xla", policy="lean"):
        h = x @ x
        assert torch.nn.functional.layer_norm(h, (8,)).dtype == torch.bfloat16
        assert torch.softmax(h, -1).dtype == torch.bfloat16
        assert torch.nn.functional.mse_loss(h, x).dtype == torch.float32
    with xla_amp.autocast("xla", policy="default"):
        assert torch.softmax(x @ x, -1).dtype == torch.float32
