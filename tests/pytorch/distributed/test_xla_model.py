"""The names that PyTorch/XLA scripts use."""

from __future__ import annotations

import io
import threading
import time

import pytest
import torch
from torch import nn

from xla_amp import syncfree
from xla_amp import xla_model as xm
from xla_amp.errors import DeviceError
from xla_amp.testing import counts


@pytest.fixture
def device():
    return xm.xla_device()


# ---- devices and processes -------------------------------------------------------------------------------------------


def test_devices(device):
    assert xm.xla_device() == xm.xla_device(0) == device
    assert xm.xla_device_hw(device) == "CPU"
    assert xm.xla_device(devkind="CPU") == device
    assert xm.get_xla_supported_devices() == xm.get_xla_supported_devices("CPU") == [str(device)]
    assert xm.get_xla_supported_devices("TPU") == []
    assert xm.is_xla_tensor(torch.ones(1, device=device))
    assert not xm.is_xla_tensor(torch.ones(1))
    with pytest.raises(DeviceError, match="has one XLA device, number 0"):
        xm.xla_device(1)
    with pytest.raises(DeviceError, match="the device is of kind 'CPU'"):
        xm.xla_device(devkind="TPU")


def test_memory_of_live_tensors_is_counted(device):
    before = xm.get_memory_info(device)["bytes_used"]
    kept = torch.ones(1 << 20).to(device)
    info = xm.get_memory_info(device)
    assert info["bytes_used"] - before >= kept.numel() * 4
    assert info["bytes_limit"] == 0  # XLA:CPU knows none


def test_one_process():
    assert xm.xrt_world_size() == xm.get_world_size() == 1
    assert xm.get_ordinal() == xm.get_local_ordinal() == 0
    assert xm.is_master_ordinal()
    assert xm.rendezvous("here", b"us") == [b"us"]
    assert xm.mesh_reduce("sum", 3, sum) == 3


def test_master_print(capsys):
    xm.master_print("loss", 1.5)
    assert capsys.readouterr().out == "loss 1.5\n"
    stream = io.StringIO()
    xm.master_print(1, fd=stream, flush=True)
    assert stream.getvalue() == "1\n"


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_all_reduce(device):
    tensor = torch.ones(2, device=device)
    result = xm.all_reduce("sum", tensor, scale=0.5)
    assert result.tolist() == [0.5, 0.5]
    assert tensor.tolist() == [1.0, 1.0]
    result = xm.all_reduce(xm.REDUCE_MAX, tensor)
    result.add_(1)
    assert tensor.tolist() == [1.0, 1.0]
    tensors = [tensor, torch.full((1,), 4.0, device=device, requires_grad=True)]
    assert xm.all_reduce("sum", tensors, scale=0.25) is None  # in place
    assert [tensor.tolist() for tensor in tensors] == [[0.25, 0.25], [1.0]]


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_optimizer_step(device):
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = syncfree.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2, device=device)
    assert [gradient is weight.grad for gradient in xm._fetch_gradients(optimizer)] == [True]  # torch_xla's name
    with counts() as seen:
        xm.optimizer_step(optimizer, barrier=True)
    assert seen.executions == 1
    assert weight.tolist() == [0.0, 0.0]
    xm.optimizer_step(optimizer, optimizer_args={"found_inf": torch.ones((), device=device)})
    assert weight.tolist() == [0.0, 0.0]
    assert xm.optimizer_step(optimizer, optimizer_args={"closure": lambda: 7}) == 7


def test_step_closures(device):
    seen = []
    loss = torch.ones(2, device=device) * 3
    xm.add_step_closure(lambda value, step: seen.append((value.sum().item(), step)), args=(loss, 5))
    assert seen == []
    with counts() as spent:
        xm.mark_step(wait=True)
    assert spent.executions > 0
    assert seen == [(6.0, 5)]
    xm.mark_step()
    assert len(seen) == 1


def end_steps():
    """Ends steps for ten seconds: one that comes after a closure that failed raises its error."""
    for _ in range(1000):
        xm.mark_step()
        time.sleep(0.01)


def test_step_closures_on_a_thread(device):
    seen = []
    xm.add_step_closure(lambda: seen.append(threading.current_thread().name), run_async=True)
    xm.mark_step()
    deadline = threading.Event()
    while not seen and not deadline.wait(0.01):
        pass
    assert seen[0].startswith("xla_amp-step-closure")

    def fail():
        raise LookupError("in a closure")

    xm.add_step_closure(fail, run_async=True)
    with pytest.raises(LookupError, match="in a closure"):
        end_steps()


def test_waiting(device):
    tensor = torch.ones(2, device=device) + 1
    with counts() as seen:
        xm.wait_device_ops()
    assert seen.host_syncs == 1
    assert tensor.tolist() == [2.0, 2.0]


# ---- random numbers and files ----------------------------------------------------------------------------------------


def test_random_state(device):
    xm.set_rng_state(3)
    state = xm.get_rng_state()
    first = torch.rand(3, device=device).tolist()
    second = torch.rand(3, device=device).tolist()
    xm.set_rng_state(state)
    assert torch.rand(3, device=device).tolist() == first != second
    xm.set_rng_state(3)
    assert torch.rand(3, device=device).tolist() == first


def test_save(device, tmp_path):
    weight = nn.Parameter(torch.ones(2, device=device))
    xm.save({"model": {"a": weight, "tied": weight}, "step": 3, "cpu": torch.zeros(1)}, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert loaded["model"]["a"].device.type == "cpu"
    assert isinstance(loaded["model"]["a"], nn.Parameter)
    assert loaded["model"]["a"].tolist() == [1.0, 1.0]
    assert loaded["step"] == 3
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["tied"].data_ptr()


def test_send_cpu_data_to_device(device):
    sent = xm.send_cpu_data_to_device({"x": [torch.ones(2)], "n": 1}, device)
    assert sent["x"][0].device == device
    assert sent["n"] == 1
