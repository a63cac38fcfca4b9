"""DeviceLoader: batches ahead on the device, steps ended, threads gone when they should be."""

from __future__ import annotations

import gc
import threading
import time
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import xla_amp
from xla_amp import DeviceLoader

Batch = namedtuple("Batch", ["x", "y"])


def numbers(count, started=None):
    for number in range(count):
        if started is not None:
            started.append(number)
        yield torch.full((2,), float(number))


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "xla_amp-loader"]


@pytest.fixture(autouse=True)
def _threads_end():
    yield
    if threads():
        gc.collect()
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []


@pytest.fixture(params=["cpu", "xla"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else xla_amp.xla_device()


def test_batches_in_order_on_the_device(device):
    batches = list(DeviceLoader(numbers(5), device))
    assert [batch.tolist() for batch in batches] == [[float(n)] * 2 for n in range(5)]
    assert {batch.device for batch in batches} == {torch.ones((), device=device).device}


def test_the_device_defaults_to_xla():
    (batch,) = DeviceLoader([torch.ones(2)])
    assert batch.device == xla_amp.xla_device()


def test_pytrees(device):
    source = {"pair": Batch(torch.ones(2), "text"), "list": [torch.arange(3), None, 4]}
    (batch,) = DeviceLoader([source], device)
    assert isinstance(batch["pair"], Batch)
    assert batch["pair"].x.device.type == device.type
    assert batch["pair"].y == "text"
    assert batch["list"][0].tolist() == [0, 1, 2]
    assert batch["list"][1:] == [None, 4]


def test_a_dataloader_several_times(device):
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    loader = DeviceLoader(DataLoader(data, 2), device)
    assert len(loader) == 3
    for _ in range(2):
        assert [(x.tolist(), y.tolist()) for x, y in loader] == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]


def test_it_stays_no_further_ahead_than_asked(device):
    started = []
    batches = iter(DeviceLoader(numbers(20, started), device, prefetch=3))
    next(batches)
    time.sleep(0.2)
    # one in use, three waiting, one in the thread's hands
    assert len(started) == 5
    assert list(batches)[-1].tolist() == [19.0, 19.0]


def test_an_exception_comes_with_its_traceback(device):
    def broken():
        yield torch.ones(2)
        raise LookupError("in the data")

    batches = iter(DeviceLoader(broken(), device))
    next(batches)
    with pytest.raises(LookupError, match="in the data") as caught:
        next(batches)
    assert "broken" in [entry.name for entry in caught.traceback]
    with pytest.raises(StopIteration):
        next(batches)


def test_leaving_early_ends_the_thread(device):
    for _ in DeviceLoader(numbers(1000), device):
        break


def test_an_exception_in_the_loop_ends_the_thread(device):
    def loop():
        for batch in DeviceLoader(numbers(1000), device):
            raise KeyError(batch.shape)

    with pytest.raises(KeyError):
        loop()


def test_close(device):
    loader = DeviceLoader(numbers(1000), device)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert threads() == []
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("prefetch", [0, -1, 1.5, True])
def test_prefetch_out_of_range(prefetch):
    with pytest.raises(ValueError, match="expected a number of batches, 1 or more"):
        DeviceLoader([], prefetch=prefetch)


def test_what_is_no_device():
    with pytest.raises(ValueError, match=r"DeviceLoader\(3.5\): expected a device"):
        DeviceLoader([], 3.5)


def test_each_batch_ends_the_step():
    xla_amp.xla_device()
    state = torch.zeros(2, device="jax")
    xla_amp.sync()
    before = xla_amp.metrics()["executions"]
    for batch in DeviceLoader(numbers(4)):
        state = state + batch
    assert xla_amp.metrics()["executions"] - before == 4  # nothing but the recording of each batch
    assert state.tolist() == [6.0, 6.0]
