"""Checkpoints that end in time, are refused before they are written, and whose damage is found; one process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import forked
import numpy as np
import pytest
import torch

import xla_amp
from xla_amp import checkpoint, xla_model
from xla_amp.errors import DeviceError, FileError, MissingLibraryError, XlaAmpWarning
from xla_amp.lazy.layouts import checkpoint as written

# Orbax's threads outlive the call, it uses asyncio in ways that Python warns of, and drops tasks that failed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_for_other_tests():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def device():
    return xla_amp.xla_device()


# ---- what a checkpoint has -------------------------------------------------------------------------------------------


def trained():
    model = torch.nn.BatchNorm1d(3).to(xla_amp.xla_device())
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3, device=xla_amp.xla_device())).sum().backward()
    optimizer.step()
    return model, optimizer


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


def test_names_that_a_checkpoint_lacks_and_values_of_separate_processes(device, tmp_path, monkeypatch):
    model, _ = pair(device)
    checkpoint.save({"model": model}, tmp_path / "one")
    with pytest.raises(KeyError, match="nothing named"):
        checkpoint.load({"model": model, "scaler": xla_amp.GradScaler("cpu")}, tmp_path / "one")
    monkeypatch.setattr(written.processes, "world_size", lambda: 2)
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


# ---- the end of a program --------------------------------------------------------------------------------------------


def ended(folder, end):
    program = Path(__file__).with_name("checkpoint_program.py")
    return forked.run(program, folder, end, status=None)


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("raises", 1, "ZeroDivisionError"),
        ("full disk", 0, "a checkpoint was not written: checkpoint.save_async('{folder}/last')"),
        *(pytest.param(end, 0, "", marks=pytest.mark.full) for end in ("ends", "exits")),
    ],
)
def test_a_save_goes_on_to_the_end_of_the_program(device, tmp_path, end, status, words):
    done = ended(tmp_path, end)
    assert done.returncode == status
    assert words.format(folder=tmp_path) in done.stderr
    if end == "full disk":
        assert [path.name for path in tmp_path.iterdir()] == ["first"]
    else:
        model = torch.nn.Linear(512, 512).to(device)
        assert checkpoint.load({"model": model}, tmp_path / "last") == {"steps": [*range(100)]}


def test_remains_of_a_killed_save_are_removed_by_the_next_of_its_name(device, tmp_path):
    assert ended(tmp_path, "killed").returncode == -9
    [left] = tmp_path.glob("*-tmp*")
    assert checkpoint.latest(tmp_path) == tmp_path / "first"
    checkpoint.save({"model": torch.nn.Linear(2, 2).to(device)}, tmp_path / "second")
    assert left.exists()
    checkpoint.save({"step": 1}, tmp_path / "last")
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "last"}
    assert checkpoint.latest(tmp_path) == tmp_path / "last"


def test_a_save_that_fails_beside_the_steps_warns_and_raises_where_it_is_waited_for(device, tmp_path, monkeypatch):
    def fail(folder, names):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(written, "_digests", fail)
        with pytest.warns(XlaAmpWarning, match=r"a checkpoint was not written.*one.*the disk is full"):
            error = checkpoint.save_async({"step": 1}, tmp_path / "one").exception()
    assert isinstance(error, FileError)
    checkpoint.save({"step": 1}, tmp_path / "two")
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


# ---- what cannot be loaded is not saved ------------------------------------------------------------------------------


class Setting:
    """A class of the user's."""


def test_what_load_would_refuse_is_not_saved(tmp_path):
    with pytest.raises(FileError, match=r"'.*one'\): .*Setting could not be read again"):
        checkpoint.save({"step": 3, "it": {"a": [1, Setting()]}}, tmp_path / "run" / "one")
    assert not (tmp_path / "run").exists()


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileError, match=r"NotADirectoryError|FileExistsError"):
        checkpoint.save({"step": 3}, tmp_path / "file" / "one")
    with pytest.raises(FileError, match="has a '\\['; choose another name"):
        checkpoint.save({"step": 3}, tmp_path / "run[1]" / "one")
    with pytest.raises(FileError, match="it exists; give each"):
        checkpoint.save({"step": 3}, tmp_path / "link")


# ---- damage ----------------------------------------------------------------------------------------------------------


def pair(device):
    model = torch.nn.Linear(64, 64).to(device)
    return model, xla_amp.syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)


UNREAD = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""What Orbax writes after the digests, and `load` does not read."""


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_one_flipped_byte_is_refused_and_nothing_is_loaded(device, tmp_path):
    model, optimizer = pair(device)
    checkpoint.save({"model": model, "optimizer": optimizer, "cpu": torch.ones(100)}, tmp_path / "é" / "名")
    other, fresh = pair(device)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    files = sorted(path for path in (tmp_path / "é" / "名").rglob("*") if path.is_file())
    for path in files:
        if path.name in UNREAD:
            continue
        flip(path, path.stat().st_size // 2)
        with pytest.raises(FileError, match="damaged"):
            checkpoint.load({"model": other, "optimizer": fresh}, tmp_path / "é" / "名")
        flip(path, path.stat().st_size // 2)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    checkpoint.load({"model": other, "optimizer": fresh}, tmp_path / "é" / "名")
    assert torch.equal(other.weight, model.weight)


def test_a_truncated_or_missing_file(device, tmp_path):
    model, _ = pair(device)
    checkpoint.save({"model": model}, tmp_path / "one")
    for number, path in enumerate(sorted(path for path in (tmp_path / "one").rglob("*") if path.is_file())):
        for size in (0, path.stat().st_size // 2):
            copied = shutil.copytree(tmp_path / "one", tmp_path / f"{number}-{size}")
            with open(copied / path.relative_to(tmp_path / "one"), "r+b") as file:
                file.truncate(size)
            if path.name in UNREAD:
                checkpoint.load({"model": model}, copied)
            else:
                with pytest.raises(FileError, match="damaged"):
                    checkpoint.load({"model": model}, copied)
            shutil.rmtree(copied)
    shutil.rmtree(tmp_path / "one" / "d")
    with pytest.raises(FileError, match="damaged: d/"):
        checkpoint.load({"model": model}, tmp_path / "one")
    (tmp_path / "one" / "digests.json").unlink()
    with pytest.raises(FileError, match="there is no complete checkpoint"):
        checkpoint.load({"model": model}, tmp_path / "one")


def test_the_latest_is_the_one_that_was_saved_last(tmp_path):
    for name in ("step-9", "step-10", "step-8"):
        checkpoint.save({"name": name}, tmp_path / name)
    os.utime(tmp_path / "step-9")  # as a copy or an edit does
    assert checkpoint.latest(tmp_path) == tmp_path / "step-8"
    (tmp_path / "step-8" / "digests.json").write_text(json.dumps([]))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
