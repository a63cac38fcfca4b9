"""monitor: operands of 8-bit products on the lazy device, against the monitor of JAX, and within one executable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_amp
import xla_amp.jax
from xla_amp.errors import DeviceError
from xla_amp.recorder.history import FLOAT8_KINDS, KINDS, Key

ROWS, WIDTH = 32, 64
FOUND = {Key(layer, kind) for layer in ("up", "down") for kind in FLOAT8_KINDS}


class Net(nn.Module):
    def __init__(self, remat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab")
        self.remat = remat

    def body(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.remat else self.body(x)


def wide(seed: int, *shape: int) -> torch.Tensor:
    """Magnitudes over 2**40, of which many become zero in 8 bits."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made) * torch.exp2(-40 * torch.rand(shape, generator=made))


def made(cast="fp8", remat=False):
    """A model, its optimizer, and a step of micro-batches in 8 bits."""
    model = Net(remat).to(device := xla_amp.xla_device())
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.0)

    def step(*pairs):
        optimizer.zero_grad()
        for x, g in zip(pairs[::2], pairs[1::2], strict=True):
            with xla_amp.autocast(device, dtype=torch.bfloat16, rules={"linear": cast}):
                loss = (model(x.requires_grad_()) * g).sum()
                loss.backward()  # in the region, whose rules checkpointing needs again
        optimizer.step()
        return loss

    return model, optimizer, step, device


@pytest.mark.parametrize("cast", ["fp8", "mxfp8"])
def test_rows_are_those_of_the_monitor_of_jax(cast):
    model, optimizer, step, device = made(cast)
    x, g = wide(1, ROWS, WIDTH), wide(2, ROWS, WIDTH)
    weights = {name: jnp.asarray(getattr(model, name).weight.detach().cpu().numpy()) for name in ("up", "down")}

    @jax.jit
    def same(weights, x, g):
        def layer(name, x):
            with jax.named_scope(name):
                return x @ weights[name].T

        def loss(x):
            def forward(x):
                return layer("down", jnp.tanh(layer("up", x)))

            y = xla_amp.jax.autocast(forward, dtype="bfloat16", rules={"matmul": cast, "tanh": "low"})(x)
            return jnp.sum(y * g)

        return jax.grad(loss)(x)

    watched = xla_amp.jax.monitor(same, kinds=FLOAT8_KINDS, sample=1)
    watched(weights, jnp.asarray(x.numpy()), jnp.asarray(g.numpy()))
    [wanted] = watched.read().steps
    monitor = xla_amp.monitor(model, optimizer, kinds=FLOAT8_KINDS, sample=1)
    with monitor.step():
        step(x.to(device), g.to(device))
    [found] = monitor.read().steps
    monitor.close()
    rows, others = found.statistics, wanted.statistics
    assert set(rows) == set(others)
    assert set(rows) >= {Key(layer, "float8_e4m3fn") for layer in ("up", "down")}
    assert any(row.underflow > 0 for row in rows.values())
    for key, row in rows.items():
        assert row.amax == pytest.approx(others[key].amax, rel=2**-7), key
        assert row.headroom == pytest.approx(others[key].headroom, abs=2**-6), key
        assert row.rms == pytest.approx(others[key].rms, rel=1e-2), key
        assert row.underflow == pytest.approx(others[key].underflow, abs=1e-3), key


