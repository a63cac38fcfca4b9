"""The host's half of a monitor, the same on every front: options, records of the run, the first bad step."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from xla_amp.common.types import DTYPES, VALUE_KINDS, Dtype, ValueKind
from xla_amp.report import page
from xla_amp.report.document import Document
from xla_amp.report.shown import Shown
from xla_amp.tools.monitor import advice, bad_step, history_report
from xla_amp.tools.monitor.bad_step import BadStep
from xla_amp.tools.monitor.history import History, StepRecord
from xla_amp.tools.monitor.sinks import JsonLines

SAMPLE: Final = 50
"""By default the statistics are computed in one step of this many: they read all activations, gradients, weights and
updates once, which takes up to the time of a step itself where memory is slow."""


@dataclasses.dataclass(kw_only=True)
class Options:
    """Arguments of a front's `monitor`, as it documents them.

    Raises:
        ValueError: a number is out of its range, or a name of `kinds` or `low` is unknown.
    """

    history: int = 64
    layers: str | Iterable[str] = "*"
    kinds: Iterable[ValueKind] = VALUE_KINDS
    sample: int = SAMPLE
    directory: str | Path | None = None
    low: Dtype | None = None
    save_state: bool = False
    sinks: Iterable[Callable[[StepRecord], object]] = ()
    first_step: int = 0

    def __post_init__(self) -> None:
        for name, least in (("history", 1), ("sample", 1), ("first_step", 0)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"monitor({name}={number!r}): expected an integer of at least {least}")
        self.layers = (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)
        self.kinds = tuple(self.kinds)
        self.sinks = tuple(self.sinks)
        self.directory = None if self.directory is None else Path(self.directory)
        if unknown := set(self.kinds) - set(VALUE_KINDS):
            expected = f"expected some of {list(VALUE_KINDS)}"
            raise ValueError(f"monitor(kinds={self.kinds!r}): unknown {sorted(unknown)}; {expected}")
        if self.low is not None and self.low not in DTYPES:
            raise ValueError(f"monitor(low={self.low!r}): expected one of {list(DTYPES)}")
        if self.save_state and self.directory is None:
            raise ValueError("monitor(save_state=True): nothing is kept without a directory; pass directory=")


class Waiting(Protocol):
    """A step that has ended and whose numbers are on their way to the host."""

    sampled: bool
    """Whether it has statistics."""
    kept: Any
    """What a replay needs of it, while it may turn out bad; otherwise None."""

    def ready(self) -> bool:
        """Whether `record` does not wait."""

    def record(self) -> tuple[StepRecord, Dtype] | None:
        """The record of the step, and the low dtype of its statistics; None if the step failed."""


class BaseMonitor(Shown):
    """The steps of a run that are known, and its first bad one.

    Args:
        options: of the monitor.
        process: gives the rank of this process and the number of processes, once steps have run.
    """

    front: str
    """As in `BadStep`."""

    def __init__(self, options: Options, process: Callable[[], tuple[int, int]]) -> None:
        self.bad_step: Path | None = None
        """The folder of the first bad step of this process, once it is kept."""
        self._options = options
        self._process = process
        self._next_step = options.first_step
        self._low: Dtype | None = options.low
        self._waiting: deque[Any] = deque()
        """A `Waiting` for each step that has not been read, in order."""
        self._records: deque[StepRecord] = deque(maxlen=options.history * options.sample)
        self._good: StepRecord | None = None
        """The last step that was not skipped."""
        self._file: JsonLines | None = None
        self._checkpoints: deque[tuple[str, int]] = deque(maxlen=1000)
        """Paths of the last checkpoints, and for each the number of the step before which it was saved."""

    @property
    def history(self) -> History:
        """What has been read so far."""
        return History(low=self._low or "float32", steps=list(self._records))

    def read(self) -> History:
        """Waits for everything recorded so far, and returns the history."""
        self._collect(wait=True)
        return self.history

    def advice(self) -> list[advice.Advice]:
        """What the history says that you may want to change."""
        return advice.advice(self.history)

    def table(self) -> str:
        """The newest statistics as a table for the terminal."""
        return str(self)

    def document(self) -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""
        return history_report.document(self.history)

    def to_html(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Writes what has been read so far as one HTML file, which loads nothing.

        Args:
            path: of the file.
            title: of the page; None: the last step.

        Raises:
            MissingLibraryError: jinja2 is not installed.
            FileError: the file cannot be written.
        """
        document = self.document()
        if self.bad_step is not None:
            address = Path(os.path.relpath(self.bad_step, Path(path).resolve().parent)).as_posix()
            document = dataclasses.replace(document, link=("the first bad step is kept here", address))
        page.write(dataclasses.replace(document, title=title or document.title), path)

    def saved(self, checkpoint: str | Path) -> None:
        """Tells that the run has just saved a checkpoint: a bad step refers to it."""
        self._checkpoints.append((str(checkpoint), self._next_step))

    @property
    def _looks_for_bad_step(self) -> bool:
        return self._options.directory is not None and self.bad_step is None

    def _is_sampled(self, step: int) -> bool:
        return (step - self._options.first_step) % self._options.sample == 0

    def _collect(self, *, wait: bool) -> None:
        """Takes the steps whose numbers have arrived, or waits for all."""
        while self._waiting and (wait or self._waiting[0].ready()):
            waiting = self._waiting.popleft()
            found = waiting.record()
            if found is None:
                continue
            record, self._low = found
            reason = bad_step.reason(self._good, record)
            self._good = self._good if record.skipped else record
            self._add(record)
            if reason and waiting.kept is not None and self._looks_for_bad_step:
                self._keep(waiting, record, reason)

    def _add(self, record: StepRecord) -> None:
        """Takes a record, in order, and hands it to the file and the sinks."""
        self._records.append(record)
        directory = self._options.directory
        if self._file is None and directory is not None:
            rank, _ = self._process()
            self._file = JsonLines(Path(directory) / (f"history_rank_{rank}.jsonl" if rank else "history.jsonl"))
        if self._file is not None:
            self._file(record, self._low or "float32")
        for sink in self._options.sinks:
            sink(record)

    def _keep(self, waiting: Waiting, record: StepRecord, reason: str) -> None:
        """Writes the folder of a bad step."""
        # A bad step is found when later ones have run, after which the loop may have saved its state.
        earlier = [each for each in self._checkpoints if each[1] <= record.step]
        path, step = earlier[-1] if earlier else (None, None)
        rank, world_size = self._process()
        state = "kept" if self._options.save_state else "checkpoint" if path is not None else "none"
        options = {"layers": self._options.layers, "kinds": self._options.kinds, "sampled": waiting.sampled}
        bad = BadStep(
            front=self.front,
            step=record.step,
            rank=rank,
            world_size=world_size,
            reason=reason,
            local=True if world_size == 1 else self._is_local(waiting, record),
            loss=record.loss,
            loss_scale=record.loss_scale,
            gradient_norm=record.gradient_norm,
            low=self._low or "float32",
            versions=self._versions(),
            options=options,
            state=state,
            checkpoint=path,
            checkpoint_step=step,
        )
        folder = bad_step.folder(Path(self._options.directory or ""), record.step, rank)
        folder.mkdir(parents=True, exist_ok=True)
        more = self._write(folder, waiting)
        bad_step.write(folder, dataclasses.replace(bad, options={**options, **more}), self.history)
        self.bad_step = folder
        for other in self._waiting:  # frees what later steps keep
            other.kept = None

    @abc.abstractmethod
    def _write(self, folder: Path, waiting: Any) -> Mapping[str, Any]:
        """Writes what a replay of the step needs into its folder; returns further `BadStep.options`."""

    @abc.abstractmethod
    def _versions(self) -> dict[str, str]:
        """Versions of the packages whose change can change a number."""

    def _is_local(self, waiting: Any, record: StepRecord) -> bool | None:
        """Whether this process itself made the inf or NaN, if that is known."""
        return None
