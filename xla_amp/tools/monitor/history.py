"""The host's half of a monitor, the same on every front: records of steps, and their report."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from xla_amp.common import arguments, events
from xla_amp.common.tables import Table
from xla_amp.errors import MissingLibraryError
from xla_amp.pages.page import Page, Report, Section

COURSES: Final = ("loss", "gradient_norm", "loss_scale")
"""Numbers of a step that the report begins with."""
_MOST: Final = 8
"""Bad steps that the report begins with."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step."""

    step: int
    """Number of the step, from 0."""
    loss: float | None = None
    """None where the loop does not tell it."""
    loss_scale: float | None = None
    """The scale that the step used; None without a scaler."""
    skipped: bool = False
    gradient_norm: float | None = None
    """2-norm of all gradients that the optimizer got, unscaled."""
    nonfinite: tuple[str, ...] = ()
    """Parameters with an inf or NaN in their gradients, or a norm beyond float32."""
    largest: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Path of a layer -> largest magnitude of what it returned, in the order in which layers returned; inf or NaN if a
    value was that."""
    bad: bool = False
    """The loss is not finite, the update was skipped although the scale had not just grown, or nothing guarded the
    update and a gradient was not finite."""

    @classmethod
    def of(cls, step: int, numbers: Mapping[str, float], loss: float | None = None) -> StepRecord:
        """The record of numbers by name; those of parameters are ``nonfinite/NAME``, of layers ``largest/PATH``."""

        def of(kind: str) -> dict[str, float]:
            return {name.removeprefix(kind): number for name, number in numbers.items() if name.startswith(kind)}

        return cls(
            step=step,
            loss=numbers.get("loss", loss),
            loss_scale=numbers.get("loss_scale"),
            skipped=bool(numbers.get("skipped")),
            gradient_norm=numbers["gradient_norm"],
            nonfinite=tuple(name for name, number in of("nonfinite/").items() if number),
            largest=of("largest/"),
        )

    def scalars(self) -> dict[str, float]:
        """The numbers by name, for TensorBoard and its like: ``loss``, ``skipped``, ``largest/h.0.attn``, ..."""
        found = {name: value for name in COURSES if (value := getattr(self, name)) is not None}
        found |= {"skipped": float(self.skipped), "nonfinite_parameters": float(len(self.nonfinite))}
        return found | {f"largest/{layer or 'model'}": value for layer, value in self.largest.items()}

    def what(self) -> str:
        """What is not finite in the step, and where."""
        parts = []
        if self.loss is not None and not math.isfinite(self.loss):
            parts.append(f"the loss is {self.loss}")
        layer = next((layer for layer, value in self.largest.items() if not math.isfinite(value)), None)
        if layer is not None:
            parts.append(f"the first layer with an inf or NaN is {layer or 'the model'}")
        if self.nonfinite:
            shown = ", ".join(self.nonfinite[:3]) + (", ..." if len(self.nonfinite) > 3 else "")
            parts.append(f"not finite are the gradients of {shown} ({len(self.nonfinite)} parameters)")
        return "; ".join(parts) or "gradients are not finite"


@dataclasses.dataclass(frozen=True)
class History(Report):
    """Records of steps, oldest first; ``print(history)`` for people."""

    steps: Sequence[StepRecord]

    def of(self, name: str) -> list[Any]:
        """One field of `StepRecord` over the steps."""
        return [getattr(record, name) for record in self.steps]

    def plot(self) -> Any:
        """Draws loss, gradient norm and loss scale over the steps, bad steps in red.

        Returns:
            A ``matplotlib.figure.Figure``: ``savefig("run.png")`` writes it, and a notebook shows it.

        Raises:
            MissingLibraryError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingLibraryError("history.plot(): matplotlib is not installed: pip install matplotlib") from None
        courses = [name for name in COURSES if any(value is not None for value in self.of(name))]
        figure = Figure(figsize=(8, 2 * max(len(courses), 1)), layout="constrained")
        for number, name in enumerate(courses, 1):
            axes = figure.add_subplot(len(courses), 1, number, xlabel="step", ylabel=name.replace("_", " "))
            axes.plot(self.of("step"), [math.nan if value is None else value for value in self.of(name)], linewidth=1)
            for record in self.steps:
                if record.bad:
                    axes.axvline(record.step, color="red", linewidth=1)
        return figure

    def page(self) -> Page:
        """The report for people."""
        if not self.steps:
            return Page("no step has been read yet")
        steps, last = self.of("step"), self.steps[-1]
        bad = [record for record in self.steps if record.bad]
        known = {name.replace("_", " "): getattr(last, name) for name in COURSES}
        newest = [f"{name} {value:.5g}" for name, value in known.items() if value is not None]
        facts = {"steps": f"{steps[0]:,} to {last.step:,}", "skipped steps": f"{sum(self.of('skipped')):,}"}
        items = [(f"step {record.step:,}", record.what()) for record in bad[:_MOST]]
        answer = f"{len(bad):,} of {len(steps):,}" if bad else "none"
        return Page(
            ", ".join([f"step {last.step:,}", *newest, *(["skipped"] if last.skipped else [])]),
            facts,
            [Section("Which steps were bad?", answer, items), Section("Layers", table=self._layers())],
        )

    def _layers(self) -> Table:
        """Largest magnitudes: of the newest step, and the highest finite one of all."""
        courses: dict[str, list[float]] = {}
        for record in self.steps:
            for layer, value in record.largest.items():
                courses.setdefault(layer or "the model", []).append(value)
        rows = [(name, found[-1], max(filter(math.isfinite, found), default=None)) for name, found in courses.items()]
        return Table(columns=("layer", "largest now", "highest"), rows=rows)


