"""The update of all parameters is part of the step's program, in place, and moves hardly more bytes than it must."""

from __future__ import annotations

import math
import re

import pytest
import targets
import torch
from other_platform import text_for
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.lazy.base import private_api
from xla_amp.lazy.programs import execute, pjrt

SHAPES = [(64, 128), (128, 256), (256,), (32, 32, 8)]
FUSED = {
    "SGD": (lambda p: syncfree.SGD(p, lr=0.1, momentum=0.9), 2),
    "Adam": (lambda p: syncfree.Adam(p, lr=0.1), 3),
    "AdamW amsgrad": (lambda p: syncfree.AdamW(p, lr=0.1, amsgrad=True), 4),
    "wrapped RMSprop": (lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.1, momentum=0.5)), 3),
}
"""Optimizer -> how many buffers of a parameter's size it reads and writes, the parameter among them."""


def steady_step(make, shapes=SHAPES):
    """The program of one step of update alone, with gradients that are given and dropped."""
    device = xla_amp.xla_device()
    params = [nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]
    optimizer = make(params)
    scaler = GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    for _ in range(3):
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape).to(device)
        xla_amp.sync()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        xla_amp.sync()
    return execute.programs()[-1]


VALUES = sum(math.prod(shape) for shape in SHAPES)


@pytest.mark.parametrize("name", FUSED)
def test_updates_are_in_place(name):
    make, buffers = FUSED[name]
    program = steady_step(make)
    # What lives on is donated, and its new value is in its old memory.
    with private_api.x64():
        compiled = program.lower().compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * VALUES * buffers
    assert sum(math.prod(spec.shape) for spec in program.abstract[0]) >= VALUES * buffers
    # A kernel of XLA:CPU has one result, so each reads again what it needs, but nothing is copied to be read as it was.
    if not name.startswith("wrapped"):
        assert compiled.cost_analysis()["bytes accessed"] <= 4 * VALUES * 2.25 * (2 * buffers + 2)
        assert not re.search(r"%copy[\w.-]* = f32\[\d", compiled.as_text())


@pytest.mark.full
@pytest.mark.skipif(not targets.available("h100"), reason="no compiler for a GPU here")
@pytest.mark.parametrize("name", FUSED)
def test_updates_move_the_least_on_a_gpu(name):
    """XLA:CPU has no fusions with several results."""
    make, buffers = FUSED[name]
    steady_step(make)
    compiled = targets.compile_for(text_for("gpu"), "h100", pjrt.compiler_options("gpu"))
    moved = compiled.bytes_accessed
    # The least there is: every buffer read and written once, and every gradient read once to know whether it is finite
    # (all of them, before anything may be written) and once more to step with.
    least = 4 * VALUES * (2 * buffers + 2)
    assert least <= moved <= 1.002 * least
    if name.startswith("Adam"):  # bias corrections of all parameters at once, not for every element
        assert compiled.hlo.count(" power(") == 2
