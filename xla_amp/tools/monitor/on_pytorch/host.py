"""The host's half of a monitor: takes what arrives from the device, makes records, and keeps the first bad step."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import NamedTuple

import torch

from xla_amp.errors import XlaAmpError
from xla_amp.tools.monitor.history import Statistics, StepRecord, Sums
from xla_amp.tools.monitor.on_pytorch import kept_step
from xla_amp.tools.monitor.on_pytorch.ring import Rows
from xla_amp.tools.monitor.on_pytorch.running_step import Step
from xla_amp.tools.monitor.run import Run


class StepCountError(XlaAmpError, RuntimeError):
    """Blocks of ``monitor.step`` that do not hold one optimizer step each."""


class _Bad(NamedTuple):
    """The first bad step, until the ring buffer with its statistics has arrived."""

    step: Step
    record: StepRecord
    reason: str
    local: bool


class Host:
    """Joins the status of each step with its row of the ring buffer, in order, and gives the run its records.

    Args:
        run: takes the records.
        optimizer: whether the steps are those of an optimizer, and have a norm of gradients.
        scaler: whether they have a loss scale.
    """

    def __init__(self, run: Run, *, optimizer: bool, scaler: bool) -> None:
        self._run, self._optimizer, self._scaler = run, optimizer, scaler
        self._steps: deque[Step] = deque()
        """Steps whose status has not arrived."""
        self._records: deque[StepRecord] = deque()
        """Steps whose row has not arrived."""
        self._rows: deque[tuple[int, Rows]] = deque()
        """Reads of the ring buffer, each with the step before which it was started."""
        self._bad: _Bad | None = None

    @property
    def looks_for_bad_step(self) -> bool:
        """Whether a bad step would be kept."""
        return self._run.options.directory is not None and self._run.bad_step is None and self._bad is None

    @property
    def waits_for_rows(self) -> bool:
        """Whether a read of the ring buffer has been started and not been taken."""
        return bool(self._rows)

    def expect_step(self, step: Step) -> None:
        """A step has ended and is being read."""
        self._steps.append(step)

    def expect_rows(self, until: int, rows: Rows) -> None:
        """The ring buffer is being read; it has the steps before `until`."""
        self._rows.append((until, rows))

    def take_steps(self, wait: bool) -> bool:
        """Takes each status that has arrived, or waits for all; returns whether the first bad step is among them.

        Raises:
            StepCountError: the device has counted other steps than the host.
        """
        found = False
        while self._steps and (wait or self._steps[0].ready()):
            found |= self._take(self._steps.popleft())
        return found

    def _take(self, step: Step) -> bool:
        found = step.read()
        if found is None:
            return False
        loss, (number, skipped, scale, norm, local) = found
        first = self._run.options.first_step
        record = StepRecord(
            step=first + int(number),
            loss=loss,
            loss_scale=scale if self._scaler else None,
            skipped=bool(skipped),
            gradient_norm=norm if self._optimizer else None,
        )
        if record.step != step.number:
            raise StepCountError(
                f"monitor: {step.number + 1 - first} `with monitor.step(...)` blocks or steps of the optimizer "
                f"have ended, and the device counts {int(number) + 1} steps: put one optimizer step, with all its "
                "micro-batches, into one block"
            )
        self._records.append(record)
        reason = self._run.judged(record)
        if not (reason and step.before is not None and self.looks_for_bad_step):
            return False
        self._bad = _Bad(step, record, reason, bool(local))
        return True

    def take_rows(self, wait: bool) -> None:
        """Takes each ring buffer that has arrived and whose steps have too, or waits for all."""
        while self._rows:
            until, rows = self._rows[0]
            if not (wait or rows.read is None or rows.read.ready()):
                break
            if self._steps and self._steps[0].number < until:
                break
            self._rows.popleft()
            self._complete(until, rows)

    def _complete(self, until: int, rows: Rows) -> None:
        """Gives the records before the step `until` their statistics, and hands them to the run."""
        self._run.low = rows.low
        value: torch.Tensor | None = None if rows.read is None else rows.read.value()
        written = [] if value is None else [row for row in value.tolist() if row[-1][-1]]
        found = {self._run.options.first_step + int(row[0][0]): row[1:] for row in written}
        while self._records and self._records[0].step < until:
            record = self._records.popleft()
            lines = found.get(record.step)
            if lines is not None:
                sums = {key: Sums(*line) for key, line in zip(rows.keys, lines, strict=True)}
                statistics = Statistics.of_layers(sums, rows.low, record.loss_scale)
                record = dataclasses.replace(record, statistics=statistics)
            self._run.add(record)
        if self._bad is not None and self._bad.record.step < until:
            self._keep(self._bad)

    def _keep(self, bad: _Bad) -> None:
        self._bad = None
        directory = self._run.options.directory
        if directory is None:
            return
        history = self._run.history
        steps = [each for each in history.steps if each.step <= bad.record.step]
        record = next((each for each in reversed(steps) if each.step == bad.record.step), bad.record)
        own = any(not row.finite for key, row in record.statistics.items() if key.kind == "activation")
        self._run.bad_step = kept_step.write(
            directory,
            self._run,
            bad.step.batch,
            bad.step.before,
            dataclasses.replace(history, steps=steps),
            record,
            reason=bad.reason,
            local=own or bad.local,
            sampled=bad.step.sampled,
        )
