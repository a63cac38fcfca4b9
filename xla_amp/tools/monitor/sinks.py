"""Where a monitor's records go: functions of a `StepRecord`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xla_amp.common.types import Dtype
from xla_amp.tools.monitor import history
from xla_amp.tools.monitor.history import StepRecord


class JsonLines:
    """Appends each record to a file of `xla_amp.tools.monitor.history`; a monitor's ``directory`` has one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._low: Dtype | None = None

    def __call__(self, record: StepRecord, low: Dtype) -> None:
        if low != self._low:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            if low != self._low:
                self._low = low
                history.write_header(file, low)
            history.write_steps(file, [record])


class TensorBoard:
    """Writes each record to ``torch.utils.tensorboard.SummaryWriter``, or to an object with its ``add_scalar``.

    Example:
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> sink = TensorBoard(SummaryWriter("runs/1"))  # doctest: +SKIP
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, record: StepRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a record by name, ``activation/h.0.attn/amax``: what TensorBoard, or W&B's ``log``, takes."""
    found: dict[str, float] = {}
    for name in ("loss", "loss_scale", "gradient_norm"):
        value = getattr(record, name)
        if value is not None:
            found[name] = value
    found["skipped"] = float(record.skipped)
    for key, row in record.statistics.items():
        for name in ("amax", "rms", "underflow", "inf", "nan", "headroom", "update_ratio"):
            value = getattr(row, name)
            if value is not None:
                found[f"{key.kind}/{key.layer or 'model'}/{name}"] = value
    return found
