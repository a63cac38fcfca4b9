"""The cast and the policy `fp8` on the lazy device: gradients, GPT-2's products on GPUs, skipped steps, refusals."""

from __future__ import annotations

import copy
import itertools

import pytest
import targets
import torch
from other_platform import text_for
from torch import nn

import xla_amp
from xla_amp.errors import PolicyError, UnsupportedDtypeError
from xla_amp.lazy.programs import compile_options, execute
from xla_amp.policy import float8

RULES = {"addmm": "fp8", "linear": "fp8", "matmul": "fp8", "mm": "fp8"}
CALL = 'custom_call_target="__cublas$lt$matmul$f8"'


class Named(nn.Module):
    """A product in the middle of a model, one in its head, and one without a weight."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.up, self.lm_head = layer, copy.deepcopy(layer)

    def forward(self, x):
        return self.up(x), self.lm_head(x), x @ x.t()


class Products(nn.Module):
    """Each operation that can have the cast, with the weight on either side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 64)
        self.added = nn.Parameter(0.1 * torch.randn(64, 48))
        self.bias = nn.Parameter(torch.randn(48))
        self.right = nn.Parameter(0.1 * torch.randn(48, 32))
        self.left = nn.Parameter(0.1 * torch.randn(16, 64))

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        x = torch.addmm(self.bias, x.flatten(0, 1), self.added).view(4, 16, 48)
        x = torch.tanh(x @ self.right).flatten(0, 1)
        return torch.mm(self.left, x)


def gradients(place, rules, dtype=torch.bfloat16):
    model = Products().to(place)
    torch.manual_seed(1)
    x = torch.randn(4, 16, 32).to(place).requires_grad_()
    with xla_amp.autocast(place, dtype=dtype, rules=rules, enabled=rules is not None):
        loss = model(x).square().mean()
    loss.backward()
    return {name: tensor.grad.cpu() for name, tensor in (("x", x), *model.named_parameters())}


def distance(found, wanted):
    return {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}


@pytest.fixture(scope="module")
def device():
    execute.clear_programs()
    return xla_amp.xla_device()


def test_gradients_are_those_of_float32_but_for_the_rounding(device):
    wanted = gradients(torch.device("cpu"), None)
    low, small = (distance(gradients(device, rules), wanted) for rules in ({}, RULES))
    for name in wanted:
        assert low[name] < 0.02, name
        assert 2 * low[name] < small[name] < 0.15, name  # 2^-4 a factor, where bfloat16 has 2^-9


def test_a_report_shows_formats_and_reasons(device):
    with xla_amp.explain() as report:
        gradients(device, RULES)
    found = {each.operation: each for each in report.records if each.operation in RULES}
    assert {name: each.cast for name, each in found.items()} == dict.fromkeys(RULES, "fp8")
    assert found["linear"].used == ("float8_e4m3fn", "float8_e4m3fn", "bfloat16")
    assert found["addmm"].used == ("bfloat16", "float8_e4m3fn", "float8_e4m3fn")
    assert {each.result for each in found.values()} == {("bfloat16",)}
    assert "scaled by their largest magnitude: estimated" in found["mm"].why

    def why(layer, rows, **given):
        model = Named(layer).to(device)
        x = torch.ones(rows, layer.in_features, device=device)
        with xla_amp.explain() as report, xla_amp.autocast(device, **given):
            model(x)
        return [(each.cast, each.why) for each in report.records if each.operation in RULES]

    small, head, product = why(nn.Linear(64, 64), 64, policy="fp8")
    assert (small[0], head[0], product[0]) == ("low", "low", "low")
    assert "on h100 it would take" in small[1]
    assert "logits" in head[1]
    assert "neither operand is a matrix of parameters" in product[1]
    large, head, _ = why(nn.Linear(2048, 4096, device="meta").to_empty(device="cpu"), 8192, policy="fp8")
    assert (large[0], head[0]) == ("fp8", "low")
    odd, *_ = why(nn.Linear(64, 60), 64, rules=RULES)
    assert odd[0] == "low"
    assert "columns of 60, no multiple of 16" in odd[1]


