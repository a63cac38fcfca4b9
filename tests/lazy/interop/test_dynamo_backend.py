"""`torch.compile` with ``backend="xla_amp"``: the same results and casts, one recorded graph for each direction."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.nn.functional as F
from source_tree import ROOT
from torch import nn
from torch._dynamo.backends import registry
from torch.utils.checkpoint import checkpoint

import xla_amp
from xla_amp.lazy.interop import recorded_graph
from xla_amp.lazy.steps import step_marker


@pytest.fixture(autouse=True, scope="module")
def hook():
    """The backend leaves the module hook installed: not for the tests of other files."""
    from xla_amp.lazy.interop import dynamo_backend  # noqa: F401

    step_marker.keep_hook()
    yield
    step_marker._kept = False
    if step_marker._forward_hook is not None:
        step_marker._forward_hook.remove()
        step_marker._forward_hook = None


@pytest.fixture(autouse=True)
def backend():
    from xla_amp.lazy.interop import dynamo_backend

    torch._dynamo.reset()
    if "xla_amp" not in torch._dynamo.list_backends():  # an installation from before there was an entry point
        registry.register_backend(dynamo_backend.compile_graph, name="xla_amp")
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture
def made(monkeypatch):
    """Grows by an item for each graph that is recorded."""
    found = []
    record = recorded_graph._record

    def counted(*args):
        result = record(*args)
        found.append(result[1] is not None)
        return result

    monkeypatch.setattr(recorded_graph, "_record", counted)
    return found


def compiled(function, fullgraph=True):
    return torch.compile(function, backend="xla_amp", fullgraph=fullgraph)


def test_the_entry_point_is_the_backend():
    from xla_amp.lazy.interop import dynamo_backend

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    value = groups["torch_dynamo_backends"]["xla_amp"]
    assert EntryPoint("xla_amp", value, "torch_dynamo_backends").load() is dynamo_backend.compile_graph


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, time, 2, width // 2).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(x)


STEPS = 3


def trained(device, wrap, where):
    """Parameters after a few steps, and the counters of the last one."""
    torch.manual_seed(0)
    model = Block().to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), 0.1)

    def inside(x):
        with xla_amp.autocast(device):
            return model(x)

    function = wrap(inside if where == "inside" else model)
    for step in range(STEPS):
        if step == STEPS - 1:
            xla_amp.sync()
            xla_amp.metrics.reset()
        x = torch.randn(2, 4, 8).to(device)
        with xla_amp.autocast(device, enabled=where == "outside"):
            loss = function(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    xla_amp.sync()
    counters = xla_amp.metrics()
    return [p.detach().cpu() for p in model.parameters()], counters


@pytest.fixture(scope="module")
def uncompiled(_device):
    return trained(_device, lambda f: f, "outside")[0]


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_block_trains_as_uncompiled(device, uncompiled, made, where):
    parameters, counters = trained(device, compiled, where)
    for a, b in zip(parameters, uncompiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert made == [True, True]  # forward and backward; the other steps append what was recorded
    assert counters["executions"] == 1
    assert counters["compilations"] == counters["host_syncs"] == 0


def test_a_compiled_graph_begins_a_training_step(device):
    """As a module does, so that a collective after it is part of the step."""
    weight = torch.ones(2, device=device, requires_grad=True)
    xla_amp.sync()
    assert not step_marker.is_open()
    compiled(lambda x: (x * weight).sum())(torch.ones(2, device=device))
    assert step_marker.is_open()


def test_buffers_are_updated_and_evaluation_is_another_graph(device):
    x, results = torch.randn(4, 3), []
    for wrap in (compiled, lambda f: f):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
        function = wrap(model)
        for _ in range(2):
            function(x.to(device)).sum().backward()
        model.eval()
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=False):
            results.append([function(x.to(device)).cpu(), *(b.cpu() for b in model.buffers())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointed_dropout_is_the_same_in_both_passes(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to(device)
    x, gradients = torch.randn(8, 4).to(device), []
    for wrap in (compiled, lambda f: f):
        torch.manual_seed(3)
        model.zero_grad()
        wrap(lambda x: checkpoint(model, x, use_reentrant=False))(x).square().sum().backward()
        gradients.append(model[0].weight.grad.cpu())
    torch.testing.assert_close(*gradients)


def mutating(x, y):
    x.add_(1)
    y[0] = x.sum()
    return x * y, x[1:], y.view(-1)


def test_overwritten_arguments_and_views(device):
    ours = torch.zeros(3, device=device), torch.ones(3, device=device)
    theirs = torch.zeros(3), torch.ones(3)
    function = compiled(mutating)
    for _ in range(3):
        _, part, whole = function(*ours)
        expected = mutating(*theirs)
        for views in ((part, whole), expected[1:]):
            views[0].mul_(2)
            views[1].add_(1)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b)


def test_arguments_of_any_geometry(device, made):
    def function(x):
        return (x * 2).sum(0) + x[0]

    run, base = compiled(function), torch.arange(12.0).reshape(3, 4).to(device)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for x in (base, base.t(), base[1:], base[:, 1:3], base.t()):
            torch.testing.assert_close(run(x).cpu(), function(x.cpu()))
    assert made.count(True) == 4


def test_sizes_and_numbers_that_change(device):
    model = nn.Linear(4, 4).to(device)
    run = compiled(lambda x, factor: model(x) * factor)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (2, 3, 5):
            x = torch.randn(rows, 4).to(device)
            torch.testing.assert_close(run(x, 0.5 * rows).cpu(), (model(x) * 0.5 * rows).cpu())


def test_a_graph_break_reads_the_value(device):
    def function(x):
        y = x * 2
        if y.sum() > 0:
            y = y + 1
        return y * 3

    x = torch.ones(2, device=device)
    assert compiled(function, fullgraph=False)(x).tolist() == [9.0, 9.0]


def casts(device, function, argument=None):
    return function(torch.ones(2, 4, device=device) if argument is None else argument).dtype


def test_casts_follow_the_rules_of_each_call(device):
    model = nn.Linear(4, 4).to(device)
    run = compiled(model)
    for _ in range(2):
        with xla_amp.autocast(device):
            assert casts(device, run) is torch.bfloat16
        with xla_amp.policy.override({"linear": "fp32"}), xla_amp.autocast(device):
            assert casts(device, run) is torch.float32


@pytest.mark.parametrize("where", ["decorator", "nested", "made outside", "own policy", "cpu"])
def test_regions_inside(device, where):
    kind = "cpu" if where == "cpu" else device
    model, x = nn.Linear(4, 4).to(kind), torch.ones(2, 4, device=kind)
    outside = xla_amp.autocast(device)

    def nested(x):
        with xla_amp.autocast(device), xla_amp.autocast(device, enabled=False):
            return model(x)

    def made_outside(x):
        with outside:
            return model(x)

    def own_policy(x):
        with xla_amp.autocast(device, policy="gpu"):
            return model(x)

    def on_cpu(x):
        with xla_amp.autocast("cpu"):
            return model(x)

    function, full, expected = {
        "decorator": (xla_amp.autocast(device)(lambda x: model(x)), True, torch.bfloat16),
        "nested": (nested, True, torch.float32),
        "made outside": (made_outside, False, torch.bfloat16),
        "own policy": (own_policy, False, torch.float16),
        "cpu": (on_cpu, True, torch.bfloat16),
    }[where]
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if where == "cpu" else compiled(function, full)
    assert run(x).dtype is function(x).dtype is expected
    assert not torch.is_autocast_enabled(x.device.type)


def test_rules_for_modules_are_refused(device):
    model = nn.Sequential(nn.Linear(4, 4)).to(device)
    with (
        pytest.raises(Exception, match="rules for modules, and a compiled graph"),
        xla_amp.policy.override(module="0", cast="fp32"),
        xla_amp.autocast(device),
    ):
        casts(device, compiled(lambda x: model(x)))


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        ({"backend": "xla_amp", "mode": "max-autotune"}, "jax", "mode='max-autotune'.*neither mode nor options"),
        ({"backend": "xla_amp"}, "cpu", "expected a model on the device 'jax', got parameters on cpu"),
        ({}, "jax", "inductor.*no code for the device 'jax'.*backend='xla_amp'"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's imports
def test_errors_say_what_to_type(device, options, where, message):
    model = nn.Linear(2, 2).to(where)
    with pytest.raises(Exception, match=f"(?s){message}"):
        torch.compile(model, **options)(torch.ones(1, 2, device=where))
