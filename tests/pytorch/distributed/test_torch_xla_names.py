"""The names that scripts of PyTorch/XLA use: today's, each as the page of migration shows it, and `xla_model`'s."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time

import forked
import jax
import numpy as np
import pytest
import torch
from source_tree import ROOT
from torch import nn

import xla_amp
from xla_amp import syncfree, torch_xla
from xla_amp import xla_model as xm
from xla_amp.common import torch_xla_names
from xla_amp.errors import DeviceError
from xla_amp.testing import counts

met = pl = test_utils = xp = xr = xs = xu = torch_xla
"""The names by which scripts import modules of torch_xla."""


@pytest.fixture
def device() -> torch.device:
    return torch_xla.device()


def test_names_that_xla_model_has_in_other_words():
    """Their tests are below."""
    assert (torch_xla.device, torch_xla.sync, torch_xla.manual_seed) == (xm.xla_device, xm.mark_step, xm.set_rng_state)
    assert (xr.world_size, xr.global_ordinal) == (xm.get_world_size, xm.get_ordinal)
    assert xr.local_ordinal is xm.get_local_ordinal
    assert (xr.process_index, xr.process_count) == (xm.get_ordinal, xm.get_world_size)


def test_counts_of_devices(device):
    assert xr.global_runtime_device_count() == len(jax.devices()) == xr.addressable_runtime_device_count()
    assert xr.using_pjrt()
    assert xr.is_bf16_supported()


@pytest.mark.parametrize(("platform", "name"), [("gpu", "CUDA"), ("tpu", "TPU"), ("cpu", "CPU")])
def test_hardware_has_torch_xlas_names(device, monkeypatch, platform, name):
    engine = sys.modules["xla_amp.lazy"]
    monkeypatch.setattr(engine, "platform", lambda: platform)
    assert xm.xla_device_hw(device) == xr.device_type() == name
    assert xm.xla_device(devkind=name) == device


def test_metrics_report():
    assert "compilations" in met.metrics_report()
    assert met.short_metrics_report(["host_syncs"]).startswith("host_syncs: ")
    assert len(met.short_metrics_report().splitlines()) == len(xla_amp.metrics())


@pytest.mark.parametrize("module", [torch_xla, xm], ids=["torch_xla", "xla_model"])
@pytest.mark.parametrize("row", torch_xla_names.table(), ids=lambda row: row.names[0])
def test_a_name_without_a_counterpart_tells_what_to_write(module, row):
    for name in row.names:
        with pytest.raises(AttributeError, match=re.escape(f".{name} has no counterpart in xla_amp. Write: ")):
            getattr(module, name)
    with pytest.raises(AttributeError, match=r"public names: .*spawn"):
        torch_xla.xla_devise  # noqa: B018


def test_the_order_of_torch_xlas_autocast_is_refused(device):
    with pytest.raises(TypeError, match=r"Type autocast\('\w+', torch.bfloat16, True\)"):
        xla_amp.autocast(device, True, torch.bfloat16)


def test_a_script_of_torch_xla_feeds_and_logs(device, tmp_path, capsys):
    loader = xu.SampleGenerator(data=(torch.ones(2, 3), torch.zeros(2)), sample_count=3)
    options = {"loader_prefetch_size": 8, "device_prefetch_size": 4, "host_to_device_transfer_threads": 2}
    batches = pl.MpDeviceLoader(loader, device, **options)
    assert batches.prefetch == 4
    tracker = xm.RateTracker()
    writer = test_utils.get_summary_writer(str(tmp_path))
    for _ in range(2):  # each pass has all batches
        for step, (x, _) in enumerate(batches):
            with xp.StepTrace("train"), xp.Trace("forward"):
                tracker.add(len(x))
            arguments = (device, step, 0.5, tracker.rate(), tracker.global_rate(), 1)
            xm.add_step_closure(test_utils.print_training_update, (*arguments, writer))
    xm.mark_step()
    test_utils.write_to_summary(writer, 1, {"accuracy": 1.0}, write_xla_metrics=True)
    test_utils.close_summary_writer(writer)
    test_utils.print_test_update(device, 99.5, epoch=1)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("| Training Device=jax:0/0 Epoch=1 Step=") for line in lines)
    assert "Accuracy=99.50" in last
    assert len(list(tmp_path.iterdir())) == 1
    assert 0 < tracker.global_rate() < 1e9
    for wrong in ({"input_sharding": "data"}, {"batches_per_execution": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            pl.MpDeviceLoader(loader, device, **wrong)


def test_compile(device):
    @torch_xla.compile
    def step(x):
        return x * 2

    x = torch.ones(3, device=device)
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.replays == 2
    assert torch_xla.compile(full_graph=True)(lambda x: x + 1)(x).tolist() == [2.0] * 3
    with counts() as seen:
        for _ in range(3):
            with torch_xla.compile():
                x = x * 3 + 1
    assert seen.compilations == 1
    with pytest.raises(TypeError, match="a block is recorded"), torch_xla.compile(full_graph=True):
        pass


def test_spmd_refusals():
    with pytest.raises(ValueError, match="use_spmd"):
        xr.use_spmd(auto=True)
    with pytest.raises(ValueError, match=r"expected 0 to n-1 in order"):
        xs.Mesh(np.array([1, 0]), (2,), ("data",))
    with pytest.raises(ValueError, match="one name for each axis"):
        xs.Mesh(np.arange(1), (1,), ("a", "b"))


SPMD = """
import numpy as np, torch
import xla_amp.torch_xla as xr, xla_amp.torch_xla as xs, xla_amp.xla_model as xm
xr.use_spmd()
device = xm.xla_device()
mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
weight, batch = torch.ones(4, 8).to(device), torch.ones(4, 4).to(device)
xs.mark_sharding(weight, mesh, (None, 1))
xs.mark_sharding(batch, mesh, ("data", None))
print((batch @ weight).sum().item(), dict(mesh.shape))
assert tuple(xs.Mesh(range(4), (4, 1)).axis_names) == ("axis_0", "axis_1")
"""

LAUNCH = """
import sys
from xla_amp import torch_xla
from xla_amp.torch_xla import global_ordinal, world_size


