"""What XLA is asked for by platform, and what its compilers for a GPU and for TPUs then keep of a step between kernels.

Options pay, users can change them, and others' programs go without.  The update of all parameters is part of the
step's program, in place, and moves hardly more bytes than it must.
"""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from other_platform import between_kernels, text_for
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.errors import StepFailedError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.interop.export import export
from xla_amp.lazy.interop.functional import functional
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lowering import forms

ROUNDING = "xla_allow_excess_precision"
VARIABLE = "XLA_AMP_COMPILER_OPTIONS"


@pytest.fixture
def device():
    execute.clear_programs()
    yield xla_amp.xla_device()
    execute.clear_programs()


@pytest.mark.parametrize(
    ("flags", "ours", "expected"),
    [
        ("", "", {ROUNDING: "False"}),
        ("", "xla_allow_excess_precision=true", {ROUNDING: "True"}),
        ("", "xla_allow_excess_precision=", {}),
        ("", "xla_gpu_autotune_level=0", {ROUNDING: "False", "xla_gpu_autotune_level": "0"}),
        ("--xla_allow_excess_precision=true", "", {}),
        ("--xla_gpu_autotune_level=0", "", {ROUNDING: "False"}),
        ("--xla_allow_excess_precision=true", "xla_allow_excess_precision=false", {ROUNDING: "False"}),
    ],
)
def test_users_replace_and_add(monkeypatch, flags, ours, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv(VARIABLE, ours)
    monkeypatch.setattr(pjrt, "platform", lambda: "gpu")
    assert pjrt.compiler_options("gpu") == expected
    # The host computes beside the device, and knows none of its options.
    assert pjrt.compiler_options("cpu") == {}


class Block(nn.Module):
    """A residual block; `torch.relu` would keep its results low by itself."""

    def __init__(self, width):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return nn.functional.leaky_relu(self.norm(self.convolution(x)) + x)


SHAPE = (8, 32, 14, 14)


class Low(nn.Sequential):
    """Casts its input as part of the step, also where a step of another test came before."""

    def forward(self, x):
        return super().forward(x.bfloat16())


def trained(device, model, x, steps, **options):
    """Steps of `model` in bfloat16 have run."""
    model, x = Low(model).to(device), x.to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xla_amp.sync()


@pytest.mark.full
def test_a_gpu_keeps_what_the_policy_made_low_low_between_kernels(device, compile_for):
    trained(device, nn.Sequential(Block(SHAPE[1]), Block(SHAPE[1])), torch.randn(SHAPE), 1)
    text = text_for("gpu")
    wide, low = (compile_for(text, "h100", options) for options in (None, pjrt.compiler_options("gpu")))
    # What stays float32 is inside the gradients of batch norm; the stream between the blocks is not.
    assert between_kernels(low.hlo, SHAPE)["f32"] < between_kernels(wide.hlo, SHAPE)["f32"]
    assert low.bytes_accessed < 0.8 * wide.bytes_accessed
    assert low.peak_memory < 0.9 * wide.peak_memory


@pytest.mark.full
def test_a_gpu_writes_the_logits_of_an_odd_vocabulary_once_and_padded(device, monkeypatch, compile_for):
    rows, width, vocabulary = 1024, 512, 50257
    embedding, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    head.weight = embedding.weight
    model, tokens = nn.Sequential(embedding, nn.LayerNorm(width), head).to(device), torch.arange(rows).to(device)
    with xla_amp.autocast(device, dtype=torch.bfloat16, policy="gpu"):
        loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    xla_amp.sync()
    padded = text_for("gpu")
    monkeypatch.setattr(forms, "refused", {"padded": "to compare"})
    ours, plain = (compile_for(text, "h100", pjrt.compiler_options("gpu")) for text in (padded, text_for("gpu")))
    assert ours.bytes_accessed <= 1.01 * plain.bytes_accessed
    logits = [
        [between_kernels(each.hlo, (rows, columns))["bf16"] for columns in (vocabulary, 50264)]
        for each in (ours, plain)
    ]
    assert logits == [[0, 2], [2, 0]]  # with their gradient


def test_on_a_gpu_a_gradient_is_joined_once_and_a_one_hot_gradient_is_not_summed(device):
    """The readers of the joined gradient read it behind a barrier; a cast leaves `nll_loss`'s gradient deferred."""
    qkv, head = nn.Linear(16, 48).to(device), nn.Linear(16, 24).to(device)
    x, labels = torch.randn(2, 4, 16).to(device).requires_grad_(), torch.arange(8).to(device)
    with xla_amp.autocast(device, dtype=torch.bfloat16, policy="gpu"):
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in qkv(x).split(16, -1))
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        loss = nn.functional.cross_entropy(head(mixed).flatten(0, 1), labels)
    loss.backward()
    xla_amp.sync()
    text = text_for("gpu")
    (joined,) = re.findall(r"(%\S+) = stablehlo\.concatenate .*-> tensor<2x4x48xbf16>", text)
    assert f"stablehlo.optimization_barrier {joined} :" in text
    over_classes = r"stablehlo.reduce\(.*applies stablehlo.add across dimensions = \[1\] : \(tensor<8x24xf32>"
    assert len(re.findall(over_classes, text)) == 1  # log_softmax's; its gradient's would be the second


