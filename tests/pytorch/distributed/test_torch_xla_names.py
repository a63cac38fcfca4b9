"""`xla_amp.torch_xla`: the names of today's torch_xla, each as the page of migration shows it."""

from __future__ import annotations

import re
import subprocess
import sys

import forked
import numpy as np
import pytest
import torch
from source_tree import ROOT

import xla_amp.torch_xla as implementation
from xla_amp import torch_xla
from xla_amp import torch_xla as met
from xla_amp import torch_xla as pl
from xla_amp import torch_xla as xr
from xla_amp import torch_xla as xs
from xla_amp import xla_model as xm
from xla_amp.common import config


@pytest.fixture
def device() -> torch.device:
    return torch_xla.device()


def test_names_that_xla_model_has_in_other_words():
    """Their tests are in test_xla_model.py."""
    assert (torch_xla.device, torch_xla.sync, torch_xla.manual_seed) == (xm.xla_device, xm.mark_step, xm.set_rng_state)
    assert (xr.world_size, xr.global_ordinal) == (xm.get_world_size, xm.get_ordinal)
    assert xr.local_ordinal is xm.get_local_ordinal


@pytest.mark.parametrize(("platform", "name"), [("gpu", "CUDA"), ("tpu", "TPU"), ("cpu", "CPU")])
def test_hardware_has_torch_xlas_names(device, monkeypatch, platform, name):
    engine = sys.modules["xla_amp.lazy"]
    monkeypatch.setattr(engine, "platform", lambda: platform)
    assert xm.xla_device_hw(device) == xr.device_type() == name
    assert xm.xla_device(devkind=name) == device


def test_metrics_report():
    assert "compilations" in met.metrics_report()


def test_compile(device):
    @torch_xla.compile
    def step(x):
        return x * 2

    x = torch.ones(3, device=device)
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.replays == 2
    assert torch_xla.compile(full_graph=True)(lambda x: x + 1)(x).tolist() == [2.0] * 3


def test_loader(device):
    batches = [torch.ones(2), torch.zeros(2)]
    found = [batch for batch in pl.MpDeviceLoader(batches, device)]  # noqa: C416
    assert [batch.device for batch in found] == [device] * 2


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
    environment = config.child_environment(
        {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    )
    run = forked.run(program=SPMD, environment=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split(maxsplit=1) == ["128.0", "{'data': 2, 'model': 2}\n"]


def test_launch_in_this_process(monkeypatch):
    seen = []
    torch_xla.launch(lambda *found: seen.append(found), args=(1,), debug_single_process=True)
    monkeypatch.setattr(implementation, "_devices_here", lambda: 1)
    torch_xla.launch(lambda *found: seen.append(found), args=(2,))
    assert seen == [(0, 1), (0, 2)]


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_launch(tmp_path, count):
    (tmp_path / "program.py").write_text(LAUNCH)
    flags = f"--xla_force_host_platform_device_count={count}"
    environment = config.child_environment({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    done = forked.run(tmp_path / "program.py", environment=environment, copies=True)
    assert done.returncode == 0, done.stderr
    expected = [f"{rank} {rank} {count} hello" for rank in range(count)]
    lines = done.stdout.splitlines()
    assert (sorted(lines[:-1]), lines[-1]) == (expected, "0 0 1 alone")


def test_launch_refuses_a_fork():
    with pytest.raises(ValueError, match="expected 'spawn'"):
        torch_xla.launch(print, start_method="fork")


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


def test_importing_the_device_registers_its_name():
    environment = config.child_environment({"JAX_PLATFORMS": "cpu"})
    done = subprocess.run([sys.executable, "-c", DEVICE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "2.0", "jax", "True", "torch.bfloat16"]


def test_the_page_has_every_name():
    page = (ROOT / "docs/migration.md").read_text()
    section = page.partition("## torch_xla's names")[2].partition("\n## ")[0]
    named = set(re.findall(r"`xla_amp\.torch_xla\.(\w+)", section))
    assert named == set(torch_xla.__all__)
