"""The LoRA example in a new process: the adapters learn, the base model stays, and only adapters are saved."""

from __future__ import annotations

from pathlib import Path

import example_runs
import pytest

pytest.importorskip("peft", reason="the extra `tests`")

SMALL = ["--width=32", "--context=16", "--batch-size=8", "--base-steps=40", "--steps=80", "--lr=0.05"]


@pytest.mark.full
def test_adapters_learn_and_are_saved(tmp_path: Path) -> None:
    found = example_runs.results("lora", *SMALL, "--precision=fp16", f"--output={tmp_path}")
    assert found["device"] == "jax:0"
    assert found["trained_parameters"] < found["parameters"] / 5
    assert found["base_unchanged"]
    assert found["loss_after"] < found["loss_before"] - 0.005
    from safetensors import safe_open

    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 (it is no dict)