@pytest.mark.parametrize("rules", [{}, RULES], ids=["bfloat16", "fp8"])
def test_a_step_with_an_infinity_is_skipped_and_no_other(device, rules):
    model = Products().to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.01)
    scaler = xla_amp.GradScaler(device, init_scale=4.0, growth_interval=100)
    scales, weights = [], []
    for bad in (0.0, float("inf"), 0.0, float("nan"), 0.0):
        x = torch.ones(4, 16, 32, device=device)
        x[0, 0, 0] += bad
        with xla_amp.autocast(device, dtype=torch.bfloat16, rules=rules):
            loss = model(x).square().mean() + bad * 0
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        weights.append(model.right.detach().cpu().clone())
    assert scales == [4, 2, 2, 1, 1]
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert moved == [False, True, False, True]
    assert all(torch.isfinite(each).all() for each in weights)


@pytest.mark.full
def test_every_product_of_gpt2_is_in_8_bits_on_gpus(device):
    """Forward, and gradient of the data; not the tied head, and not the gradients of the weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 1, "n_positions": 32, "vocab_size": 96}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(device)
    tokens = torch.zeros(2, 32, dtype=torch.int64, device=device)
    with xla_amp.autocast(device, dtype=torch.bfloat16, rules={"addmm": "fp8"}), xla_amp.explain() as report:
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    xla_amp.sync()
    eligible = 4 * sizes["n_layer"]
    assert [each.cast for each in report.records if each.operation == "addmm"] == ["fp8"] * eligible
    if not targets.available("h100"):
        pytest.skip("the compiler for h100 is not installed")
    compiled = targets.compile_for(text_for("gpu"), "h100", compile_options.for_platform("gpu"))
    assert compiled.hlo.count(CALL) == 2 * eligible
    kinds = compiled.contractions()
    assert sum(count for dtypes, count in kinds.items() if dtypes[0].startswith("f8")) == 2 * eligible


def test_what_is_no_8_bit_product_is_an_error_that_says_what_to_do(device):
    x = torch.ones(16, 16)
    layer = nn.Linear(16, 16)
    for given in ({"policy": "fp8"}, {"rules": RULES}):
        refused = pytest.raises(PolicyError, match=r"'fp8' is not supported on torch's device 'cpu'; move the model to")
        with refused, xla_amp.autocast("cpu", **given):
            layer(x)
    refused = pytest.raises(PolicyError, match=r"where the low dtype is torch.float16; pass dtype=torch.bfloat16")
    with refused, xla_amp.autocast(device, dtype=torch.float16, rules=RULES):
        layer.to(device)(x.to(device))
    refused = pytest.raises(UnsupportedDtypeError, match=r"the policy 'fp8' offers torch\.bfloat16")
    with refused, xla_amp.autocast(device, dtype=torch.float16, policy="fp8"):
        pass
    for name in ("bmm", "softmax", "conv2d"):
        with pytest.raises(PolicyError, match=rf"'fp8' for {name}.*products with a weight matrix: addmm, linear"):
            xla_amp.policy.override({name: "fp8"})


def test_estimates_say_where_8_bits_lose():
    assert float8.estimate(256, 256, 256).gain < 0.5
    assert float8.estimate(16384, 4096, 4096, "h200").gain > float8.estimate(16384, 4096, 4096, "h100").gain > 1.3
    assert [float8.target_of(name) for name in ("NVIDIA H200", "NVIDIA B200", "cpu")] == ["h200", "b200", "h100"]
    with pytest.raises(PolicyError, match="float8 for target 'a100': expected one of h100, h200, b200"):
        float8.estimate(16, 16, 16, "a100")


def test_gpus_without_8_bit_products():
    for place in (float8.Device("gpu", "Radeon", None), float8.Device("gpu", "NVIDIA A10G", (8, 6))):
        assert "has no such products" in float8.unavailable(place)
    for place in (float8.Device("gpu", "NVIDIA L40S", (8, 9)), float8.Device("cpu", "cpu", None)):
        assert not float8.unavailable(place)
