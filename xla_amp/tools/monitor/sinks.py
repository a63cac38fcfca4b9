"""Where a monitor's records go: functions of a `StepRecord`."""

from __future__ import annotations

import dataclasses
from typing import Any

from xla_amp.tools.monitor.history import COURSES, StepRecord


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Writes each record to ``torch.utils.tensorboard.SummaryWriter``, or to an object with its ``add_scalar``."""

    writer: Any

    def __call__(self, record: StepRecord) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record.step)


@dataclasses.dataclass(frozen=True)
class WandB:
    """Writes each record to a run of Weights & Biases, as ``wandb.init()`` gives, or to an object with its ``log``."""

    run: Any

    def __call__(self, record: StepRecord) -> None:
        self.run.log(scalars(record), step=record.step)


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a record by name: ``loss``, ``skipped``, ``largest/h.0.attn``, ..."""
    found = {name: value for name in COURSES if (value := getattr(record, name)) is not None}
    found |= {"skipped": float(record.skipped), "nonfinite_parameters": float(len(record.nonfinite))}
    return found | {f"largest/{layer or 'model'}": value for layer, value in record.largest.items()}
