"""The MNIST example in a new process: few epochs, results from the JSON on its last line."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import example_runs
import numpy as np
import pytest
from source_tree import ROOT

EXAMPLE = ROOT / "examples" / "mnist.py"


def results(*flags: str) -> dict[str, object]:
    return example_runs.results("mnist", *flags)


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        pytest.param("fp32", ["--optimizer=adamw", "--nosyncfree"], marks=pytest.mark.full),
        pytest.param("bf16", ["--optimizer=sgd"], marks=pytest.mark.full),
        ("fp16", ["--optimizer=adam", "--policy=gpu"]),
    ],
)
def test_one_executable_and_no_host_sync_per_step(precision, flags):
    found = results(f"--precision={precision}", "--epochs=3", *flags)
    assert list(found) == [
        "precision", "accuracy", "executions_per_step", "host_syncs_per_step", "skipped_steps", "seconds_per_step"
    ]  # fmt: skip
    assert found["precision"] == precision
    assert found["executions_per_step"] == 1
    assert found["host_syncs_per_step"] == 0
    assert found["seconds_per_step"] > 0
    assert found["skipped_steps"] <= (2 if precision == "fp16" else 0)
    assert found["accuracy"] > 0.9  # three of fifteen epochs


def test_on_pytorch_itself(tmp_path):
    folder = [f"--plot={tmp_path / 'curve.png'}", f"--log-dir={tmp_path / 'logs'}"]
    found = results("--device=cpu", "--precision=bf16", "--epochs=3", *folder)
    assert found["accuracy"] > 0.9
    assert found["executions_per_step"] == 0  # nothing ran on XLA
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    rows = example_runs.rows(tmp_path / "logs" / "log.csv")
    assert [list(row) for row in rows] == [["step", "loss", "accuracy", "lr", "loss_scale"]] * 3
    assert float(rows[-1]["accuracy"]) == found["accuracy"]


@pytest.mark.full
def test_it_ends_with_what_the_figures_mean():
    """README's first command, so in a new interpreter."""
    command = [sys.executable, EXAMPLE, "--precision=bf16", "--epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "seconds per step in float32" in done.stdout
    assert (
        "bf16 by rule: conv2d, relu, max_pool2d, linear. float32 by rule: batch_norm, cross_entropy_loss."
        in done.stdout
    )
    assert "compiling a step" not in done.stderr  # a log line in the middle of the progress bar


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("mnist_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(EXAMPLE.parent))  # of the modules that it imports
    spec.loader.exec_module(module)
    sys.path.remove(str(EXAMPLE.parent))
    return module


def write_idx(path: Path, array: np.ndarray) -> None:
    """The IDX format: 00 00, type code (08: unsigned byte), rank, then the sizes as big-endian 32 bits, then data."""
    data = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """MNIST's four files, some gzipped: images of 28x28 in which the bright column shows the class."""
    random = np.random.default_rng(0)
    for part, count in [("train", 256), ("t10k", 64)]:
        labels = random.integers(0, 10, count)
        images = random.integers(0, 40, (count, 28, 28))
        images[np.arange(count), :, 2 * labels + 4] = 255
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", labels)
    return tmp_path


def test_idx_files(mnist, mnist_folder):
    train, test = mnist.load_data(str(mnist_folder))
    assert (len(train), len(test)) == (256, 64)
    images, labels = train.tensors
    assert images.shape == (256, 1, 28, 28)
    assert abs(images.mean().item()) < 1e-5
    assert abs(images.std(correction=0).item() - 1) < 1e-5
    bright = images[:, 0].sum(dim=1).argmax(dim=1)
    assert bright.tolist() == (2 * labels + 4).tolist()


@pytest.mark.full
@pytest.mark.parametrize("flags", [["--num-processes=2"], ["--spmd"]], ids=["processes", "spmd"])
def test_several_devices(flags, monkeypatch):
    if "--spmd" in flags:
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8")
    found = results("--precision=fp16", "--policy=gpu", "--epochs=3", *flags)
    assert found["executions_per_step"] == 1
    assert found["host_syncs_per_step"] == 0
    assert found["accuracy"] > 0.9
