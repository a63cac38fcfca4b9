"""DeviceLoader: batches ahead on the device, steps ended, threads gone when they should be."""

from __future__ import annotations

import gc
import threading
import time
from collections import UserDict, namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import xla_amp
from xla_amp import DeviceLoader, pad_batch
from xla_amp.testing import counts

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


def test_batches_in_order_on_the_device(device):
    batches = list(DeviceLoader(numbers(5), device))
    assert [batch.tolist() for batch in batches] == [[float(n)] * 2 for n in range(5)]
    assert {batch.device for batch in batches} == {torch.ones((), device=device).device}


def test_pytrees(device):
    source = {"pair": Batch(torch.ones(2), "text"), "list": [torch.arange(3), None, 4]}
    (batch,) = DeviceLoader([source], device)
    assert isinstance(batch["pair"], Batch)
    assert batch["pair"].x.device.type == device.type
    assert batch["pair"].y == "text"
    assert batch["list"][0].tolist() == [0, 1, 2]
    assert batch["list"][1:] == [None, 4]


def test_a_mapping_that_is_no_dict_is_moved(device):
    """As transformers' BatchEncoding, which collators return."""
    source = UserDict(ids=torch.ones(1, 3), parts=[torch.ones(2)], kind="text")
    (batch,) = DeviceLoader([pad_batch(source, (4,), {"ids": 0})], device)
    assert type(batch) is UserDict
    assert batch["ids"].device.type == batch["parts"][0].device.type == device.type
    assert (batch["ids"].tolist(), batch["kind"]) == ([[1, 1, 1, 0]], "text")
    assert source["ids"].device.type == source["parts"][0].device.type == "cpu"


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


def test_leaving_the_loop_ends_the_thread(device):
    for _ in DeviceLoader(numbers(1000), device):
        break

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


def test_each_batch_ends_the_step():
    xla_amp.xla_device()
    state = torch.zeros(2, device="jax")
    xla_amp.sync()
    with counts() as seen:
        for batch in DeviceLoader(numbers(4)):
            assert batch.device == xla_amp.xla_device()
            state = state + batch
    assert seen.executions == 4  # nothing but the recording of each batch
    assert state.tolist() == [6.0, 6.0]


def rows(length, kind=dict):
    batch = {"ids": torch.full((2, length), 7), "labels": torch.full((2, length), 5), "kind": torch.tensor([1, 2])}
    return batch if kind is dict else kind(batch.values())


PADDING = {"ids": 0, "labels": -100}


def test_batches_are_padded_to_buckets():
    found = [pad_batch(rows(length), 40, PADDING) for length in (3, 16, 17, 40)]
    assert [tuple(batch["ids"].shape) for batch in found] == [(2, 16), (2, 16), (2, 32), (2, 40)]
    assert found[0]["ids"].tolist() == [[7] * 3 + [0] * 13] * 2
    assert found[0]["labels"].tolist() == [[5] * 3 + [-100] * 13] * 2
    assert found[0]["kind"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", [list, tuple])
def test_entries_are_named_by_index(kind):
    batch = pad_batch(rows(3, kind), (4, 8), {0: 0, 1: -100})
    assert type(batch) is kind
    assert [tuple(x.shape) for x in batch] == [(2, 4), (2, 4), (2,)]
    named = pad_batch(Batch(torch.ones(1, 3), 5), (4,), {0: 0})
    assert (type(named), named.x.tolist(), named.y) == (Batch, [[1, 1, 1, 0]], 5)


def test_lengths_of_a_loop_have_a_program_for_each_bucket():
    torch.manual_seed(0)
    table = torch.nn.Embedding(8, 4).to(xla_amp.xla_device())
    xla_amp.sync(wait=True)
    programs = []
    for pad in (lambda batch: pad_batch(batch, 32, {"ids": 0}), None):
        loader = DataLoader([{"ids": torch.full((1, n), 7)} for n in range(9, 31, 3)], None, collate_fn=pad)
        with counts() as seen:
            for batch in DeviceLoader(loader):
                total = table(batch["ids"]).sum()
            del total
        programs.append(seen.compilations)
    assert programs == [2, 8]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"prefetch": each}, "expected a number of batches, 1 or more") for each in (0, -1, 1.5, True)),
        ({"device": 3.5}, r"DeviceLoader\(3.5\): expected a device"),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        DeviceLoader([], **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("batch", "sizes", "padding", "match"),
    [
        (rows(9), (4, 8), {"ids": 0}, "an extent of 9 .* fits in none of them"),
        (rows(9), 0, {"ids": 0}, r"bucket_sizes\(0\): expected the longest extent"),
        (rows(3), 8, {"other": 0}, r"the batch has no tensor 'other', only \['ids', 'labels', 'kind'\]"),
        (rows(3), 8, {"kind": 0}, r"shape \[2\] has no such dimension"),
        (rows(3, tuple), 8, {5: 0}, r"the batch has no tensor 5, only \[0, 1, 2\]"),
        ({"ids": [1]}, 8, {"ids": 0}, "the batch has no tensor 'ids'"),
        (torch.ones(2, 3), 8, {0: 0}, "expected a dict, tuple or list of tensors, got Tensor"),
    ],
)
def test_a_batch_that_does_not_fit(batch, sizes, padding, match):
    with pytest.raises(ValueError, match=match):
        pad_batch(batch, sizes, padding)