@pytest.mark.full
def test_a_tpu_makes_a_normalized_relu_again_and_does_not_keep_it(device, compile_for):
    shape = (8, 64, 28, 28)
    first, second = (nn.Conv2d(shape[1], shape[1], 3, padding=1, bias=False) for _ in range(2))
    model = nn.Sequential(first, nn.BatchNorm2d(shape[1]), nn.ReLU(), second).to(device)
    x = torch.randn(shape).to(device).requires_grad_()
    with xla_amp.policy.override({"batch_norm": "keep"}), xla_amp.autocast(device, dtype=torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    xla_amp.sync()
    hlo = compile_for(text_for("tpu"), "v6e").hlo
    # A fourth in bfloat16 would be the ReLU's result; the one in float32 is the gradient in `x`.
    assert between_kernels(hlo, shape) == {"bf16": 3, "f32": 1}


@pytest.mark.full
def test_a_tpu_copies_no_weight(device, compile_for):
    model = nn.Sequential(nn.Conv2d(256, 256, 1, bias=False), nn.ReLU(), nn.Conv2d(256, 256, 3, bias=False))
    trained(device, model, torch.randn(8, 256, 14, 14), 2, momentum=0.9)
    hlo = compile_for(text_for("tpu"), "v5p").hlo
    entry = hlo[hlo.index("\nENTRY") :]
    assert [line for line in entry.splitlines() if " copy(" in line and "f32[256,256," in line] == []
    assert "f32[256,256,1,1]{0,1,3,2" in entry


def test_a_step_is_compiled_with_them(monkeypatch, device):
    monkeypatch.setenv(VARIABLE, "xla_backend_optimization_level=0 xla_allow_excess_precision=false")
    x = torch.ones(3, device=device) + 1
    assert x.tolist() == [2, 2, 2]
    execute.clear_programs()
    monkeypatch.setenv(VARIABLE, "xla_nothing=1")
    y = x + 1
    with pytest.raises(StepFailedError, match="No such compile option: 'xla_nothing'"):
        xla_amp.sync()
    monkeypatch.delenv(VARIABLE)
    del y
    assert (x + 1).tolist() == [3, 3, 3]


def test_programs_inside_others_go_without(monkeypatch, device):
    """JAX takes options for whole programs; a module called from JAX, its gradient, and an export are parts."""
    monkeypatch.setenv(VARIABLE, "xla_allow_excess_precision=false")
    model = nn.Linear(4, 2).to(device)
    x = torch.ones(3, 4).to(device)
    expected = model(x).detach().cpu().numpy()
    params, function = functional(model)

    def loss(params, x):
        return function(params, x).sum()

    np.testing.assert_allclose(jax.jit(function)(params, jnp.ones((3, 4))), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(params, jnp.ones((3, 4)))["bias"], [3, 3])
    np.testing.assert_allclose(export(lambda: {"y": model(x)}).call()[0], expected, rtol=1e-6)
    program = execute.programs()[-1]
    with pytest.raises(ValueError, match="can only be passed to top-level"):
        jax.jit(program.jitted)(*program.abstract)


# ---- the update ------------------------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("name", FUSED)
def test_updates_move_the_least_on_a_gpu(name, compile_for):
    """XLA:CPU has no fusions with several results."""
    make, buffers = FUSED[name]
    steady_step(make)
    compiled = compile_for(text_for("gpu"), "h100", pjrt.compiler_options("gpu"))
    moved = compiled.bytes_accessed
    # The least there is: every buffer read and written once, and every gradient read once to know whether it is finite
    # (all of them, before anything may be written) and once more to step with.
    least = 4 * VALUES * (2 * buffers + 2)
    assert least <= moved <= 1.002 * least
    if name.startswith("Adam"):  # bias corrections of all parameters at once, not for every element
        assert compiled.hlo.count(" power(") == 2
