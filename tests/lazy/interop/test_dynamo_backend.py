"""`torch.compile` with ``backend="xla_amp"``: the same results, casts and programs as without."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from harness import replaying
from source_tree import ROOT
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.exc import Unsupported

import xla_amp
from xla_amp.lazy.steps import step_marker

# Dynamo's look at the arguments of a function after a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit"),
]


@pytest.fixture(scope="module")
def dynamo_backend():
    """The backend's module, whose import leaves the module hook installed: not for the tests of other files."""
    from xla_amp.lazy.interop import dynamo_backend

    step_marker.keep_hook()
    yield dynamo_backend
    step_marker._process.keeps_hook = False
    step_marker._remove_hook()


@pytest.fixture(autouse=True)
def backend(dynamo_backend):
    torch._dynamo.reset()
    if "xla_amp" not in torch._dynamo.list_backends():  # an installation from before there was an entry point
        registry.register_backend(dynamo_backend.compile_graph, name="xla_amp")
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def compiled(function, fullgraph=True):
    return torch.compile(function, backend="xla_amp", fullgraph=fullgraph)


def test_the_entry_point_is_the_backend(dynamo_backend):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    value = groups["torch_dynamo_backends"]["xla_amp"]
    assert EntryPoint("xla_amp", value, "torch_dynamo_backends").load() is dynamo_backend.compile_graph


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="the name is torch_xla's")
@torch._dynamo.config.patch(error_on_recompile=False)  # torch 2.14 calls all of torch's modules by one wrapper
def test_the_name_of_torch_xla():
    layer = nn.Linear(4, 2).to(xla_amp.xla_device())
    x = torch.randn(3, 4, device=xla_amp.xla_device())
    expected = layer(x)
    assert torch.equal(torch.compile(layer, backend="openxla")(x), expected)
    assert torch.equal(torch.compile(backend="openxla")(layer)(x), expected)
    layer.compile(backend="openxla")
    assert torch.equal(layer(x), expected)


def test_an_operation_that_an_earlier_region_had_a_rule_for(device):
    x = torch.linspace(-1, 1, 6).to(device)
    with xla_amp.autocast(device, rules={"relu6": "fp32"}):
        F.relu6(x)
    with xla_amp.autocast(device):
        assert torch.equal(torch.compile(F.relu6, backend="xla_amp", fullgraph=True)(x), F.relu6(x))


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
def test_a_block_trains_as_uncompiled(device, uncompiled, where):
    parameters, counters = trained(device, lambda f: compiled(f, where == "outside"), where)
    for a, b in zip(parameters, uncompiled, strict=True):
        assert torch.equal(a, b)  # the program is the same
    assert counters["executions"] == 1
    assert counters["compilations"] == counters["host_syncs"] == 0


def test_casts_follow_the_rules_of_each_call(device, low_of):
    run, x = compiled(nn.Linear(4, 4).to(device)), torch.ones(2, 4, device=device)
    for _ in range(2):
        with xla_amp.autocast(device):
            assert run(x).dtype is low_of(device)
        with xla_amp.policy.override({"linear": "fp32"}), xla_amp.autocast(device):
            assert run(x).dtype is torch.float32


@pytest.mark.parametrize("where", ["decorator", "nested", "made by a method", "twice", "torch's"])
def test_regions_inside(device, where, low_of):
    model, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)

    def nested(x):
        with xla_amp.autocast(device), xla_amp.autocast(device, enabled=False):
            return model(x)

    class Net(nn.Module):
        def region(self):
            return xla_amp.autocast(device, dtype=torch.float16, policy="gpu")

        def forward(self, x):
            with self.region():
                return model(x)

    def twice(x):
        region = xla_amp.autocast(device)
        print(end="")  # a graph break between the region and its use
        with region:
            y = model(x)
        print(end="")
        with region:
            return y @ y.mT

    def of_torch(x):
        with torch.autocast("xla", torch.float16):
            return model(x)

    function, expected = {
        "decorator": (xla_amp.autocast(device)(lambda x: model(x)), low_of(device)),
        "nested": (nested, torch.float32),
        "made by a method": (Net(), torch.float16),
        "twice": (twice, low_of(device)),
        "torch's": (of_torch, torch.float16),
    }[where]
    run = compiled(function, where == "torch's")
    for _ in range(2):
        assert run(x).dtype is function(x).dtype is expected
    assert not torch.is_autocast_enabled(x.device.type)


@pytest.mark.parametrize("inner", ["rule", "off"])
def test_the_backward_pass_has_the_casts_of_the_forward_pass(device, inner):
    """As pytorch#179804: not those of the region around the compiled function."""
    model = nn.Linear(16, 16, bias=False).to(device)
    x = torch.randn(4, 16).to(device).requires_grad_()
    rules = {"linear": "fp32"} if inner == "rule" else None

    def function(x):
        with xla_amp.autocast(device, enabled=inner == "rule", rules=rules):
            return model(x)

    with xla_amp.autocast(device, rules=rules):
        y = compiled(function, fullgraph=False)(x)
    (y.square().sum() * 1e-6).backward()
    exact, weight = x.detach().cpu().double().requires_grad_(), model.weight.detach().cpu().double().requires_grad_()
    ((exact @ weight.mT).square().sum() * 1e-6).backward()
    torch.testing.assert_close(x.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(model.weight.grad.cpu().double(), weight.grad, rtol=1e-5, atol=1e-12)


def test_rules_for_modules_are_followed(device, low_of):
    """A graph has no modules, so Python runs them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    seen = []
    model[0].register_forward_hook(lambda module, inputs, result: seen.append(result.dtype))
    run = compiled(model, fullgraph=False)
    with xla_amp.policy.override({"module:0": "fp32"}), xla_amp.autocast(device):
        assert run(torch.ones(2, 4, device=device)).dtype is low_of(device)
    assert seen == [torch.float32]


@pytest.mark.parametrize("entry", ["sync", "captured", "explain", "override", "monitor"])
def test_entry_points_that_have_python_state_end_the_graph(device, entry):
    linear = nn.Linear(4, 4).to(device)
    captured = xla_amp.compile(lambda x: x * 3)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def function(x):
        x = x + 1
        if entry == "sync":
            xla_amp.sync()
            return x * 3, 0
        if entry == "captured":
            return captured(x), 0
        if entry == "explain":
            with xla_amp.explain() as report, xla_amp.autocast(device):
                y = linear(x)
            return y, len(report.records)
        if entry == "override":
            with xla_amp.policy.override({"linear": "fp32"}), xla_amp.autocast(device):
                return linear(x), 0
        monitor = xla_amp.monitor(linear, optimizer)
        y = linear(x)
        monitor.close()
        return y, 0

    x = torch.ones(2, 4, device=device)
    expected = function(x)
    run = compiled(function, fullgraph=False)
    for _ in range(4):
        with torch._dynamo.config.patch(error_on_recompile=False):  # a monitor's hooks
            result = run(x)
        assert torch.equal(result[0].cpu(), expected[0].cpu())
        assert result[0].dtype is expected[0].dtype
        assert result[1] == expected[1]
    assert not xla_amp.common.events.decided.listeners
    if entry == "captured":
        assert captured.replays > 0


@torch._dynamo.config.patch(error_on_recompile=False)
def test_a_captured_step_runs_a_compiled_module(device):
    model, x = nn.Dropout(0.5).to(device), torch.ones(64, device=device)
    with pytest.raises(Unsupported, match="leave out fullgraph=True"):
        xla_amp.compile(compiled(model))(x)
    step = replaying(compiled(model, fullgraph=False), x)
    model.eval()
    assert torch.equal(step(x), x)


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
