"""Functions of the lazy device alone raise on torch_xla; tools of every device work."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import xla_amp
import xla_amp.jax
from xla_amp.errors import EngineError


def double(x):
    return x * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: xla_amp.compile(double)(x), r"compile\(\) .* use torch_xla.compile there, or set XLA_AMP_ENGINE"),
        (lambda x: xla_amp.export(double, x), r"export\(\) works only on the lazy device 'jax'"),
        (lambda x: xla_amp.launch(double, 2), r"launch\(\) works .* use torch_xla.launch there"),
        (lambda x: xla_amp.make_mesh(), r"make_mesh\(\) works .* use torch_xla.distributed.spmd.Mesh there"),
        (lambda x: xla_amp.mark_sharding(x, None, ()), r"mark_sharding\(\) works .* use torch_xla.*mark_sharding"),
        (lambda x: xla_amp.jax.functional(nn.Linear(2, 2)), r"functional\(\) works only on the lazy device"),
        (lambda x: xla_amp.jax.torch_function(jnp.sin)(x), r"torch_function\(\) works .* use torch_xla.*call_jax"),
    ],
    ids=lambda value: value.split("(")[0].rstrip("\\") if isinstance(value, str) else "",
)
def test_what_torch_xla_has_not(call, words):
    with pytest.raises(EngineError, match=words):
        call(torch.ones(2).to("xla"))


def test_memory_that_torch_xla_does_not_count():
    with pytest.raises(xla_amp.errors.DeviceError, match="XLA does not count memory on the platform 'cpu'"):
        xla_amp.xla_model.get_memory_info()


BAD = 3


def test_monitor_names_a_bad_step_and_find_overflow_finds_its_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).to("xla")
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1)
    scaler = xla_amp.GradScaler(init_scale=8.0)
    seeded = {"generator": torch.Generator().manual_seed(1)}
    batches = [(torch.randn(8, 6, **seeded), torch.randint(4, (8,), **seeded)) for _ in range(BAD + 3)]
    batches[BAD][0][5] *= 1e6

    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast("xla", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    recorder = xla_amp.monitor(model, optimizer, scaler)
    with pytest.warns(UserWarning, match=f"step {BAD} is bad: .*the first layer with an inf or NaN is 0"):  # noqa: PT031
        for x, y in batches:
            moved = x.to("xla"), y.to("xla")
            with recorder.step() as running:
                running.loss = step(*moved)
            xla_amp.sync()
        found = recorder.read()
    assert found.of("skipped") == [number == BAD for number in range(BAD + 3)]
    recorder.close()
    report = xla_amp.find_overflow(step, *[tensor.to("xla") for tensor in batches[BAD]])
    assert report.scale == 4.0
    assert report.first.place.module == "0"
