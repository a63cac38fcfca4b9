"""One process, eight (virtual) devices: the same losses in every layout, one program, checkpoints.

Collectives and memory of layouts are in test_global_mesh.py, and by XLA's compilers in test_spmd_targets.py.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import scenarios
import torch

import xla_amp
from xla_amp import xla_model
from xla_amp.errors import DeviceError, FileError, MissingLibraryError
from xla_amp.lazy.distributed import checkpoint

pytestmark = pytest.mark.processes  # of eight virtual devices
PROGRAM = Path(__file__).with_name("spmd_program.py")
LAYOUTS = ["data", pytest.param("sharded", marks=pytest.mark.full)]


@functools.cache
def folder():
    """Where the checkpoints of all layouts are; removed at the end of the process."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


@functools.cache
def run(layout, what="save", written=None, devices=8):
    words = f"layout {layout} {what} {folder() / (written or layout)}"
    return scenarios.run(PROGRAM, words, world=1, devices=devices)[words][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_those_of_one_device(layout):
    found, expected = run(layout), run("single")
    pairs = zip(found["losses"] + found["weights"], expected["losses"] + expected["weights"], strict=True)
    finite = [(a, b) for a, b in pairs if math.isfinite(b) or math.isfinite(a)]
    assert len(finite) >= 11  # the step that overflows has no loss
    for one, other in finite:
        assert one == pytest.approx(other, rel=1e-5)
    assert (found["scale"], found["skipped"]) == (expected["scale"], expected["skipped"]) == (512.0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_one_executable_without_host_sync(layout):
    assert run(layout)["steady"] == {"executions": 1, "compilations": 0, "host_syncs": 0}


@pytest.mark.full
@pytest.mark.parametrize(("layout", "devices"), [("sharded", 4), ("single", 1)])
def test_a_checkpoint_loads_on_any_number_of_devices(layout, devices):
    """Values to the bit; what follows as on the eight devices that wrote it."""
    wrote = run("sharded")
    read = run(layout, "load", "sharded", devices)
    for what in ("weights", "moments", "scale"):
        assert read[what] == wrote[what]
    assert read["rest"] == {"steps": 8, "far": [2**40]}
    assert read["later"] == pytest.approx(wrote["later"], rel=1e-5)
    for shares in read["shards"].values():
        assert shares == [1 / devices] * 2


# ---- checkpoints in one process --------------------------------------------------------------------------------------


def trained():
    model = torch.nn.BatchNorm1d(3).to(xla_amp.xla_device())
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3, device=xla_amp.xla_device())).sum().backward()
    optimizer.step()
    return model, optimizer


# Orbax's threads outlive the call, and it uses asyncio in ways that Python warns of.
QUIETLY = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning")


@QUIETLY
def test_a_checkpoint_has_everything(tmp_path):
    model, optimizer = trained()
    tied = torch.arange(3, device=xla_amp.xla_device())
    state = {"model": model, "optimizer": optimizer, "values": {"a": (tied, tied[1:]), "b": torch.ones(2)}}
    state["mean"] = np.mean([1.0, 2.0])
    checkpoint.save(state, tmp_path / "one")
    other, fresh = trained()
    target = torch.zeros(3, device=xla_amp.xla_device())
    checkpoint.save({**state, "direct": target + 7}, tmp_path / "two")
    rest = checkpoint.load({"model": other, "optimizer": fresh, "direct": target}, tmp_path / "two")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for ours, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
    assert target.tolist() == [7, 7, 7]
    assert [value.tolist() for value in rest["values"]["a"]] == [[0, 1, 2], [1, 2]]
    assert rest["values"]["b"].device.type == "cpu"
    assert rest["mean"] == 1.5
    assert checkpoint.latest(tmp_path) == tmp_path / "two"
    assert checkpoint.latest(tmp_path / "two") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@QUIETLY
def test_a_checkpoint_that_is_not_there_or_not_complete(tmp_path, monkeypatch):
    model, _ = trained()
    with pytest.raises(FileError, match="there is no complete checkpoint"):
        checkpoint.load({"model": model}, tmp_path / "none")
    checkpoint.save({"model": model}, tmp_path / "one")
    with pytest.raises(FileError, match="it exists; give each checkpoint a separate name"):
        checkpoint.save({"model": model}, tmp_path / "one")
    with pytest.raises(KeyError, match="nothing named"):
        checkpoint.load({"model": model, "scaler": xla_amp.GradScaler("cpu")}, tmp_path / "one")
    monkeypatch.setattr(checkpoint.processes, "world_size", lambda: 2)
    with pytest.raises(DeviceError, match=r"each of 2 processes has whole values; use xla_amp\.xla_model\.save"):
        checkpoint.save({"model": model}, tmp_path / "two")


def test_without_orbax_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'xla-amp\[checkpoint\]'"):
        checkpoint.save({}, tmp_path / "one")


def test_a_file_is_replaced_when_the_new_one_is_complete(tmp_path):
    xla_model.save({"a": torch.ones(2)}, tmp_path / "file")
    with pytest.raises(TypeError, match="pickle"):
        xla_model.save({"a": threading.Lock()}, tmp_path / "file")
    assert torch.load(tmp_path / "file")["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture(scope="module")
def mesh():
    return xla_amp.make_mesh({"data": 1})


def on_device(*shape):
    return torch.ones(*shape, device=xla_amp.xla_device())


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda mesh: xla_amp.make_mesh({"data": 3}), DeviceError, r"product is the number of devices, 1, got 3"),
        (lambda mesh: xla_amp.mark_sharding(torch.ones(2), mesh, ()), DeviceError, "expects a tensor on 'jax', got"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, ("model",)), ValueError, "does not know the axis 'mod"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2, 2), mesh, ("data", "data")), ValueError, "repeats the axis"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, (None, None)), ValueError, "one entry per dimension"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, "data"), ValueError, "one entry per dimension"),
        (lambda mesh: xla_amp.mark_sharding(on_device(4)[1:], mesh, ("data",)), DeviceError, "got a view of shape"),
    ],
)
def test_bad_input(call, kind, words, mesh):
    with pytest.raises(kind, match=words):
        call(mesh)
    assert xla_amp.lazy.programs.mesh.active is None
