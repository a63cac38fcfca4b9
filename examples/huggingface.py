"""Train a small GPT-2 of transformers with its Trainer, in float32, bfloat16 or float16, on bytes of any text file.

    pip install '.[examples,huggingface]'
    python examples/huggingface.py --precision bf16
    python examples/huggingface.py --precision fp16 --steps 1000 --output gpt2 --log-dir logs

The model has random weights and the text is the documentation strings of Python's standard library unless `--text`
names a file, so nothing is downloaded.  One line puts the Trainer on the XLA device: `huggingface.enable()`.  With
`--output` the run saves checkpoints there, and a run that finds one resumes from the last.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import common
import small_gpt2
import transformers
from absl import app, flags
from transformers.trainer_utils import get_last_checkpoint

import xla_amp
from xla_amp.integrations import huggingface

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
POLICY = flags.DEFINE_string("policy", None, "cast rules: tpu, gpu, ... or a TOML file; default: those of the device")
TEXT = flags.DEFINE_string("text", None, "text to learn; default: the documentation strings of the standard library")
STEPS = flags.DEFINE_integer("steps", 300, "training steps, those before a checkpoint included", lower_bound=1)
BATCH = flags.DEFINE_integer("batch-size", 16, "sequences per step", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 128, "bytes per sequence", lower_bound=8)
LAYERS = flags.DEFINE_integer("layers", 2, "transformer blocks", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 128, "channels; a multiple of 32, the size of a head", lower_bound=32)
LR = flags.DEFINE_float("lr", 1e-3, "highest learning rate")
LOG_STEPS = flags.DEFINE_integer("log-steps", 20, "steps between two lines of the log", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", None, "folder of checkpoints: the run resumes from the last one there")
SAVE_STEPS = flags.DEFINE_integer("save-steps", 100, "steps between two checkpoints", lower_bound=1)
LOG_DIR = flags.DEFINE_string("log-dir", None, "write losses, learning rates and loss scales here (TensorBoard, CSV)")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights, batches and dropout")
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

HELD_OUT = 0.1  # fraction of the text, at its end, that is not trained on
HELD_OUT_PIECES = 64


def train(text: bytes, output: str) -> dict[str, Any]:
    """Trains, resuming from a checkpoint in `output` if there is one; returns the results."""
    split = int(len(text) * (1 - HELD_OUT))
    arguments = transformers.TrainingArguments(
        output_dir=output,
        bf16=PRECISION.value == "bf16",
        fp16=PRECISION.value == "fp16",
        max_steps=STEPS.value,
        per_device_train_batch_size=BATCH.value,
        per_device_eval_batch_size=BATCH.value,
        learning_rate=LR.value,
        warmup_steps=min(50, STEPS.value // 4),
        logging_steps=LOG_STEPS.value,
        save_strategy="no" if OUTPUT.value is None else "steps",
        save_steps=SAVE_STEPS.value,
        dataloader_drop_last=True,  # one shape, one program
        report_to=[],
        seed=SEED.value,
    )
    trainer = transformers.Trainer(
        model=small_gpt2.build(CONTEXT.value, LAYERS.value, WIDTH.value),
        args=arguments,
        train_dataset=small_gpt2.pieces(text[:split], CONTEXT.value),
        eval_dataset=small_gpt2.pieces(text[split : split + HELD_OUT_PIECES * CONTEXT.value], CONTEXT.value),
        callbacks=[small_gpt2.Recorder(common.Log(LOG_DIR.value))],
    )
    checkpoint = get_last_checkpoint(output)
    before, began = xla_amp.metrics(), time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    after, seconds = xla_amp.metrics(), time.perf_counter() - began
    history = [row for row in trainer.state.log_history if "loss" in row]
    steps = STEPS.value - (0 if checkpoint is None else int(checkpoint.rpartition("-")[2]))
    return {
        "device": str(trainer.args.device),
        "resumed_from": checkpoint and Path(checkpoint).name,
        "first_loss": history[0]["loss"] if history else None,
        "last_loss": history[-1]["loss"] if history else None,
        "loss_scale": history[-1].get("loss_scale") if history else None,
        "held_out_loss": trainer.evaluate()["eval_loss"],
        "seconds": seconds,
        "executions_per_step": (after["executions"] - before["executions"]) / steps if steps else None,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    if WIDTH.value % small_gpt2.HEAD:
        raise app.UsageError(f"--width={WIDTH.value} must be a multiple of {small_gpt2.HEAD}, the size of a head")
    text = common.load_text(TEXT.value)
    least = 10 * BATCH.value * CONTEXT.value
    if len(text) < least:
        raise app.UsageError(f"the text has {len(text)} bytes; expected at least {least} for this batch and context")
    huggingface.enable(policy=POLICY.value)
    transformers.set_seed(SEED.value)
    with tempfile.TemporaryDirectory() as folder:
        results = {"precision": PRECISION.value, **train(text, OUTPUT.value or folder)}
    common.show(f"GPT-2 on {len(text):,} bytes, {STEPS.value} steps", results, JSON.value)


if __name__ == "__main__":
    common.run(main)
