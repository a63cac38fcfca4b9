"""monitor: statistics equal those of hooks on the CPU; one executable and no host sync in each step."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_amp
from xla_amp.common.types import RANGES, VALUE_KINDS
from xla_amp.tools.monitor.history import Statistics, Sums, ValueKey
from xla_amp.tools.monitor.on_pytorch.columns import LayerError
from xla_amp.tools.monitor.on_pytorch.running_step import StepCountError
from xla_amp.tools.monitor.on_pytorch.statistics import tensor_sums

TINY = 2.0**-26  # float16 rounds it to zero


class Block(nn.Module):
    def __init__(self, remat: bool) -> None:
        super().__init__()
        self.up, self.down, self.remat = nn.Linear(6, 12), nn.Linear(12, 6), remat

    def body(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.remat else self.body(x))


class Net(nn.Module):
    def __init__(self, remat: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(Block(remat))
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def net(remat: bool = False) -> Net:
    torch.manual_seed(3)
    model = Net(remat)
    with torch.no_grad():
        model.embed.weight[0] = torch.tensor([TINY, -TINY, 0.0, 2.0, 1e-3, TINY / 4])
    return model


def batches(count: int):
    made = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 11, (4, 3), generator=made) for _ in "xy") for _ in range(count)]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def expected(model: nn.Module, optimizer, step) -> dict[ValueKey, dict[str, float]]:
    """The definitions in float64, from hooks on a model on the CPU."""
    values: dict[ValueKey, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _m, _a, out, path=path: (
                None
                if torch._C._current_graph_task_id() != -1
                else values.setdefault(ValueKey(path, "activation"), []).append(out.detach().clone())
            )
        )
        for path, module in model.named_modules()
    ]
    owners = {path: list(m.parameters(recurse=False)) for path, m in model.named_modules()}
    owners = {path: own for path, own in owners.items() if own}
    before = {path: [p.detach().clone() for p in own] for path, own in owners.items()}
    step()
    for handle in handles:
        handle.remove()
    for path, own in owners.items():
        values[ValueKey(path, "gradient")] = [p.grad for p in own]
        values[ValueKey(path, "weight")] = before[path]
        values[ValueKey(path, "update")] = [p.detach() - old for p, old in zip(own, before[path], strict=True)]
    found = {}
    for key, tensors in values.items():
        x = torch.cat([each.flatten() for each in tensors]).double()
        nonzero = x != 0
        found[key] = {
            "amax": x.abs().max().item(),
            "rms": x.square().mean().sqrt().item(),
            "underflow": (nonzero & (x.half() == 0)).sum().item() / max(nonzero.sum().item(), 1),
        }
    return found


def trainer(model, parts: int):
    optimizer = (
        xla_amp.syncfree.SGD(model.parameters(), lr=0.1)
        if next(model.parameters()).device.type != "cpu"
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )

    def step(*given):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(given[::2], given[1::2], strict=True):
            loss = loss_of(model, x, y) / parts
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return optimizer, step


@pytest.mark.parametrize(
    ("where", "remat", "parts"),
    [("xla", True, 2), ("captured", True, 2), ("cpu", True, 2), ("cpu", False, 1)],
)
def test_statistics_are_those_of_hooks_on_the_cpu(where, remat, parts):
    model = net(remat)
    twin = copy.deepcopy(model)
    device = torch.device("cpu") if where == "cpu" else xla_amp.xla_device()
    model.to(device)
    optimizer, step = trainer(model, parts)
    step = xla_amp.compile(step, strict=True) if where == "captured" else step
    _, reference = trainer(twin, parts)
    monitor = xla_amp.monitor(model, optimizer, sample=1, low="float16")
    wanted, losses = [], []
    for index in range(4):
        given = [tensor for pair in batches(parts * 4)[index * parts : (index + 1) * parts] for tensor in pair]
        with monitor.step(*given) as running:
            running.loss = step(*[tensor.to(device) for tensor in given])
        wanted.append(expected(twin, None, lambda given=given: losses.append(float(reference(*given)))))
    found = monitor.read().steps
    monitor.close()
    assert [record.step for record in found] == [0, 1, 2, 3]
    if where == "captured":
        assert step.replays
    for record, loss, reference_values in zip(found, losses, wanted, strict=True):
        assert record.loss == pytest.approx(loss, rel=1e-6)
        assert set(record.statistics) | {ValueKey("blocks", "activation"), ValueKey("", "activation")} == set(
            reference_values
        )
        squares = 0.0
        for key, row in record.statistics.items():
            want = reference_values[key]
            rounding = 0.0
            if key.kind == "update":  # the difference of two weights, each rounded to float32
                rounding = 2**-23 * reference_values[ValueKey(key.layer, "weight")]["amax"]
            assert row.amax == pytest.approx(want["amax"], rel=1e-6, abs=rounding), key
            assert row.rms == pytest.approx(want["rms"], rel=1e-6), key
            assert row.underflow == pytest.approx(want["underflow"], abs=1e-9), key
            assert row.headroom == pytest.approx(math.log2(65504 / row.amax), abs=1e-5)
            if key.kind == "update":
                weight = reference_values[ValueKey(key.layer, "weight")]["rms"]
                assert row.update_ratio == pytest.approx(want["rms"] / weight, rel=1e-6)
            if key.kind == "gradient":
                size = sum(p.numel() for p in model.get_submodule(key.layer).parameters(recurse=False))
                squares += row.rms**2 * size
        assert record.gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert found[0].statistics[ValueKey("embed", "weight")].underflow > 0


@pytest.mark.parametrize("shape", [(1 << 20,), (1000, 1027)], ids=str)
@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_sums_of_many_values_are_as_exact(where, shape):
    """Long sums in float32 lose digits unless they run in blocks; equal terms are the worst, their errors add up."""
    device = torch.device("cpu") if where == "cpu" else xla_amp.xla_device()
    made = torch.Generator().manual_seed(0)
    tensors = [torch.full(shape, 0.1), torch.randn(shape, generator=made)]
    found = tensor_sums([tensor.to(device) for tensor in tensors], [0, 1], RANGES["float16"].zero)
    for row, tensor in zip(found.tolist(), tensors, strict=True):
        rms = Statistics.of(Sums(*row), "float16").rms
        assert rms == pytest.approx(tensor.double().square().mean().sqrt().item(), rel=1e-6)
        assert row[-1] == tensor.numel()


@pytest.fixture
def scaled():
    """A model, its step in float16 with a scaler, and the device."""
    device = xla_amp.xla_device()
    model = net().to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return model, optimizer, scaler, step, device


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_is_one_executable_without_a_host_sync(scaled, captured):
    model, optimizer, scaler, step, device = scaled
    step = xla_amp.compile(step, strict=True) if captured else step
    monitor = xla_amp.monitor(model, optimizer, scaler, sample=2)
    given = [tuple(tensor.to(device) for tensor in pair) for pair in batches(24)]

    def run(pairs):
        before = xla_amp.metrics()
        for x, y in pairs:
            with monitor.step(x, y) as running:
                running.loss = step(x, y)
        after = xla_amp.metrics()
        return {name: after[name] - before[name] for name in ("executions", "compilations", "host_syncs")}

    assert run(given[:12])["compilations"] <= 2  # with statistics and without
    assert run(given[12:]) == {"executions": 12, "compilations": 0, "host_syncs": 0}
    steps = monitor.read().steps
    monitor.close()
    assert [bool(record.statistics) for record in steps] == [True, False] * 12
    assert all(record.loss_scale == 1024.0 and not record.skipped for record in steps)
    assert monitor.history.low == "float16"
    gradient = steps[0].statistics[ValueKey("head", "gradient")]
    assert gradient.headroom == pytest.approx(math.log2(65504 / (gradient.amax * 1024)))


def test_monitors_that_begin_after_captured_steps(scaled):
    """Two of them, of one model, each with its own sampled steps; a saved or copied model is not recorded."""
    model, optimizer, scaler, step, device = scaled
    step = xla_amp.compile(step, strict=True)
    given = [tuple(tensor.to(device) for tensor in pair) for pair in batches(12)]
    for pair in given[:3]:
        step(*pair)
    one = xla_amp.monitor(model, optimizer, scaler, sample=2)
    other = xla_amp.monitor(model, optimizer, scaler, sample=3, layers="head")
    for pair in given[3:]:
        with one.step(), other.step():
            step(*pair)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model.cpu()))]
    for each in copies:
        each.cpu().train()(given[0][0].cpu()).sum().backward()
    found = [monitor.read().steps for monitor in (one, other)]
    assert [[record.step for record in steps if record.statistics] for steps in found] == [[0, 2, 4, 6, 8], [0, 3, 6]]
    assert {key.layer for key in found[1][0].statistics} == {"head"}
    for monitor in (one, other):
        monitor.close()
    assert not [name for name in vars(model) if "xla_amp" in name]


def test_a_step_that_raises_does_not_count():
    def run(fails):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = xla_amp.monitor(model, optimizer, sample=1)
        if fails:
            with pytest.raises(ValueError, match="no data"), monitor.step():  # noqa: PT012
                model(batches(1)[0][0] * 0 + 3)
                raise ValueError("no data")
        model(batches(1)[0][0] * 0) if fails else None  # outside of a step
        with monitor.step() as running:
            running.loss = loss_of(model, *batches(1)[0])
            running.loss.backward()
            optimizer.step()
        return monitor.read().steps

    with_failure, without = run(True), run(False)
    assert [record.step for record in with_failure] == [0]
    assert repr(with_failure) == repr(without)


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_a_closure_has_gradients(where):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to("cpu" if where == "cpu" else xla_amp.xla_device())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    monitor = xla_amp.monitor(model, optimizer, sample=1)
    x = torch.ones(2, 3).to(model.weight.device)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 3.0).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        with monitor.step(x) as running:
            running.loss = optimizer.step(closure)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert monitor.read().steps[-1].gradient_norm == pytest.approx(norm, rel=1e-6)
    gradient = monitor.history.steps[0].statistics[ValueKey("", "gradient")]
    assert gradient.amax > 0
    monitor.close()


def test_gradients_are_unscaled_whoever_unscales_them(scaled):
    model, _, scaler, _, device = scaled
    x, y = (tensor.to(device) for tensor in batches(1)[0])
    found = []
    for optimizer in (
        xla_amp.syncfree.SGD(model.parameters(), lr=0.0),
        torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
        xla_amp.syncfree.wrap(torch.optim.Adagrad(model.parameters(), lr=0.0)),
    ):
        monitor = xla_amp.monitor(model, optimizer, scaler, sample=1)
        with monitor.step():
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        [record] = monitor.read().steps
        monitor.close()
        found.append((record.gradient_norm, record.statistics[ValueKey("head", "gradient")].amax))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_layers_and_kinds_are_selected():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    monitor = xla_amp.monitor(model, optimizer, layers="*.up", kinds=["weight", "activation"], sample=1)
    model(batches(1)[0][0]).sum().backward()
    optimizer.step()
    [record] = monitor.read().steps
    assert set(record.statistics) == {ValueKey("blocks.0.up", kind) for kind in ("activation", "weight")}
    assert record.gradient_norm > 0
    monitor.close()
    assert not model._forward_hooks
    with pytest.raises(LayerError, match=r"'\*\.upp'.*nearest module: blocks\.0\.up"):
        xla_amp.monitor(model, optimizer, layers=["*.up", "*.upp"])


def test_evaluation_is_no_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    monitor = xla_amp.monitor(model, optimizer, sample=1)
    x, y = batches(1)[0]
    model.eval()
    model(x * 0)
    model.train()
    with torch.no_grad():
        model(x * 0)
    with monitor.step(x, y):
        loss_of(model, x, y).backward()
        optimizer.step()
    [record] = monitor.read().steps
    want = model.embed.weight[x].abs().max().item()
    assert record.statistics[ValueKey("embed", "activation")].amax == pytest.approx(want, rel=1e-2)


def test_without_an_optimizer_each_forward_pass_is_a_step():
    model = net()
    monitor = xla_amp.monitor(model, sample=1)
    for x, _ in batches(3):
        model(x)
    steps = monitor.read().steps
    assert [record.step for record in steps] == [0, 1, 2]
    assert {key.kind for key in steps[0].statistics} == {"activation"}
    assert steps[0].gradient_norm is None


def test_torchs_scaler_on_the_cpu_shows_its_skips():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = xla_amp.monitor(model, optimizer, scaler, sample=1)
    for index, (x, y) in enumerate(batches(3)):
        with monitor.step(x, y):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y) * (math.inf if index == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [record.skipped for record in monitor.read().steps] == [False, True, False]


def test_a_block_with_two_steps_is_an_error():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    monitor = xla_amp.monitor(model, optimizer)
    with pytest.raises(StepCountError, match="one optimizer step"):  # noqa: PT012
        for x, y in batches(2):
            with monitor.step(x, y):
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.step()


@pytest.mark.parametrize(
    "wrong",
    [{"sample": 0}, {"history": True}, {"sample": 1.5}, {"kinds": ["weights"]}, {"low": "fp16"}, {"save_state": True}],
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        xla_amp.monitor(net(), **wrong)


def test_ranges_are_torchs():
    for name, (largest, zero) in RANGES.items():
        info = torch.finfo(getattr(torch, name))
        assert largest == info.max
        if name not in ("float64", "complex128"):
            name = {"complex64": "float32"}.get(name, name)
            double = torch.tensor([zero, zero * 1.001], dtype=torch.float64)
            assert (double.to(getattr(torch, name)) != 0).tolist() == [False, True]
    assert VALUE_KINDS == ("activation", "gradient", "weight", "update")
