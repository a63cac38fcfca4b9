"""`explain`: the content of reports in each form and on each engine, and the clean-up."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as torch_module

import xla_amp
import xla_amp.jax
from xla_amp import policy
from xla_amp.common import events
from xla_amp.jax import LossScale
from xla_amp.tools.explain.on_pytorch import ExplainReport


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(4, 4)

    def forward(self, x):
        query = self.query(x)
        return torch.softmax(query @ query.T + 1, -1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return F.mse_loss(self.attention(x).view(-1), x.view(-1))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    xla_amp.xla_device()  # registers its own kernels at its start
    yield
    assert events.decided.listeners == events.undecided.listeners == ()
    assert not torch_module._global_forward_hooks


def ruled(report: ExplainReport) -> list[tuple[str, str, str, str]]:
    return [(row["operation"], row["module"], row["cast"], row["layer"]) for row in report.rows() if row["rule"]]


def test_a_forward_pass(device):
    model, x = Model().to(device), torch.rand(4, 4).to(device)
    with (
        xla_amp.explain() as report,
        policy.override({"module:*.attention.softmax": "low"}),
        xla_amp.autocast(device, policy="cpu"),
    ):
        model(x)
    assert ruled(report) == [
        ("linear", "attention.query", "low", "builtin"),
        ("matmul", "attention", "low", "builtin"),
        ("softmax.int", "attention", "low", "override"),
        ("mse_loss", "", "fp32", "builtin"),
    ]
    linear, product, add, softmax, loss = report.rows()
    assert (linear["before"], linear["after"]) == ("float32, float32, float32", "bfloat16, bfloat16, bfloat16")
    assert linear["casts"] == ", ".join(["float32->bfloat16"] * 3)
    assert product["casts"] == ""
    assert (add["operation"], add["cast"], add["rule"], add["result"]) == ("add.Tensor", "keep", "", "bfloat16")
    assert (softmax["before"], softmax["after"], softmax["result"]) == ("bfloat16", "bfloat16", "bfloat16")
    assert (loss["before"], loss["after"]) == ("bfloat16, float32", "float32, float32")
    assert loss["rule"].startswith("tables/cpu.toml:")
    assert loss["location"].startswith(f"{__file__}:")
    assert {row["policy"] for row in report.rows()} == {"cpu"}


def test_a_step_of_nnx_names_the_users_line_and_the_path_of_the_module():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.up = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return nnx.gelu(self.up(self.norm(x)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    @nnx.jit
    def step(net, x):
        return nnx.value_and_grad(xla_amp.jax.autocast(lambda net, x: (net(x) ** 2).mean()))(net, x)

    with xla_amp.explain() as report:
        step(Net(nnx.Rngs(0)), jnp.ones((2, 4)))
    line = f"{__file__}:{Block.__call__.__code__.co_firstlineno + 1}"
    places = {(row["module"], row["location"]) for row in report.rows() if row["operation"] in ("matmul", "rsqrt")}
    assert places == {(f"blocks.{number}.{part}", line) for number in range(2) for part in ("norm", "up")}
    assert {row["location"].rpartition(":")[0] for row in report.rows()} == {__file__}, "none of Flax"


def test_outside_regions_nothing_is_decided(device):
    x = torch.rand(4, 4).to(device)
    with xla_amp.explain() as report:
        torch.mm(x, x)
        with xla_amp.autocast(device, enabled=False):
            torch.mm(x, x)
        assert len(report) == 0
        with xla_amp.autocast(device):
            torch.mm(x, x)
        assert len(report) == 1, "readable while the block runs"
        with torch.autocast(device.type):
            torch.mm(x, x)
    with xla_amp.autocast(device):
        torch.mm(x, x)
    assert [row["operation"] for row in report.rows()] == ["mm", "mm"]


def test_reports_inside_reports_and_exceptions(device):
    x = torch.rand(4, 4).to(device)
    with xla_amp.explain() as outer, xla_amp.autocast(device):
        torch.mm(x, x)
        with pytest.raises(ZeroDivisionError), xla_amp.explain() as inner:
            fail(torch.mm(x, x))
        torch.mm(x, x)
    assert (len(outer), len(inner)) == (3, 1)


def fail(_: object) -> None:
    raise ZeroDivisionError


def test_a_policy_that_is_new_to_the_device_inside_the_block(tmp_path):
    """Its kernels replace the recording ones; both must work after the block."""
    device = xla_amp.xla_device()
    x = torch.rand(4, 4, device=device)
    file = tmp_path / "new.toml"
    file.write_text('extends = "tpu"\n[[rule]]\noperations = ["special_airy_ai", "sigmoid"]\ncast = "low"\n')
    with xla_amp.explain() as report, xla_amp.autocast(device, policy=file):
        torch.sigmoid(x)
    assert report.rows()[0]["cast"] == "low"
    with xla_amp.autocast(device, policy=file):
        assert torch.sigmoid(x).dtype is torch.bfloat16
    with xla_amp.autocast(device):
        assert torch.sigmoid(x).dtype is torch.float32


def test_results_are_what_they_are_without_a_report(device):
    torch.manual_seed(0)
    model, x = Model().to(device), torch.rand(4, 4).to(device)

    def gradients():
        model.zero_grad()
        with xla_amp.autocast(device):
            model(x).backward()
        return [parameter.grad.cpu() for parameter in model.parameters()]

    expected = gradients()
    with xla_amp.explain() as report:
        explained = gradients()
    assert len(report) > 5, "the backward pass was in the region too"
    assert all(torch.equal(a, b) for a, b in zip(explained, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def entry(operation="mm", given=("float32",) * 2, used=("bfloat16",) * 2, **fields) -> events.DecisionRecord:
    known = {"cast": "low", "layer": "builtin", "policy": "tpu", "front": "pytorch", "origin": "tables/tpu.toml:1"}
    return events.DecisionRecord(operation=operation, given=given, used=used, result=used[:1], **{**known, **fields})


@pytest.fixture
def report() -> ExplainReport:
    report = ExplainReport()
    kept = {"cast": "keep", "origin": "", "module": "head"}
    report.records += [entry(), entry("relu", ("int64",), ("int64",), **kept), entry(), entry(front="jax")]
    return report


def test_the_table(report):
    head, could, risk, table = str(report).split("\n\n", 1)[1].split("\n\n")
    assert head == "policy          tpu\ncasts inserted  6 x float32->bfloat16"
    assert could.endswith("nothing: every product and convolution runs low")
    assert risk.endswith("nothing that the rules know")
    assert table == (
        "Operations\n"
        "operation  count  before  after  result  cast  layer    rule\n"
        "---------  -----  ------  -----  ------  ----  -------  -----------------\n"
        "mm             3  f32     bf16   bf16    low   builtin  tables/tpu.toml:1\n"
        "without 1 row of integers and plumbing"
    )
    assert str(ExplainReport()).startswith("0 operations under autocast\n\npolicy          none\ncasts inserted  none")


def test_the_answers_about_a_step(device):
    """What runs in float32, where and why, with cost and the line."""
    model, x = Model().to(device), torch.rand(4, 4).to(device)
    rules = {"module:attention.query": "fp32", "module:attention.softmax": "low"}
    with xla_amp.explain() as report, xla_amp.autocast(device, policy="tpu", rules=rules):
        model(x)
    could, risk, on_purpose, *_, shown = report.page().sections
    names, rows = shown.table.shown()
    linear = dict(zip(names, rows[0], strict=True))
    assert (linear["module"], linear["FLOP"], linear["bytes"]) == ("attention.query", "128 FLOP", "208 B")
    assert linear["where"].startswith(f"{os.path.relpath(__file__)}:")
    assert could.text.startswith("1 of 2 products and convolutions, 128 FLOP of 256 FLOP")
    assert [[what for what, _ in section.items] for section in (could, risk)] == [["linear"], ["softmax.int"]]
    assert "mse_loss" in on_purpose.items[0][0]


def test_rows_are_flat(report):
    rows = report.rows()
    assert all(isinstance(value, str) for row in rows for value in row.values())
    assert len({tuple(row) for row in rows}) == 1
    assert rows[0]["casts"] == "float32->bfloat16, float32->bfloat16"
    assert (rows[0]["before"], rows[3]["front"]) == ("float32, float32", "jax")


def test_the_page(capsys, monkeypatch):
    """docs/tools.md: its Python runs, and prints what it shows."""
    monkeypatch.setenv("COLUMNS", "120")
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    (code, *_), (shown, *_) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    exec(compile(code, "train.py", "exec"), {"__name__": "train"})
    assert capsys.readouterr().out.strip() == shown.strip()


def test_short_text():
    scale = LossScale.dynamic(4.0)
    assert repr(scale) == "LossScale(value=4.0, growth_tracker=0, skipped=0)"
    assert repr(policy.override(softmax="fp32", strict=True)) == "override({'softmax': 'fp32'}, strict=True)"
    scaler = xla_amp.GradScaler("cpu", init_scale=4.0)
    expected = "init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True"
    assert repr(scaler) == f"GradScaler({expected})"
    assert repr(xla_amp.GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"
    assert repr(xla_amp.DeviceLoader([1], "cpu", 3)) == "DeviceLoader(list, device='cpu', prefetch=3)"
