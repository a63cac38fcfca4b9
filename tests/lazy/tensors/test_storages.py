"""Storages of the lazy device: address and size as on other devices, bytes through the host, and no crash."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from xla_amp import lazy as engine
from xla_amp.errors import DeviceError
from xla_amp.testing import counts as counted


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e5m2])
def test_sizes_and_offsets_agree_with_torch(device: torch.device, dtype: torch.dtype) -> None:
    for where in (device, torch.device("cpu")):
        x = torch.zeros(4, 6, dtype=dtype).to(where)
        store, size = x.untyped_storage(), dtype.itemsize
        assert store.nbytes() == store.size() == len(store) == 24 * size
        assert x.data_ptr() == store.data_ptr() != 0
        assert x[2].data_ptr() == store.data_ptr() + 12 * size
        assert x.t()[1].data_ptr() == store.data_ptr() + size
        assert x[:0].data_ptr() == 0
        assert x.view(-1)[-1].data_ptr() + size == store.data_ptr() + store.nbytes()
        assert x.detach().data_ptr() == x.data.data_ptr() == x.data_ptr() != x.clone().data_ptr()


def test_addresses_are_unique_and_their_ranges_apart(device: torch.device) -> None:
    tensors = [torch.zeros(n % 70, device=device) for n in range(2000)]
    ranges = sorted((address(x), x.untyped_storage().nbytes()) for x in tensors)
    assert all(start + size < after for (start, size), (after, _) in itertools.pairwise(ranges))
    before = {address(x) for x in tensors}
    del tensors
    assert not before & {address(torch.zeros(n, device=device)) for n in range(100)}  # none is given out again


def test_an_address_stays_over_steps_and_loaded_weights_build_nothing(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    before, weight = {name: value.data_ptr() for name, value in model.state_dict().items()}, model.weight
    for step in range(4):
        with counted() as counts:
            model(torch.ones(2, 4, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.sync()
        assert counts.compilations == 0 or step < 2
        saved = {name: value.cpu() for name, value in model.state_dict().items()}
        model.load_state_dict(saved)
        assert model.weight is weight
        assert torch.equal(weight.cpu(), saved["weight"])
        assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before


def test_what_changes_an_address(device: torch.device) -> None:
    for where in (device, torch.device("cpu")):
        x, y = torch.zeros(4).to(where), torch.ones(4).to(where)
        first, second = x.data_ptr(), y.data_ptr()
        x.data = y
        assert x.data_ptr() == second
        y.set_(torch.zeros(2).to(where))
        assert y.data_ptr() not in (first, second)
        small = torch.zeros(2).to(where)
        before = small.data_ptr()
        assert small.resize_(1000).data_ptr() != before
        assert small.untyped_storage().nbytes() == 4000
        model = nn.Linear(2, 2, bias=False).to(where)
        state = {"weight": torch.ones(2, 2).to(where)}
        model.load_state_dict(state, assign=True)
        assert model.weight.data_ptr() == state["weight"].data_ptr()


def test_a_copy_of_a_module_runs_nothing_and_a_loaded_storage_is_uploaded_once(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    with counted() as counts:
        copied = copy.deepcopy(model)
    assert (counts.executions, counts.host_syncs, counts.compilations) == (0, 0, 0)
    assert torch.equal(copied[0].weight.cpu(), model[0].weight.cpu())
    with counted() as counts:
        x = torch.empty(0, device=device).set_(torch.rand(8).untyped_storage().to(device=device), 0, (2, 4))
    assert (counts.host_to_device, counts.device_to_host, counts.executions) == (1, 0, 0)
    assert x.shape == (2, 4)


def test_storages_are_made(device: torch.device) -> None:
    for where in (device, torch.device("cpu")):
        store = torch.UntypedStorage(16, device=where)
        store.copy_(torch.arange(4, dtype=torch.int32).untyped_storage())
        x = torch.empty(0, dtype=torch.int32, device=where).set_(store)
        assert x.tolist() == [0, 1, 2, 3]
        x[1], x[3] = 9, 5
        assert list(store) == store.tolist() == [0, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0]
        assert store[4] == 9
        assert torch.UntypedStorage([1, 2], device=where).tolist() == [1, 2]
        assert torch.UntypedStorage(device=where).nbytes() == 0
        moved = torch.ones(2).untyped_storage().to(device=where)
        assert torch.empty(0, device=where).set_(moved).tolist() == [1, 1]
        assert f"device={where}) of size 16" in repr(store)
        assert store.byteswap(torch.int32) is None
        store.copy_(torch.zeros(4).to(where).untyped_storage())
        assert x.tolist() == [0] * 4


@pytest.mark.parametrize("refused", [lambda x: x.resize_(64), lambda x: x[1:3]], ids=["resize", "slice"])
def test_what_memory_without_an_address_cannot_do(device: torch.device, refused: Callable[[Any], Any]) -> None:
    x = torch.ones(4).to(device)
    with pytest.raises(DeviceError, match=r"jax:0"):
        refused(x.untyped_storage())
    assert x.tolist() == [1, 1, 1, 1]
    refused(torch.ones(4).untyped_storage())


def test_sizes_must_agree(device: torch.device) -> None:
    store = torch.ones(4).to(device).untyped_storage()
    for target, source in ((store, torch.UntypedStorage(8)), (torch.UntypedStorage(8), store)):
        with pytest.raises(RuntimeError, match="expected a source of"):
            target.copy_(source)
