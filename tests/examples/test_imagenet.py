"""The ImageNet example on a tiny folder of JPEGs: it learns, and resuming from a checkpoint gives equal results."""

from __future__ import annotations

from pathlib import Path

import example_runs
import numpy as np
import pytest
import torch
from PIL import Image

SMALL = ["--blocks=1,1", "--width=4", "--image-size=32", "--batch-size=8", "--lr=0.05"]


def write_images(folder: Path) -> None:
    """Horizontal and vertical stripes in random colours: 24 images of each to train on, 6 to test."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 6)):
        for name, axis in (("across", 0), ("down", 1)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                wave = np.sin(np.arange(48) * rng.uniform(0.6, 1.0) + rng.uniform(0, 6))
                stripes = np.expand_dims(wave, 1 - axis)[..., None] * rng.uniform(40, 120, 3) + 128
                pixels = np.broadcast_to(stripes, (48, 48, 3)) + rng.normal(0, 8, (48, 48, 3))
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                image.save(folder / part / name / f"{number}.jpg")


@pytest.mark.full
def test_it_learns_and_resumes_from_its_checkpoint_bitwise(tmp_path):
    write_images(tmp_path / "data")
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    flags = [*SMALL, f"--data-dir={tmp_path / 'data'}", "--precision=fp16", "--policy=gpu", "--epochs=10"]
    straight = example_runs.results("imagenet", *flags, f"--checkpoint={whole}", "--workers=0")
    assert straight["losses"][-1] < straight["losses"][0] - 0.1
    assert straight["top1"] >= 0.75
    assert straight["top5"] == 1

    first = example_runs.results("imagenet", *flags, f"--checkpoint={parts}", "--stop-after=6", "--workers=1")
    second = example_runs.results("imagenet", *flags, f"--checkpoint={parts}", "--workers=0")
    assert first["losses"] + second["losses"] == straight["losses"]
    assert second["top1"] == straight["top1"]
    one, other = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert one["epochs"] == other["epochs"] == 10
    assert one["scaler"] == other["scaler"]
    for name, tensor in one["model"].items():
        assert torch.equal(tensor.cpu(), other["model"][name].cpu()), name


@pytest.mark.full
def test_fake_data_measures_speed():
    found = example_runs.results("imagenet", *SMALL, "--fake-data", "--epochs=1", "--steps=8")
    assert found["images_per_second"] > 0
    assert len(found["losses"]) == 1
