"""Which operations of a recorded step give weights their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.programs import execute, weight_gradients


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x):
        q, k, v = self.into(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return torch.bmm(x[:3], self.experts)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, bias=False)
        self.last = nn.Linear(4, 2, dtype=torch.bfloat16, bias=False)

    def forward(self, x):
        return self.last(self.first(x).amax((2, 3)))


def found(module, x):
    """Names and shapes of the operations."""
    xla_amp.sync()
    with xla_amp.autocast("jax", torch.bfloat16, policy="tpu"):
        loss = module(x).float().square().mean()
    loss.backward()
    xla_amp.sync()
    tape = Tape(execute.programs()[-1].key.code)
    numbers = weight_gradients.find(tape)
    for node in tape:
        if node.first in numbers:
            instruction = node.instruction
            yield instruction.name, instruction.outs[1 if "convolution" in instruction.name else 0].shape


@pytest.mark.parametrize("checkpointed", [False, True])
def test_products_of_weights_and_no_others(device, checkpointed):
    module, x = Block().to(device), torch.randn(4, 5, 16).to(device)
    wanted = [("bmm", (3, 16, 8)), ("mm", (16, 16)), ("mm", (48, 16)), ("sum.dim_IntList", (1, 48))]
    if checkpointed:
        plain = module

        def module(x):
            return torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)

    assert sorted(found(module, x)) == wanted


def test_the_product_for_the_data_is_left_out_where_it_has_the_shape_of_a_weight(device):
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))).to(device)
    assert list(found(module, torch.randn(16, 16).to(device))) == [("mm", (16, 16))] * 3


def test_convolutions_and_weights_in_a_low_dtype(device):
    module, x = Convolution().to(device), torch.randn(3, 3, 8, 8).to(device)
    assert sorted(found(module, x)) == [("convolution_backward", (4, 3, 3, 3)), ("mm", (2, 4))]