class HostMonitor:
    """The steps of a run that are known; fronts document the arguments."""

    find: ClassVar[str]
    """How users call the front's `find_overflow`."""

    def __init__(self, sinks: Iterable[Callable[[StepRecord], object]]) -> None:
        arguments.require("monitor(sinks=...)", sinks, Iterable, "functions of a record, e.g. [print]")
        self._sinks = tuple(sinks)
        self._next_step = 0
        self._waiting: deque[Any] = deque()
        """Steps that have not been read, in order: objects with ``ready()`` and ``record()``, None if a step failed."""
        self._records: deque[StepRecord] = deque(maxlen=1000)
        self._good: StepRecord | None = None
        """The last step that was not skipped."""

    @property
    def history(self) -> History:
        """What has been read so far."""
        return History(list(self._records))

    def read(self) -> History:
        """Waits for everything recorded so far, and returns the history."""
        self._collect(wait=True)
        return self.history

    def _collect(self, *, wait: bool) -> None:
        """Takes the steps whose numbers have arrived, or waits for all."""
        while self._waiting and (wait or self._waiting[0].ready()):
            record = self._waiting.popleft().record()
            if record is None:
                continue
            record = dataclasses.replace(record, bad=is_bad(self._good, record))
            first = record.bad and not (self._records and self._records[-1].bad)
            self._good = self._good if record.skipped else record
            self._records.append(record)
            for sink in self._sinks:
                sink(record)
            if first:
                events.warn(f"monitor: step {record.step:,} is bad: {record.what()}. {self.find} finds the operation")


def is_bad(good: StepRecord | None, record: StepRecord) -> bool:
    """`StepRecord.bad`; `good` is the last one before it that was not skipped, None while the first scale is sought."""
    if record.loss is not None and not math.isfinite(record.loss):
        return True  # dynamic scaling overflows the scaled loss; the loss itself stays finite
    if record.skipped:
        scale = record.loss_scale
        return scale is None or (good is not None and scale <= (good.loss_scale or 0.0))
    norm = record.gradient_norm
    return record.loss_scale is None and norm is not None and not math.isfinite(norm)