def main(index, word):
    sys.stdout.write(f"{index} {global_ordinal()} {world_size()} {word}\\n")


if __name__ == "__main__":
    torch_xla.launch(main, args=("hello",))
    torch_xla.launch(main, args=("alone",), debug_single_process=True)
"""


@pytest.mark.full
def test_spmd():
    run = forked.run(program=SPMD, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert run.stdout.split(maxsplit=1) == ["128.0", "{'data': 2, 'model': 2}\n"]


def test_launch_in_this_process():
    seen = []
    torch_xla.launch(lambda *found: seen.append(found), args=(1,), debug_single_process=True)
    torch_xla.spawn(lambda *found: seen.append(found), args=(2,), nprocs=1)
    assert seen == [(0, 1), (0, 2)]


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_launch(tmp_path, count):
    (tmp_path / "program.py").write_text(LAUNCH)
    flags = f"--xla_force_host_platform_device_count={count}"
    done = forked.run(tmp_path / "program.py", copies=True, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    expected = [f"{rank} {rank} {count} hello" for rank in range(count)]
    lines = done.stdout.splitlines()
    assert (sorted(lines[:-1]), lines[-1]) == (expected, "0 0 1 alone")


def test_launch_refuses_a_fork():
    for start in (torch_xla.launch, torch_xla.spawn):
        with pytest.raises(ValueError, match="expected 'spawn'"):
            start(print, start_method="fork")
    with pytest.raises(ValueError, match="join=False"):
        torch_xla.spawn(print, join=False)


DEVICE = """
import importlib, sys
import xla_amp
print("torch" in sys.modules)
importlib.import_module("xla_amp.device")  # as timm and transformers do
import torch
print(torch.ones(2, device="jax").sum().item(), torch.accelerator.current_accelerator(), xla_amp.device is not None)
with torch.autocast("jax"):
    print(torch.nn.Linear(2, 2).to("jax")(torch.ones(1, 2, device="jax")).dtype)
"""


@pytest.mark.full
def test_importing_the_device_registers_its_name():
    """torch_xla's switch of dtypes, which acts there without a region, is warned of."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_USE_BF16": "1"}
    done = subprocess.run([sys.executable, "-c", DEVICE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "2.0", "jax", "True", "torch.bfloat16"]
    assert done.stderr.count("XLA_USE_BF16 has no effect on the lazy device") == 1


def test_the_page_has_every_name():
    page = (ROOT / "docs/lists/names.md").read_text()
    section = page.partition("## torch_xla's names")[2].partition("\n## ")[0]
    named = set(re.findall(r"`xla_amp\.torch_xla\.(\w+)", section))
    assert named == set(torch_xla.__all__)
    for row in torch_xla_names.table():
        names = ", ".join(f"`{name}`" for name in row.names)
        assert f"| `{row.module}` | {names} | {row.write} |" in section


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


# ---- files -----------------------------------------------------------------------------------------------------------


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
