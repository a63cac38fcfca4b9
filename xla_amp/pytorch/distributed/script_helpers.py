"""What torch_xla's example scripts take from it to feed, time and log a loop: rates, fake batches, summaries."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from xla_amp.engines import base
from xla_amp.pytorch.distributed import xla_model


class RateTracker:
    """Examples a second: since the last call of `rate`, smoothed, and in all.

    Args:
        smooth_factor: weight of the rate before, from 0 to 1; None is 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth_factor = 0.4 if smooth_factor is None else smooth_factor
        self._start = self._last = time.perf_counter()
        self._total = self._new = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Counts so many examples more."""
        self._new += count

    def rate(self) -> float:
        """Examples a second since the last call."""
        now = time.perf_counter()
        current = self._new / max(now - self._last, 1e-9)
        before = current if self._rate is None else self._rate
        self._rate = (1 - self._smooth_factor) * current + self._smooth_factor * before
        self._total, self._new, self._last = self._total + self._new, 0.0, now
        return self._rate

    def global_rate(self) -> float:
        """Examples a second since the start."""
        return (self._total + self._new) / max(time.perf_counter() - self._start, 1e-9)


class SampleGenerator:
    """A loader that gives the same batch again and again.

    Args:
        data: the batch.
        sample_count: how often.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self.data = data
        self.sample_count = sample_count

    def __len__(self) -> int:
        return self.sample_count

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data] * self.sample_count)


def now(format: str = "%H:%M:%S") -> str:
    """The time of the day."""
    return time.strftime(format)


def get_summary_writer(logdir: str | None) -> Any:
    """A writer of TensorBoard's files in a folder; None without one."""
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(logdir)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Writes scalars, and with `write_xla_metrics` the counters of `xla_amp.metrics`, if there is a writer."""
    counters = base.metrics() if write_xla_metrics else {}
    for name, value in {**(dict_to_write or {}), **counters}.items():
        if summary_writer is not None:
            summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Closes the writer, if there is one."""
    if summary_writer is not None:
        summary_writer.close()


def print_training_update(
    device: Any,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Prints a line about a training step, and writes its rates, if there is a writer."""
    parts = {"Epoch": epoch, "Step": step, "Loss": f"{loss:.5f}", "Rate": f"{rate:.2f}"}
    _print_line("Training", device, {**parts, "GlobalRate": f"{global_rate:.2f}"})
    write_to_summary(summary_writer, step, {"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None) -> None:
    """Prints a line about an evaluation."""
    shown = None if accuracy is None else f"{accuracy:.2f}"
    _print_line("Test", device, {"Step": step, "Epoch": epoch, "Accuracy": shown})


def _print_line(kind: str, device: Any, parts: Mapping[str, Any]) -> None:
    shown = {"Device": f"{device}/{xla_model.get_ordinal()}", **parts, "Time": now()}
    sys.stdout.write(
        " ".join(["|", kind, *(f"{name}={each}" for name, each in shown.items() if each is not None)]) + "\n"
    )
    sys.stdout.flush()
