"""The casts `fp8_rowwise` and `mxfp8` on the lazy device: gradients, skipped steps, which GPUs have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp.errors import PolicyError
from xla_amp.policy import float8
from xla_amp.stablehlo.tools import targets

DEVICE = xla_amp.xla_device()
CASTS = ("fp8_rowwise", "mxfp8")


def gradients(place, rules, x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)).to(place)
    x = x.detach().clone().to(place).requires_grad_()
    with xla_amp.autocast(place, dtype=torch.bfloat16, rules=rules, enabled=rules is not None):
        loss = model(x).float().square().sum(-1)
    (loss * (1 / loss.detach())).sum().backward()
    return [each.grad.cpu() for each in (x, *model.parameters())]


@pytest.mark.parametrize("cast", CASTS)
def test_gradients_are_those_of_float32_but_for_the_rounding(cast):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    wanted = gradients(torch.device("cpu"), None, x)
    low, small = (gradients(DEVICE, rules, x) for rules in ({}, {"linear": cast}))
    for found, plain, right in zip(small, low, wanted, strict=True):
        error, least = ((each - right).norm() / right.norm() for each in (found, plain))
        assert 2 * least < error < 0.15
        assert least < 0.03


def test_a_report_says_what_shares_a_scale():
    model, x = nn.Linear(64, 32).to(DEVICE), torch.ones(16, 64, device=DEVICE)
    for cast, words in (("fp8_rowwise", "each row scaled by"), ("mxfp8", "each 32 elements scaled by their largest")):
        with xla_amp.explain() as report, xla_amp.autocast(DEVICE, dtype=torch.bfloat16, rules={"linear": cast}):
            model(x)
        (record,) = [each for each in report.records if each.operation == "linear"]
        assert (record.cast, record.used[:2]) == (cast, ("float8_e4m3fn",) * 2)
        assert words in record.why
    assert "on b200" in record.why
    odd = nn.Linear(64, 48).to(DEVICE)
    with xla_amp.explain() as report, xla_amp.autocast(DEVICE, policy="mxfp8", rules={"linear": "mxfp8"}):
        odd(x)
    (record,) = [each for each in report.records if each.operation == "linear"]
    assert record.cast == "low"
    assert "writes columns of 48, no multiple of 32" in record.why


@pytest.mark.parametrize("cast", CASTS)
def test_a_step_with_an_infinity_is_skipped_and_no_other(cast):
    model = nn.Linear(32, 32).to(DEVICE)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.01)
    scaler = xla_amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=100)
    scales = []
    for bad in (0.0, float("inf"), 0.0, float("nan"), 0.0):
        x = torch.ones(16, 32, device=DEVICE)
        x[0, 0] += bad
        with xla_amp.autocast(DEVICE, dtype=torch.bfloat16, rules={"linear": cast}):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [4, 2, 2, 1, 1]
    assert all(torch.isfinite(each.cpu()).all() for each in model.parameters())


def make(cast):
    model, x = nn.Linear(64, 32).to(DEVICE), torch.zeros(16, 64, device=DEVICE, requires_grad=True)

    def step():
        with xla_amp.autocast(DEVICE, policy="fp8", rules={"linear": cast}):
            loss = model(x).float().sum()
        loss.backward()
        return loss, x.grad

    return step


def test_blocks_are_scaled_by_a_b200_and_refused_elsewhere():
    """Forward and for the data, in the step that a B200 would run."""
    refused = r"'mxfp8' is not supported on h200, which scales no blocks; it needs a GPU of compute capability 10.0"
    with pytest.raises(PolicyError, match=refused):
        xla_amp.export_for("h200", lambda: make("mxfp8"))
    with pytest.raises(PolicyError, match=r"'mxfp8' is not supported on torch's device 'cpu'"):
        gradients(torch.device("cpu"), {"linear": "mxfp8"}, torch.ones(16, 64))
    if not targets.available("b200"):
        pytest.skip("the compiler for b200 is not installed")
    program = xla_amp.export_for("b200", lambda: make("mxfp8"))
    compiled = targets.compile_for(program.lowered, "b200", program.compiler_options)
    assert compiled.hlo.count('custom_call_target="__cudnn$blockScaledDot"') == 2


def test_a_gpu_without_8_bit_products_runs_them_in_16_bits_and_says_so():
    with xla_amp.explain() as report:
        program = xla_amp.export_for("a100", lambda: make("fp8"))
    assert "f8E4M3FN" not in program.mlir_text
    (record, *_) = [each for each in report.records if each.operation == "linear"]
    assert (record.cast, record.used[0]) == ("low", "bfloat16")
    assert "a100 has no such products, which need a GPU of compute capability 8.9" in record.why
    for device in (float8.Device("gpu", "Radeon", None), float8.Device("gpu", "NVIDIA A10G", (8, 6))):
        assert "has no such products" in float8.unavailable("fp8", device)
    for device in (float8.Device("gpu", "NVIDIA L40S", (8, 9)), float8.Device("cpu", "cpu", None)):
        assert not float8.unavailable("fp8_rowwise", device)
    assert not float8.unavailable("mxfp8", float8.Device("gpu", "NVIDIA B300", (10, 3)))
    with pytest.raises(PolicyError, match="'mxfp8' is not supported on TPU v6e"):
        float8.unavailable("mxfp8", float8.Device("tpu", "TPU v6e", None))
