"""The estimates of XLA's compiler for the target in the result of a search, against compiling the program by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xla_amp
import xla_amp.jax
from xla_amp.errors import SearchError
from xla_amp.plan_search import Plan, compiled
from xla_amp.stablehlo import io
from xla_amp.stablehlo.passes.autocast import settings
from xla_amp.stablehlo.tools import target_error, targets

TARGET, ROWS, WIDTH = "h100", 512, 1024
SEARCH = {"budget": 0.5, "target": TARGET, "compile_for_target": True}
DRAW = np.random.default_rng(0)
W = (DRAW.normal(size=(WIDTH, WIDTH)) / 32).astype(np.float32)


@pytest.fixture(scope="module")
def kept():
    """One process with the compiler for all tests."""
    if not targets.available(TARGET):
        pytest.skip(f"the compiler for {TARGET} is not installed")

    class Kept(targets.Compilers):
        def __exit__(self, *_):
            pass

    compilers = Kept()
    yield compilers
    compilers.close()


@pytest.fixture
def compilers(kept, monkeypatch):
    monkeypatch.setattr(targets, "Compilers", lambda: kept)
    return kept


def batches():
    return [DRAW.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(3)]


def check(found, by_hand: float) -> None:
    times = found.xla.seconds
    assert set(times) == {"float32", "all low", "plan"}
    assert times["float32"] == pytest.approx(by_hand, rel=0.02)
    assert times["plan"] == times["all low"] < times["float32"]
    assert found.to_dict()["xla"] == {"seconds": times, "why": ""}
    share, by_rates = times["plan"] / times["float32"], found.estimated["plan"] / found.estimated["float32"]
    told = f"the plan takes {share:.2f} of float32's time, by peak rates {by_rates:.2f}"
    assert told in " ".join(str(found).split())


def test_of_a_function_of_jax(compilers):
    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    rows = [(jnp.asarray(W), jnp.asarray(x)) for x in batches()]
    found = xla_amp.jax.search(loss, rows, **SEARCH)
    text = targets.lower(jax.value_and_grad(loss), *rows[0], target=TARGET)
    check(found, compilers.compile(text, TARGET).seconds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_of_a_model_of_torch_which_stays_as_it_is(compilers, where):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.norm = torch.nn.BatchNorm1d(WIDTH)
            self.tied = self.first

        def forward(self, x):
            return self.tied(torch.relu(self.norm(self.first(x)))).square().mean()

    model = Net().to(xla_amp.xla_device() if where == "xla" else "cpu")
    before = {name: (value, value.detach().cpu().clone()) for name, value in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    found = xla_amp.search(model, [torch.from_numpy(x) for x in batches()], **SEARCH)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        assert torch.equal(value.detach().cpu(), before[name][1])
        assert value.grad is None
    assert torch.equal(random, torch.get_rng_state())

    def make_step():
        device = xla_amp.xla_device()
        copy = Net().to(device)
        x = torch.zeros(ROWS, WIDTH).to(device)

        def step():
            copy.zero_grad()
            loss = copy(x)
            loss.backward()
            return loss

        return step

    program = xla_amp.export_for(TARGET, make_step)
    check(found, compilers.compile(program, TARGET, program.compiler_options).seconds)


def test_of_a_module_of_stablehlo(compilers, tmp_path):
    def function(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    samples = [(x, W) for x in batches()]
    text = jax.jit(function).lower(*samples[0]).as_text()
    (path := tmp_path / "step.mlir").write_text(text)
    found = target_error.convert_within(io.load(path), *settings(None, None, None), samples, 0.5, target=TARGET)
    by_hand = [compilers.compile(each, TARGET).seconds for each in (text, found.converted.module)]
    times = found.xla.seconds
    assert [times["float32"], times["plan"]] == pytest.approx(by_hand, rel=1e-6)
    assert times["plan"] == times["all low"] != times["float32"]


def test_why_there_is_no_estimate(monkeypatch):
    def reads(plan):
        raise ValueError("the step\nreads a value")

    plans = {"float32": Plan(), "plan": Plan({"a"})}
    found = compiled(TARGET, plans, reads)
    assert found.seconds == {}
    assert "the program of float32 could not be compiled: ValueError: the step reads a value" in found.why
    monkeypatch.setattr(targets, "available", lambda target: False)
    assert "the compiler for h100 is not installed" in compiled(TARGET, plans, reads).why
    with pytest.raises(SearchError, match="compile_for_target=True needs a target"):
        xla_amp.jax.search(jnp.sum, [(jnp.ones(2),)] * 3, budget=0.1, compile_for_target=True)
    with pytest.raises(SearchError, match="compile_for_target=True needs a target"):
        xla_amp.search(torch.nn.Linear(2, 2), [torch.ones(1, 2)] * 3, budget=0.1, compile_for_target=True)
