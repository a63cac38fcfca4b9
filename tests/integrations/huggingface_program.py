"""Trains in processes: ``accelerate launch --multi_gpu --num_processes 2 huggingface_program.py FOLDER KIND...``.

Each process writes what it saw of each kind to FOLDER/KIND-WORLD-RANK.pt.  One alone takes batches of twice the size.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from small_training import Classifier, counted, rows
from torch.utils.data import DataLoader

from xla_amp import xla_model as xm
from xla_amp.integrations import huggingface

huggingface.enable()

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

BATCH = 8  # of all processes together


def network() -> Classifier:
    torch.manual_seed(xm.get_ordinal())  # rank 0's weights are everybody's
    return Classifier()


def train_accelerate(folder: Path, precision: str, accumulate: int = 1) -> dict[str, Any]:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulate)
    world = accelerator.num_processes
    set_seed(0)
    model = network()
    loader = DataLoader(rows(64), BATCH // world)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99 ** (step / world))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    counts, losses = [], []
    for epoch in range(3):
        total = torch.zeros((), device=accelerator.device)
        counted()
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(x, y)["loss"]
                if precision == "fp16":  # on one process, the loss of a step is infinite: all skip
                    bad = (epoch, number) == (1, 2) and accelerator.is_main_process
                    loss = loss * torch.tensor(float("inf") if bad else 1.0).to(accelerator.device)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += loss.detach()
            if epoch == 1 and accelerator.is_main_process and accelerator.sync_gradients:
                losses.append(float(total))  # one process reads
        counts.append(counted())
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder / f"accelerate-{precision}-{world}"))
    return {
        "world": (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process),
        "device": str(accelerator.device),
        "weights": [p.detach().cpu() for p in accelerator.unwrap_model(model).parameters()],
        "losses": losses[-1:],
        "counts": counts,
        "scale": accelerator.scaler.get_scale() if precision == "fp16" else None,
        "gathered": accelerator.gather_for_metrics(
            torch.tensor([accelerator.process_index]).to(accelerator.device)
        ).tolist(),
        "reduced": accelerator.reduce(torch.ones((), device=accelerator.device), "sum").item(),
    }


class Bad(Trainer):
    """On one process, the loss of a step is infinite."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(model, inputs, **kwargs)
        if not self.args.fp16 or not model.training:
            return result
        loss, *rest = result if isinstance(result, tuple) else (result,)
        bad = self.state.global_step == 5 and self.args.process_index == 0
        loss = loss * torch.tensor(float("inf") if bad else 1.0).to(loss.device)
        return (loss, *rest) if rest else loss


def train_trainer(folder: Path, precision: str) -> dict[str, Any]:
    world = xm.xrt_world_size()
    data = [{"x": x, "labels": y} for x, y in rows(64)]
    arguments = {
        "per_device_train_batch_size": BATCH // world,
        "per_device_eval_batch_size": BATCH // world,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "logging_steps": 4,
        "save_steps": 12,
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "epoch",
        precision: True,
    }
    place = folder / f"trainer-{precision}-{world}"
    trainer = Bad(network(), TrainingArguments(str(place), **arguments), train_dataset=data, eval_dataset=data)
    trainer.train()
    weights = [p.detach().cpu() for p in trainer.model.parameters()]
    predicted = trainer.predict(data)
    again = Bad(network(), TrainingArguments(str(place), **arguments), train_dataset=data, eval_dataset=data)
    again.train(resume_from_checkpoint=str(place / "checkpoint-12"))
    return {
        "world": (trainer.args.world_size, trainer.args.process_index, trainer.is_world_process_zero()),
        "weights": weights,
        "resumed": [p.detach().cpu() for p in again.model.parameters()],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row][-1:],
        "evals": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
        "scale": trainer.accelerator.scaler.get_scale() if precision == "fp16" else None,
        "predicted": torch.tensor(predicted.predictions),
    }


KINDS = {
    "accelerate-fp16": lambda folder: train_accelerate(folder, "fp16"),
    "accelerate-bf16": lambda folder: train_accelerate(folder, "bf16", 2),
    "trainer-fp16": lambda folder: train_trainer(folder, "fp16"),
    "trainer-bf16": lambda folder: train_trainer(folder, "bf16"),
}


def main(place: str, kinds: list[str]) -> None:
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState, GradientState

    for kind in kinds:
        found = KINDS[kind](Path(place))
        torch.save(found, Path(place) / f"{kind}-{xm.xrt_world_size()}-{xm.get_ordinal()}.pt")
        AcceleratorState._shared_state.clear()
        GradientState._reset_state()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
