"""Train a LightningModule on handwritten digits, in float32, bfloat16 or float16.

    pip install '.[examples,lightning]'
    python examples/lightning_module.py --precision bf16
    python examples/lightning_module.py --precision fp16 --output run --log-dir logs

The module is an ordinary one.  Importing `xla_amp.integrations.lightning` is what `accelerator="xla_amp"` needs; the
Trainer does the rest: regions of mixed precision, loss scaling, clipping, schedule, validation, checkpoints.  With
`--output` the run saves a checkpoint after every epoch, and a run that finds one goes on from it.  The data are
scikit-learn's bundled digits, so nothing is downloaded.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import common
import lightning
import torch
from absl import app, flags
from lightning.pytorch import callbacks, loggers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import xla_amp
import xla_amp.integrations.torchmetrics  # counts classes without a wait
from xla_amp.integrations.lightning import LossScaleMonitor

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
EPOCHS = flags.DEFINE_integer("epochs", 15, "passes over the training data, those before a checkpoint included")
BATCH_SIZE = flags.DEFINE_integer("batch-size", 64, "images per step", lower_bound=2)
LR = flags.DEFINE_float("lr", 3e-3, "highest learning rate")
LOG_STEPS = flags.DEFINE_integer("log-steps", 20, "steps between two lines of the log", lower_bound=1)
LOG_DIR = flags.DEFINE_string("log-dir", None, "write losses, learning rates and loss scales here (TensorBoard, CSV)")
OUTPUT = flags.DEFINE_string("output", None, "folder of checkpoints: the run goes on from the last one there")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights, shuffling and dropout")
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

NAMES: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}  # Lightning's


class Digits(lightning.LightningModule):
    """Images float32 [batch, 1, 8, 8] -> logits [batch, 10]."""

    def __init__(self, lr: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps = lr, steps
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        self.log("lr", self.lr_schedulers().get_last_lr()[0], prog_bar=True)  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of one shape to train on, and to validate with."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    every = TensorDataset((images - images.mean()) / images.std(), torch.from_numpy(digits.target))
    held_out, train = random_split(every, [320, len(every) - 320], torch.Generator().manual_seed(0))
    return DataLoader(train, BATCH_SIZE.value, shuffle=True, drop_last=True), DataLoader(held_out, 160)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    lightning.seed_everything(SEED.value, verbose=False)
    train, held_out = data()
    if not len(train):
        raise app.UsageError(f"--batch-size={BATCH_SIZE.value} is more than the training images")
    # The bar reads what it shows, so it is drawn now and then.
    called: list[lightning.Callback] = [callbacks.TQDMProgressBar(refresh_rate=LOG_STEPS.value)]
    if PRECISION.value == "fp16":
        called.append(LossScaleMonitor(prog_bar=True))
    last = None
    if OUTPUT.value is not None:
        best: dict[str, Any] = {"monitor": "accuracy", "mode": "max", "save_top_k": 2}
        called.append(callbacks.ModelCheckpoint(OUTPUT.value, save_last=True, **best))
        path = Path(OUTPUT.value) / "last.ckpt"
        last = path if path.exists() else None
    kinds = (loggers.CSVLogger, loggers.TensorBoardLogger)
    trainer = lightning.Trainer(
        accelerator="xla_amp",
        precision=NAMES[PRECISION.value],
        max_epochs=EPOCHS.value,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=LOG_STEPS.value,
        callbacks=called,
        logger=False if LOG_DIR.value is None else [kind(LOG_DIR.value, name="", version="") for kind in kinds],
        enable_checkpointing=OUTPUT.value is not None,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    trainer.fit(Digits(LR.value, EPOCHS.value * len(train)), train, held_out, ckpt_path=last, weights_only=False)
    seconds = time.perf_counter() - began
    results = {
        "precision": PRECISION.value,
        "device": str(trainer.strategy.root_device),
        "resumed_from": last and last.name,
        "steps": trainer.global_step,
        **{name: float(value) for name, value in trainer.callback_metrics.items()},
        "compilations": xla_amp.metrics()["compilations"],
        "seconds": seconds,
    }
    common.show(f"LightningModule, {EPOCHS.value} epochs", results, JSON.value)


if __name__ == "__main__":
    common.run(main)
