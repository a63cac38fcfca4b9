"""What a training step on a TPU writes between its kernels, by XLA's own compiler for it."""

from __future__ import annotations

import pytest
import targets
import torch
from other_platform import between_kernels, text_for
from torch import nn

import xla_amp
from xla_amp.lazy.programs import execute

SHAPE = (8, 64, 28, 28)


@pytest.mark.full
@pytest.mark.skipif(not targets.available("v6e"), reason="no compiler for a TPU here")
def test_a_normalized_relu_is_made_again_and_not_kept():
    execute.clear_programs()
    device = xla_amp.xla_device()
    first, second = (nn.Conv2d(SHAPE[1], SHAPE[1], 3, padding=1, bias=False) for _ in range(2))
    model = nn.Sequential(first, nn.BatchNorm2d(SHAPE[1]), nn.ReLU(), second).to(device)
    x = torch.randn(SHAPE).to(device).requires_grad_()
    with xla_amp.policy.override({"batch_norm": "keep"}), xla_amp.autocast(device, dtype=torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    xla_amp.sync()
    with targets.Compilers() as compilers:
        hlo = compilers.compile(text_for("tpu"), "v6e").hlo
    # A fourth in bfloat16 would be the ReLU's result; the one in float32 is the gradient in `x`.
    assert between_kernels(hlo, SHAPE) == {"bf16": 3, "f32": 1}


@pytest.mark.full
@pytest.mark.skipif(not targets.available("v5p"), reason="no compiler for a TPU here")
def test_no_weight_is_copied():
    execute.clear_programs()
    device = xla_amp.xla_device()
    model = nn.Sequential(nn.Conv2d(256, 256, 1, bias=False), nn.ReLU(), nn.Conv2d(256, 256, 3, bias=False)).to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(8, 256, 14, 14).to(device)
    for _ in range(2):
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xla_amp.sync()
    hlo = targets.compile_for(text_for("tpu"), "v5p").hlo
    entry = hlo[hlo.index("\nENTRY") :]
    assert [line for line in entry.splitlines() if " copy(" in line and "f32[256,256," in line] == []
    assert "f32[256,256,1,1]{0,1,3,2" in entry
