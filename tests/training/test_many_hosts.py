"""A step of a GPT compiled for two hosts of 8 H100s and for a v5p 2x2x4 that are not here: collectives and memory."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import transformers

import xla_amp
from xla_amp.tools.inspect import targets

CONFIG = transformers.GPT2Config(
    n_layer=1, n_embd=128, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, resid_pdrop=0, embd_pdrop=0,
    attn_pdrop=0,
)  # fmt: skip
DEVICES = 16


def on_mesh(axes, recipe, split):
    """For `export_for`; adds to `split` the elements of the parameters that are split over "data"."""

    def make_step():
        device, mesh = xla_amp.xla_device(), xla_amp.make_mesh(axes)
        model = transformers.GPT2LMHeadModel(CONFIG)
        layout = xla_amp.shard(model, mesh, recipe)
        split.extend(math.prod(each.shape) for each in layout.parameters if "data" in each.spec)
        optimizer = xla_amp.syncfree.AdamW(model.parameters())
        tokens = torch.zeros(axes["data"], CONFIG.n_positions, dtype=torch.int64).to(device)

        def step():
            with xla_amp.autocast(device, dtype=torch.bfloat16):
                loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make_step


@pytest.fixture(scope="module")
def compiled():
    with targets.Compilers() as compilers:

        @functools.cache
        def compile_for(target):
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            split = []
            program = xla_amp.export_for(target, on_mesh({"data": DEVICES}, "fsdp", split))
            return compilers.compile(program, target, program.compiler_options), sum(split)

        yield compile_for


def totals(program):
    """Bytes of results by (collective, dtype); of those over all devices."""
    return {
        (kind.operation, kind.dtype): traffic.bytes
        for kind, traffic in program.collectives().items()
        if kind.devices == DEVICES
    }


def test_each_weight_is_gathered_once_in_bfloat16_and_its_gradient_scattered_in_float32_on_h100(compiled):
    program, split = compiled("h100")
    found = totals(program)
    positions = CONFIG.n_positions * CONFIG.n_embd  # wpe is added in float32
    assert found["all-gather", "bfloat16"] <= 2 * (split - positions)
    assert found["all-gather", "bfloat16"] >= 0.9 * 2 * (split - positions)
    assert found["reduce-scatter", "float32"] >= 0.9 * 4 * (split - positions) / DEVICES


@pytest.mark.parametrize("target", ["h100", pytest.param("v5p", marks=pytest.mark.exhaustive)])
def test_a_device_holds_its_part_and_no_other_devices_activations(compiled, target):
    program, split = compiled(target)
    state = 3 * 4 * split / DEVICES  # weight and two moments in float32
    assert state <= program.argument_memory <= 1.5 * state
    tokens = DEVICES * CONFIG.n_positions
    gathered = totals(program).get(("all-gather", "float32"), 0)
    assert gathered < 4 * tokens * CONFIG.n_embd  # of a table that is split by rows, every row of every device
