"""Fine-tune a small GPT-2 with LoRA (PEFT) under transformers' Trainer: only the adapters train and are saved.

    pip install '.[examples,huggingface]' peft
    python examples/lora.py --precision bf16
    python examples/lora.py --precision fp16 --rank 8 --output adapter

The base model has random weights, which it learns for `--base-steps` steps on one half of the text; the adapters then
learn the other half.  The text is the documentation strings of Python's standard library unless `--text` names a file.
"""

from __future__ import annotations

import tempfile
from typing import Any

import common
import peft
import small_gpt2
import torch
import transformers
from absl import app, flags

import xla_amp
from xla_amp.integrations import huggingface

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
TEXT = flags.DEFINE_string("text", None, "text to learn; default: the documentation strings of the standard library")
BASE_STEPS = flags.DEFINE_integer("base-steps", 100, "steps of the base model", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 100, "steps of the adapters", lower_bound=1)
RANK = flags.DEFINE_integer("rank", 4, "rank of the adapters", lower_bound=1)
BATCH = flags.DEFINE_integer("batch-size", 16, "sequences per step", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 64, "bytes per sequence", lower_bound=8)
WIDTH = flags.DEFINE_integer("width", 64, "channels; a multiple of 32, the size of a head", lower_bound=32)
LR = flags.DEFINE_float("lr", 3e-3, "learning rate")
LOG_STEPS = flags.DEFINE_integer("log-steps", 20, "steps between two lines of the log", lower_bound=1)
LOG_DIR = flags.DEFINE_string("log-dir", None, "write the adapters' losses and rates here (TensorBoard, CSV)")
OUTPUT = flags.DEFINE_string("output", None, "folder to save the adapters to")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights and batches")
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")


def train(model: Any, text: bytes, steps: int, folder: str, log_dir: str | None = None) -> tuple[float, float]:
    """Trains; returns the loss on the last tenth of the text, before and after."""
    rows = small_gpt2.pieces(text, CONTEXT.value)
    held_out = rows[-max(len(rows) // 10, BATCH.value) :][: 4 * BATCH.value]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        bf16=PRECISION.value == "bf16",
        fp16=PRECISION.value == "fp16",
        max_steps=steps,
        per_device_train_batch_size=BATCH.value,
        per_device_eval_batch_size=BATCH.value,
        learning_rate=LR.value,
        logging_steps=LOG_STEPS.value,
        save_strategy="no",
        disable_tqdm=JSON.value,
        dataloader_drop_last=True,  # one shape, one program
        report_to=[],
        seed=SEED.value,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows[: -len(held_out)],
        eval_dataset=held_out,
        callbacks=[small_gpt2.Recorder(common.Log(log_dir))],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    if WIDTH.value % small_gpt2.HEAD:
        raise app.UsageError(f"--width={WIDTH.value} must be a multiple of {small_gpt2.HEAD}, the size of a head")
    text = common.load_text(TEXT.value)
    half = len(text) // 2
    least = 20 * BATCH.value * CONTEXT.value
    if half < least:
        raise app.UsageError(
            f"the text has {len(text)} bytes; expected at least {2 * least} for this batch and context"
        )
    huggingface.enable()
    transformers.set_seed(SEED.value)
    base = small_gpt2.build(CONTEXT.value, layers=2, width=WIDTH.value)
    with tempfile.TemporaryDirectory() as folder:
        train(base, text[:half], BASE_STEPS.value, folder)
        weights = {name: value.cpu() for name, value in base.state_dict().items()}
        adapters = peft.LoraConfig(r=RANK.value, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
        model = peft.get_peft_model(base, adapters)
        before, after = train(model, text[half:], STEPS.value, folder, LOG_DIR.value)
    trained, every = model.get_nb_trainable_parameters()
    plain = {name.replace(".base_layer", ""): value for name, value in model.get_base_model().state_dict().items()}
    results = {
        "precision": PRECISION.value,
        "device": str(model.device),
        "trained_parameters": trained,
        "parameters": every,
        "loss_before": before,
        "loss_after": after,
        "base_unchanged": all(torch.equal(value, plain[name].cpu()) for name, value in weights.items()),
        "compilations": xla_amp.metrics()["compilations"],
    }
    if OUTPUT.value is not None:
        model.save_pretrained(OUTPUT.value)
    common.show(f"LoRA of rank {RANK.value}, {STEPS.value} steps", results, JSON.value)


if __name__ == "__main__":
    common.run(main)
