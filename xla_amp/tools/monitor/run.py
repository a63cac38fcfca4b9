"""The host's half of a monitor, the same on every front: its options, and the records of its run."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from xla_amp.tools.monitor import advice, bad_step, history_report, table
from xla_amp.tools.monitor.bad_step import BadStep
from xla_amp.tools.monitor.history import History, StepRecord
from xla_amp.tools.monitor.sinks import JsonLines
from xla_amp.types import DTYPES, VALUE_KINDS, Dtype, ValueKind

SAMPLE: Final = 50
"""By default the statistics are computed in one step of this many: they read all activations, gradients, weights and
updates once, which takes up to the time of a step itself where memory is slow."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Arguments of a front's `monitor`; `of` makes them of what a user wrote."""

    every: int
    history: int
    layers: tuple[str, ...]
    kinds: tuple[ValueKind, ...]
    sample: int
    directory: Path | None = None
    low: Dtype | None = None
    save_state: bool = False
    sinks: tuple[Callable[[StepRecord], object], ...] = ()
    first_step: int = 0

    @classmethod
    def of(
        cls,
        *,
        layers: str | Iterable[str],
        kinds: Iterable[ValueKind],
        directory: str | Path | None,
        sinks: Iterable[Callable[[StepRecord], object]],
        low: Dtype | None,
        save_state: bool,
        **numbers: int,
    ) -> Options:
        """The options, checked.

        Raises:
            ValueError: a number is out of its range, or a name of `kinds` or `low` is unknown.
        """
        for name, number in numbers.items():
            least = 0 if name == "first_step" else 1
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"monitor({name}={number!r}): expected an integer of at least {least}")
        kinds = tuple(kinds)
        if unknown := set(kinds) - set(VALUE_KINDS):
            raise ValueError(
                f"monitor(kinds={kinds!r}): unknown {sorted(unknown)}; expected some of {list(VALUE_KINDS)}"
            )
        if low is not None and low not in DTYPES:
            raise ValueError(f"monitor(low={low!r}): expected one of {list(DTYPES)}")
        if save_state and directory is None:
            raise ValueError("monitor(save_state=True): nothing is kept without a directory; pass directory=")
        return cls(
            layers=(layers,) if isinstance(layers, str) else tuple(layers),
            kinds=kinds,
            directory=None if directory is None else Path(directory),
            sinks=tuple(sinks),
            low=low,
            save_state=save_state,
            **numbers,
        )


class Run:
    """The steps of a run that are known, and its first bad one.

    Args:
        options: of the monitor.
        process: gives the rank of this process and the number of processes, once steps have run.
    """

    def __init__(self, options: Options, process: Callable[[], tuple[int, int]]) -> None:
        self.options = options
        self.process = process
        self.low: Dtype | None = options.low
        self.bad_step: Path | None = None
        self.checkpoints: deque[tuple[str, int]] = deque(maxlen=1000)
        """Paths of the last checkpoints, and for each the number of the step before which it was saved."""
        self._records: deque[StepRecord] = deque(maxlen=max(options.history * options.sample, options.every))
        self._good: StepRecord | None = None
        self._file: JsonLines | None = None

    @property
    def history(self) -> History:
        """The last records."""
        return History(low=self.low or "float32", steps=list(self._records))

    def judged(self, record: StepRecord) -> str:
        """Why a step is bad, as in `BadStep.reason`, or empty; takes every step, in order."""
        reason = bad_step.reason(self._good, record)
        self._good = self._good if record.skipped else record
        return reason

    def add(self, record: StepRecord) -> None:
        """Takes a complete record, in order, and hands it to the file and the sinks."""
        self._records.append(record)
        if self._file is None and self.options.directory is not None:
            rank, _ = self.process()
            self._file = JsonLines(self.options.directory / (f"history_rank_{rank}.jsonl" if rank else "history.jsonl"))
        if self._file is not None:
            self._file(record, self.low or "float32")
        for sink in self.options.sinks:
            sink(record)

    def described(
        self,
        record: StepRecord,
        reason: str,
        *,
        front: str,
        local: bool | None,
        versions: Mapping[str, str],
        sampled: bool,
        kept: bool,
    ) -> BadStep:
        """What is known of a bad step; `kept` tells whether the state before it is."""
        # A bad step is found when later ones have run, after which the loop may have saved its state.
        earlier = [each for each in self.checkpoints if each[1] <= record.step]
        path, step = earlier[-1] if earlier else (None, None)
        rank, world_size = self.process()
        return BadStep(
            front=front,
            step=record.step,
            rank=rank,
            world_size=world_size,
            reason=reason,
            local=True if world_size == 1 else local,
            loss=record.loss,
            loss_scale=record.loss_scale,
            gradient_norm=record.gradient_norm,
            low=self.low or "float32",
            versions=versions,
            options={"layers": list(self.options.layers), "kinds": list(self.options.kinds), "sampled": sampled},
            state="kept" if kept else "checkpoint" if path is not None else "none",
            checkpoint=path,
            checkpoint_step=step,
        )


class BaseMonitor(abc.ABC):
    """What the monitors of all fronts tell of their runs."""

    def __init__(self, options: Options, process: Callable[[], tuple[int, int]]) -> None:
        self._options = options
        self._run = Run(options, process)

    @property
    def bad_step(self) -> Path | None:
        """The folder of the first bad step of this process, once it is kept."""
        return self._run.bad_step

    @property
    def history(self) -> History:
        """What has been read so far."""
        return self._run.history

    @abc.abstractmethod
    def read(self) -> History:
        """Waits for everything recorded so far, and returns the history."""

    def advice(self) -> list[advice.Advice]:
        """What the history says that you may want to change."""
        return advice.advice(self.history)

    def table(self) -> str:
        """The newest statistics as a table for the terminal."""
        return table.text(self.history)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes what has been read so far as one HTML file, which loads nothing.

        Raises:
            MissingLibraryError: jinja2 is not installed.
            FileError: the file cannot be written.
        """
        history_report.write(self.history, path, self.bad_step)

    def saved(self, checkpoint: str | Path) -> None:
        """Tells that the run has just saved a checkpoint: a bad step refers to it."""
        self._run.checkpoints.append((str(checkpoint), self._next_step()))

    @abc.abstractmethod
    def _next_step(self) -> int:
        """The number of the next step."""
