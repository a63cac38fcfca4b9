"""The host's half of a monitor, the same on every front: records of the run, and the first bad step."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from xla_amp.common import events
from xla_amp.tools.monitor.history import History, StepRecord


class HostMonitor(abc.ABC):
    """The steps of a run that are known, and its first bad one; fronts document the arguments."""

    find: ClassVar[str]
    """How users call the front's `find_overflow`; ``{}`` is the argument for the kept step."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        sinks: Iterable[Callable[[StepRecord], object]],
    ) -> None:
        self.kept: Path | None = None
        """The folder of the first bad step, once it is kept."""
        self._directory = None if directory is None else Path(directory)
        self._sinks = tuple(sinks)
        self._next_step = 0
        self._waiting: deque[Any] = deque()
        """Steps that have not been read, in order: objects with ``ready()`` and ``record()``, None if a step failed."""
        self._records: deque[StepRecord] = deque(maxlen=1000)
        self._good: StepRecord | None = None
        """The last step that was not skipped."""
        self._guarded = True
        """Whether a step with an inf or NaN leaves the state as it is."""

    @property
    def history(self) -> History:
        """What has been read so far."""
        return History(list(self._records))

    def read(self) -> History:
        """Waits for everything recorded so far, and returns the history."""
        self._collect(wait=True)
        return self.history

    @property
    def _keeps(self) -> bool:
        """Whether a bad step would be kept now."""
        return self._directory is not None and self._guarded and self.kept is None

    def _collect(self, *, wait: bool) -> None:
        """Takes the steps whose numbers have arrived, or waits for all."""
        while self._waiting and (wait or self._waiting[0].ready()):
            waiting = self._waiting.popleft()
            record = waiting.record()
            if record is None:
                continue
            record = dataclasses.replace(record, bad=is_bad(self._good, record))
            first = record.bad and not (self._records and self._records[-1].bad)
            self._good = self._good if record.skipped else record
            self._records.append(record)
            for sink in self._sinks:
                sink(record)
            if first:
                events.warn(f"monitor: step {record.step:,} is bad: {record.what()}. {self._keep(waiting, record)}")

    def _keep(self, waiting: Any, record: StepRecord) -> str:
        """Keeps a bad step if it can; returns what to type."""
        find = f"Type {self.find.format('')} to find the operation"
        if not self._keeps or not record.skipped or self._directory is None:
            hint = "" if self._directory or not self._guarded else "; monitor(..., directory=...) keeps the next one"
            return f"{find}{hint}"
        folder = self._directory / f"step-{record.step}"
        try:
            self._save(folder, waiting, record)
        except Exception as error:  # a run must not end because its bad step cannot be written
            return f"{find}; it could not be kept: {type(error).__name__}: {error}"
        self.kept = folder
        return f"Its update was skipped. Type {self.find.format(f', kept={str(folder)!r}')} to find the operation"

    def _says_unguarded(self, instead: str) -> None:
        """Says once that no bad step can be kept, if one was to be."""
        self._guarded = False
        if self._directory is not None:
            events.warn(
                f"monitor(directory={str(self._directory)!r}): nothing guards the update, so the state before a bad "
                f"step is gone after it, and none is kept. {instead}"
            )

    @abc.abstractmethod
    def _save(self, folder: Path, waiting: Any, record: StepRecord) -> None:
        """Writes the state, which is that before the bad step, and what the step was given."""


def is_bad(good: StepRecord | None, record: StepRecord) -> bool:
    """`StepRecord.bad`; `good` is the last one before it that was not skipped, None while the first scale is sought."""
    if record.loss is not None and not math.isfinite(record.loss):
        return True  # dynamic scaling overflows the scaled loss; the loss itself stays finite
    if record.skipped:
        scale = record.loss_scale
        return scale is None or (good is not None and scale <= (good.loss_scale or 0.0))
    norm = record.gradient_norm
    return record.loss_scale is None and norm is not None and not math.isfinite(norm)
