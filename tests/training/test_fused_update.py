"""The update of all parameters is part of the step's program, in place, and moves hardly more bytes than it must."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.engines.jax import compat, cut
from xla_amp.stablehlo import targets

SHAPES = [(64, 128), (128, 256), (256,), (32, 32, 8)]
FUSED = {
    "SGD": (lambda p: syncfree.SGD(p, lr=0.1, momentum=0.9), 2, 0),
    "Adam": (lambda p: syncfree.Adam(p, lr=0.1), 3, 2),
    "AdamW amsgrad": (lambda p: syncfree.AdamW(p, lr=0.1, amsgrad=True), 4, 4),
    "wrapped RMSprop": (lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.1, momentum=0.5)), 3, 2),
}
"""Optimizer -> how many buffers of a parameter's size it reads and writes, the parameter among them, and how many more
passes over such a buffer XLA takes for a GPU, where it makes two kernels of the update instead of one."""


def steady_step(make):
    """The program of one step of update alone, with gradients that are given and dropped."""
    device = xla_amp.xla_device()
    params = [nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]
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
    return cut.programs()[-1]


VALUES = sum(math.prod(shape) for shape in SHAPES)


@pytest.mark.parametrize("name", FUSED)
def test_updates_are_in_place_and_move_little(name):
    make, buffers, more = FUSED[name]
    program = steady_step(make)

    # What lives on is donated, and its new value is in its old memory.
    with compat.x64():
        compiled = program.lower().compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * VALUES * buffers
    assert sum(math.prod(spec.shape) for spec in program.abstract[0]) >= VALUES * buffers

    if not targets.available("h100"):
        pytest.skip(
            "bytes are counted for a GPU: XLA:CPU has no fusions with several results; no compiler for one here"
        )
    moved = targets.compile_for(program.lower().as_text("stablehlo"), "h100").bytes_accessed
    # The least there is: every buffer read and written once, and every gradient read once to know whether it is finite
    # (all of them, before anything may be written) and once more to step with.
    least = 4 * VALUES * (2 * buffers + 2)
    assert least <= moved <= 1.02 * (least + 4 * VALUES * more)


def test_the_count_sees_a_buffer_that_is_read_again():
    if not targets.available("h100"):
        pytest.skip("no compiler for a GPU here")

    def twice(params):
        optimizer = syncfree.SGD(params, lr=0.1, momentum=0.9)

        def again(*_):
            with torch.no_grad():
                params[1].sub_(params[1].sum())

        optimizer.register_step_post_hook(again)
        return optimizer

    text = steady_step(twice).lower().as_text("stablehlo")
    assert targets.compile_for(text, "h100").bytes_accessed > 1.1 * 4 * VALUES * 6