@pytest.mark.parametrize("form", ["captured", "checkpoint"])
def test_a_step_stays_one_executable_and_micro_batches_count_together(form):
    model, optimizer, step, device = made(remat=form == "checkpoint")
    step = xla_amp.compile(step, strict=True) if form == "captured" else step
    pairs = [[wide(seed + n, ROWS, WIDTH).to(device) for n in range(4)] for seed in range(10)]
    monitor = xla_amp.monitor(model, optimizer, kinds=FLOAT8_KINDS, sample=2, every=3)

    def run(pairs):
        before = xla_amp.metrics()
        for each in pairs:
            with monitor.step():
                step(*each)
        after = xla_amp.metrics()
        return {name: after[name] - before[name] for name in ("executions", "compilations", "host_syncs")}

    first = run(pairs[:6])
    assert first["compilations"] <= 2  # with statistics and without
    assert run(pairs[6:]) == {"executions": 4, "compilations": 0, "host_syncs": 0}
    steps = monitor.read().steps
    monitor.close()
    for record, (x, _, y, _) in zip(steps, pairs, strict=True):
        assert set(record.statistics) == (set() if record.step % 2 else FOUND)
        if record.statistics:
            weight = float(model.up.weight.detach().abs().max())
            largest = max(float(each.detach().abs().max()) for each in (x, y))
            amax = record.statistics[Key("up", "float8_e4m3fn")].amax
            assert amax == pytest.approx(max(weight, largest), rel=2**-8)


def test_sums_count_each_operand_once(monkeypatch):
    """Forward both operands; backward the weight again, and the gradient; nothing of a part that runs again."""
    sizes = {}
    for remat in (False, True):
        model, optimizer, step, device = made(remat=remat)
        monitor = xla_amp.monitor(model, optimizer, kinds=FLOAT8_KINDS, sample=1)
        seen = []
        begin = monitor._recording._float8.begin_step
        monkeypatch.setattr(
            monitor._recording._float8,
            "begin_step",
            lambda seen=seen, monitor=monitor, begin=begin: (
                seen.append({k: v.clone() for k, v in monitor._recording._float8.sums.items()}),
                begin(),
            ),
        )
        with monitor.step():
            step(wide(1, ROWS, WIDTH).to(device), wide(2, ROWS, WIDTH).to(device))
        assert {key.kind for key in monitor.read().steps[0].statistics} == set(FLOAT8_KINDS)
        sizes[remat] = {key: float(row[0, -1]) for key, row in seen[0].items()}
        monitor.close()
    of_e4m3, of_e5m2 = ROWS * WIDTH + 2 * WIDTH * WIDTH, ROWS * WIDTH
    assert sizes[False] == {key: of_e4m3 if key.kind == "float8_e4m3fn" else of_e5m2 for key in FOUND}
    assert sizes[True] == sizes[False]


def test_what_is_selected_is_recorded_and_nothing_else():
    model, optimizer, step, device = made()
    other = Net().to(device)
    x = torch.ones(ROWS, WIDTH, device=device)
    monitor = xla_amp.monitor(model, optimizer, layers="up", sample=1)
    forward = xla_amp.monitor(model, sample=1)  # a forward pass is a step
    without = xla_amp.monitor(model, optimizer, kinds=["weight"], sample=1)
    with monitor.step(), forward.step(), without.step():
        with xla_amp.autocast(device, dtype=torch.bfloat16, rules={"linear": "fp8"}):
            other(x)  # another model's products
        step(x, x)
    [record] = monitor.read().steps
    assert {key for key in record.statistics if key.kind in FLOAT8_KINDS} == {Key("up", kind) for kind in FLOAT8_KINDS}
    [record] = forward.read().steps
    found = {key for key in record.statistics if key.kind in FLOAT8_KINDS}
    assert found == {key for key in FOUND if key.kind == "float8_e4m3fn"}
    assert {key.kind for key in without.read().steps[0].statistics} == {"weight"}
    for each in (monitor, forward, without):
        each.close()


def test_devices_without_8_bit_products_say_so():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DeviceError, match=r"float8_e5m2: the model is on 'cpu', which has no products in 8 bits"):
        xla_amp.monitor(model, optimizer, kinds=["weight", "float8_e5m2"])
    with pytest.raises(ValueError, match=r"unknown \['float8_e3m4'\]; expected some of .*'float8_e5m2'"):
        xla_amp.monitor(model, optimizer, kinds=["float8_e3m4"])
    monitor = xla_amp.monitor(model, optimizer)
    assert set(monitor._options.kinds) == set(KINDS)
    monitor.close()
