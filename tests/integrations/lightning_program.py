"""Trains in processes with Lightning and Fabric: ``python lightning_program.py FOLDER WORLD KIND...``.

Each writes what it saw of each kind to FOLDER/KIND-WORLD-RANK.pt.  One alone takes batches WORLD times as large.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from small_training import counted, layers, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import xla_amp
import xla_amp.integrations.lightning
from xla_amp import xla_model as xm

BATCH = 8  # of all processes together


def loader() -> DataLoader[Any]:
    """Eight batches: with a sampler that takes every second row, two processes together see those of one."""
    data = rows(64)
    sampler = DistributedSampler(data, xm.xrt_world_size(), xm.get_ordinal(), shuffle=False)
    return DataLoader(data, BATCH // xm.xrt_world_size(), sampler=sampler)


def network() -> nn.Module:
    torch.manual_seed(xm.get_ordinal())  # rank 0's weights are everybody's
    return layers()


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        if self.trainer.scaler_is_used:  # on one process, the loss of a step is infinite: all skip
            bad = self.trainer.global_step == 5 and self.global_rank == 0
            loss = loss * torch.tensor(float("inf") if bad else 1.0).to(self.device)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self.body(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Counts(lightning.Callback):
    """Executions, host syncs and compilations of each epoch's training steps."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        counted()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.found.append(counted())


def train_lightning(folder: Path, precision: Any, accumulate: int = 1, bar: bool = False) -> dict[str, Any]:
    counts = Counts()
    trainer = lightning.Trainer(
        accelerator="xla_amp",
        precision=precision,
        max_epochs=3,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
        callbacks=[counts],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bar,  # rank 0 alone reads values
        num_sanity_val_steps=0,
    )
    trainer.scaler_is_used = precision == "16-mixed"
    model = Net()
    trainer.fit(model, loader(), loader())
    trainer.save_checkpoint(folder / f"lightning-{xm.xrt_world_size()}.ckpt")
    return {
        "device": str(trainer.strategy.root_device),
        "world": (trainer.world_size, trainer.global_rank, trainer.is_global_zero),
        "weights": [p.detach().cpu() for p in model.parameters()],
        "val": trainer.callback_metrics["val"].cpu(),
        "counts": counts.found,
        "scale": trainer.precision_plugin.scaler.get_scale() if precision == "16-mixed" else None,
        "gathered": trainer.strategy.all_gather(torch.tensor([trainer.global_rank])).cpu(),
        "any": trainer.strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False),
        "all": trainer.strategy.reduce_boolean_decision(trainer.global_rank == 0),
    }


def train_fabric(folder: Path, precision: Any) -> dict[str, Any]:
    fabric = lightning.Fabric(accelerator="xla_amp", precision=precision)
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    batches = fabric.setup_dataloaders(loader())
    counts = []
    for _ in range(3):
        counted()
        for number, (x, y) in enumerate(batches):
            last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last) if fabric.world_size > 1 else torch.enable_grad():
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
        counts.append(counted())
    fabric.save(folder / f"fabric-{fabric.world_size}.ckpt", {"model": model})
    return {
        "world": (fabric.world_size, fabric.global_rank, fabric.is_global_zero),
        "weights": [p.detach().cpu() for p in model.parameters()],
        "counts": counts,
        "sum": fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum").cpu(),
        "told": fabric.broadcast(f"from {fabric.global_rank}", 0),
    }


KINDS = {
    "lightning-fp16": lambda folder: train_lightning(folder, "16-mixed"),
    "lightning-accumulated": lambda folder: train_lightning(folder, "bf16-mixed", 2),
    "lightning-bar": lambda folder: train_lightning(folder, "bf16-mixed", 2, bar=True),
    "fabric-fp16": lambda folder: train_fabric(folder, "16-mixed"),
}


def main(rank: int, folder: str, kinds: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    for kind in kinds:
        found = KINDS[kind](Path(folder))
        torch.save(found, Path(folder) / f"{kind}-{xm.xrt_world_size()}-{rank}.pt")


if __name__ == "__main__":
    place, world, *wanted = sys.argv[1:]
    if world == "1":
        main(0, place, wanted)
    else:
        xla_amp.launch(main, int(world), (place, wanted))
