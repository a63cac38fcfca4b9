"""Examples with small models in new processes: they learn, log, and go on from their checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import example_runs
import pytest
from source_tree import ROOT

pytestmark = pytest.mark.full

WIDTH = ("--width=32", "--context=16", "--batch-size=8")
SMALL = ("--layers=1", *WIDTH)
LOSSES = ("last_loss", "held_out_loss")


def test_the_demo_compares_float32_and_bfloat16() -> None:
    """The first command of the README."""
    lines = example_runs.run("demo", "--width", "64", "--steps", "4", "--json").stdout.splitlines()
    results = next(json.loads(line) for line in lines if line.startswith("{"))
    assert results["executables_per_step"] == 1
    assert results["bfloat16_loss"] == pytest.approx(results["float32_loss"], rel=1e-2)
    assert results["ran_in_bfloat16"] == "linear (17), scaled_dot_product_attention (4)"
    assert lines[0].startswith("This CPU")
    commands = [line.split()[1:] for line in lines if line.startswith("  python ")]
    assert len(commands) == 3
    for command in commands:
        assert command[0] == "-m" or (ROOT / command[0]).is_file()


def test_the_precisions_of_flax_learn_alike(tmp_path: Path) -> None:
    pytest.importorskip("flax", reason="the extra `tests`")
    found = {}
    for precision in ("fp32", "fp16"):
        flags = [f"--precision={precision}", "--steps=120", "--log-steps=10", "--lr=0.01"]
        found[precision] = example_runs.results("flax_lm", *SMALL, *flags, f"--log-dir={tmp_path / precision}")
        assert found[precision]["held_out_loss"] < 3.3
        example_runs.logged(tmp_path / precision, range(10, 121, 10))
    assert abs(found["fp32"]["held_out_loss"] - found["fp16"]["held_out_loss"]) < 0.01
    assert found["fp32"]["low_products"] == 0
    assert found["fp16"]["low_products"] >= 8  # four of attention, two of its products, two of the perceptron
    assert found["fp16"]["loss_scale"] == 65536


def test_gpt_learns_in_captured_steps_and_resumes_with_equal_results(tmp_path: Path) -> None:
    flags = [*SMALL, "--write=4", "--precision=fp16", "--policy=gpu"]
    whole = example_runs.results("gpt", "--steps=80", f"--log-dir={tmp_path}", *flags)
    rows = example_runs.logged(tmp_path, range(20, 81, 20))
    assert set(rows[0]) == {"step", "loss", "lr", "loss_scale"}
    assert whole["executions_per_step"] == 1
    assert whole["replayed_steps"] >= 70
    assert whole["last_loss"] < whole["first_loss"] - 1
    for _ in range(2):
        resumed = example_runs.results("gpt", "--steps=40", f"--checkpoint={tmp_path / 'gpt.pt'}", *flags)
    assert [resumed[name] for name in LOSSES] == [whole[name] for name in LOSSES]


def test_transformers_trainer_resumes_with_equal_results(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `huggingface`")
    flags = [*SMALL, "--log-steps=2", "--lr=0.01", "--precision=fp16", "--steps=30", "--save-steps=24"]
    flags.append(f"--output={tmp_path / 'run'}")
    whole = example_runs.results("huggingface", *flags, f"--log-dir={tmp_path / 'logs'}")
    assert whole["device"] == "jax:0"
    assert whole["last_loss"] < whole["first_loss"] - 1
    rows = example_runs.logged(tmp_path / "logs", range(2, 31, 2))
    assert float(rows[-1]["loss_scale"]) == whole["loss_scale"]
    shutil.rmtree(tmp_path / "run" / "checkpoint-30")
    resumed = example_runs.results("huggingface", *flags)
    assert resumed["resumed_from"] == "checkpoint-24"
    assert [resumed[name] for name in LOSSES] == [whole[name] for name in LOSSES]


def test_a_lightning_module_shows_its_scale_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the extra `lightning`")
    flags = ["--batch-size=128", "--precision=fp16", f"--output={tmp_path / 'run'}", "--log-steps=11", "--epochs=3"]
    done = example_runs.run("lightning_module", *flags, f"--log-dir={tmp_path / 'logs'}", "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "jax:0"
    assert found["accuracy"] > 0.8
    assert "loss_scale=65536.0, accuracy=" in done.stdout + done.stderr
    rows = example_runs.rows(tmp_path / "logs" / "metrics.csv")
    assert {"loss", "lr", "loss_scale", "accuracy"} <= set(rows[0])
    assert [int(row["step"]) for row in rows if row["loss"]] == [10, 21, 32]
    assert list((tmp_path / "logs").glob("events*"))
    early = min((tmp_path / "run").glob("epoch=*.ckpt"))
    early.replace(tmp_path / "run" / "last.ckpt")
    again = example_runs.results("lightning_module", *flags, f"--log-dir={tmp_path / 'again'}")
    assert again["resumed_from"] == "last.ckpt"
    assert again["steps"] == found["steps"] == 33
    assert 0 < len([row for row in example_runs.rows(tmp_path / "again" / "metrics.csv") if row["loss"]]) < 3
    assert again["accuracy"] > 0.8


def test_adapters_of_lora_learn_and_alone_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `tests`")
    flags = [*WIDTH, "--base-steps=40", "--steps=80", "--lr=0.05", "--precision=fp16", f"--output={tmp_path}"]
    found = example_runs.results("lora", *flags)
    assert found["device"] == "jax:0"
    assert found["trained_parameters"] < found["parameters"] / 5
    assert found["base_unchanged"]
    assert found["loss_after"] < found["loss_before"] - 0.005
    from safetensors import safe_open

    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 (it is no dict)
