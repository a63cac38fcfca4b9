"""monitor: numbers equal those of hooks on the CPU; one executable and no host sync in each step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_amp
from xla_amp.errors import StepError
from xla_amp.testing import counts


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
    return Net(remat)


def batches(count: int):
    made = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 11, (4, 3), generator=made) for _ in "xy") for _ in range(count)]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def trainer(model, parts: int):
    on_cpu = next(model.parameters()).device.type == "cpu"
    optimizer = (torch.optim if on_cpu else xla_amp.syncfree).SGD(model.parameters(), lr=0.1)

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


def expected(model: nn.Module, step) -> tuple[float, dict[str, float]]:
    """Norm of the gradients and largest magnitudes of layers in float64, from hooks on a model on the CPU."""
    largest: dict[str, float] = {}

    def see(path, output):
        if torch._C._current_graph_task_id() == -1:
            largest[path] = max(largest.get(path, 0.0), output.detach().abs().max().item())

    handles = [
        module.register_forward_hook(lambda _m, _a, out, path=path: see(path, out))
        for path, module in model.named_modules()
    ]
    step()
    for handle in handles:
        handle.remove()
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())), largest


@pytest.mark.parametrize(
    ("where", "remat", "parts"), [("xla", True, 2), ("captured", True, 2), ("cpu", True, 2), ("cpu", False, 1)]
)
def test_numbers_are_those_of_hooks_on_the_cpu(where, remat, parts):
    model = net(remat)
    twin = copy.deepcopy(model)
    device = torch.device("cpu") if where == "cpu" else xla_amp.xla_device()
    model.to(device)
    optimizer, step = trainer(model, parts)
    step = xla_amp.compile(step, strict=True) if where == "captured" else step
    _, reference = trainer(twin, parts)
    monitor = xla_amp.monitor(model, optimizer)
    wanted, losses = [], []
    for index in range(4):
        given = [tensor for pair in batches(parts * 4)[index * parts : (index + 1) * parts] for tensor in pair]
        with monitor.step() as running:
            running.loss = step(*[tensor.to(device) for tensor in given])
        wanted.append(expected(twin, lambda given=given: losses.append(float(reference(*given)))))
    found = monitor.read().steps
    monitor.close()
    assert where != "captured" or step.replays
    assert [record.step for record in found] == [0, 1, 2, 3]
    for record, loss, (norm, largest) in zip(found, losses, wanted, strict=True):
        assert record.loss == pytest.approx(loss, rel=1e-6)
        assert record.gradient_norm == pytest.approx(norm, rel=1e-6)
        returned = ["embed", "blocks.0.up", "blocks.0.down", "blocks.0", "blocks", "head", ""]
        assert list(record.largest) == returned, "in order, once"
        assert record.largest == pytest.approx({path: largest[path] for path in record.largest}, rel=1e-6)
        assert (record.nonfinite, record.skipped, record.bad, record.loss_scale) == ((), False, False, None)


@pytest.fixture
def scaled():
    """A model, its optimizer and scaler, its step in float16, and the device."""
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
    monitor = xla_amp.monitor(model, optimizer, scaler)
    given = [tuple(tensor.to(device) for tensor in pair) for pair in batches(24)]

    for part in (given[:12], given[12:]):
        with counts() as seen:
            for x, y in part:
                with monitor.step() as running:
                    running.loss = step(x, y)
    assert (seen.executions, seen.compilations, seen.host_syncs) == (12, 0, 0)
    steps = monitor.read().steps
    monitor.close()
    assert all(record.loss_scale == 1024.0 and not record.skipped for record in steps)
    assert len(steps) == 24


@pytest.fixture
def plain():
    """A model on the CPU, its optimizer, which changes nothing, and their monitor."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, optimizer, xla_amp.monitor(model, optimizer)


def test_a_step_that_raises_does_not_count(plain):
    model, optimizer, monitor = plain
    x, y = batches(1)[0]

    def step():
        with monitor.step() as running:
            running.loss = loss_of(model, x, y)
            running.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    with torch.no_grad():
        before = model.embed.weight.clone()
        model.embed.weight.fill_(1e6)
    with pytest.raises(ValueError, match="no data"), monitor.step():  # noqa: PT012
        model(x)
        raise ValueError("no data")
    with torch.no_grad():
        model.embed.weight.copy_(before)
    model(x * 0)  # outside of a step
    with monitor.step():  # evaluation is no part of a step
        model.eval()
        model(x * 0)
        model.train()
        with torch.no_grad():
            model(x * 0)
    step()
    one, other = monitor.read().steps
    assert (one.step, other.step, one.largest) == (0, 1, other.largest)


def test_a_closure_has_gradients(device):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    monitor = xla_amp.monitor(model, optimizer)
    x = torch.ones(2, 3).to(device)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 3.0).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        with monitor.step() as running:
            running.loss = optimizer.step(closure)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert monitor.read().steps[-1].gradient_norm == pytest.approx(norm, rel=1e-6)
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
        monitor = xla_amp.monitor(model, optimizer, scaler)
        with monitor.step():
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(monitor.read().steps[0].gradient_norm)
        monitor.close()
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)


class _Counting(torch.optim.SGD):
    """One that is not torch's, and counts on the host: a scaler reads whether to call it."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:monitor", "ignore:_Counting keeps state")
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, xla_amp.syncfree.SGD, _Counting])
def test_a_skipped_step_is_recorded_whoever_skips_it(make, capture):
    device = xla_amp.xla_device()
    model = nn.Linear(3, 2).to(device)
    optimizer, scaler = make(model.parameters(), lr=0.1), xla_amp.GradScaler(device.type, init_scale=8.0)
    monitor = xla_amp.monitor(model, optimizer, scaler)

    def train(x):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    train = xla_amp.compile(train) if capture and make is not _Counting else train
    for number in range(6):
        with monitor.step():
            train(torch.full((1, 3), math.inf if number in (1, 4) else 1.0).to(device))
    steps = monitor.read().steps
    assert [step.skipped for step in steps] == [number in (1, 4) for number in range(6)]
    assert [step.loss_scale for step in steps] == [8.0, 8.0, 4.0, 4.0, 4.0, 2.0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    monitor.close()


def test_parameters_without_a_gradient_with_a_sparse_and_with_a_complex_one(recwarn):
    embed, head = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, dtype=torch.complex64)
    model = nn.ModuleDict({"embed": embed, "head": head, "idle": nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = xla_amp.monitor(model, optimizer)
    with monitor.step():
        head(embed(torch.tensor([1, 2])).cfloat()).abs().sum().mul(math.inf).backward()
        optimizer.step()
    assert set(monitor.read().steps[0].nonfinite) == {"embed.weight", "head.weight", "head.bias"}
    assert str(recwarn[0].message).endswith("xla_amp.find_overflow(step, batch) finds the operation")


def test_a_block_with_two_steps_is_an_error(plain):
    model, optimizer, monitor = plain
    with pytest.raises(StepError, match="put one optimizer step"):  # noqa: PT012
        for x, y in batches(2):
            with monitor.step():
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.step()
