"""The report of a replay, and what replays of all fronts compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from xla_amp.errors import FileError
from xla_amp.report.document import Document, Finding
from xla_amp.report.shown import Shown
from xla_amp.tools.monitor import bad_step, history, history_report
from xla_amp.tools.monitor.bad_step import BadStep
from xla_amp.tools.monitor.history import StepRecord


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport(Shown):
    """The result of `replay`; ``print(report)`` for people."""

    bad: BadStep
    """What the run wrote about the step."""
    folder: Path
    rank: int | None
    """The process that overflowed first; None if that is not known."""
    differences: tuple[str, ...]
    """Numbers of the step that are not the same bits now."""
    compared: int
    """How many numbers were compared."""
    overflow: Any
    """The report of `find_overflow`; None in a replay of several processes."""
    elements: tuple[int, ...] = ()
    """Batch elements in which the first inf or NaN appears; empty if it is not of single elements."""
    batch_size: int = 0
    notes: tuple[str, ...] = ()
    of_step: bool = True
    """Whether the step ran in the state that it had in the run."""

    @property
    def reproduced(self) -> bool:
        """Whether every number is the same, bit for bit."""
        return not self.differences

    def document(self) -> Document:
        """The report of `find_overflow`, then the facts about the step, and the history of the steps before it."""
        bad, overflow = self.bad, self.overflow
        found = Document(title="", kind="replay") if overflow is None else overflow.document()
        if overflow is not None and not (self.of_step or overflow.producers or overflow.passed_on):
            found = dataclasses.replace(found, findings=(Finding(found.findings[0].question, _WITHOUT_STATE, "could"),))
        answer = f"yes, {self.compared} numbers"
        if self.differences:
            answer = f"no: {len(self.differences)} of {self.compared} numbers differ"
        items = tuple((each, "") for each in (*self.differences[:10], *self.notes))
        said = [
            Finding("Is the step the same, bit for bit?", answer, "low" if self.reproduced else "risk", items),
        ]
        if self.elements:
            shown = ", ".join(map(str, self.elements[:16])) + (", ..." if len(self.elements) > 16 else "")
            said.append(Finding("Which batch elements?", f"{shown} (of {self.batch_size})", "risk"))
        process = "unknown" if self.rank is None else str(self.rank)
        before = history_report.document(history.read(self.folder / bad_step.HISTORY))
        return dataclasses.replace(
            found,
            title=f"step {bad.step:,}: {_REASONS[bad.reason]}",
            kind="replay",
            facts=(*found.facts, ("process", f"{process} of {bad.world_size}")),
            findings=(*found.findings, *said),
            tables=(*found.tables, *before.tables),
        )

    def write(self, name: str = "report.txt") -> None:
        """Writes the report beside the folders of the processes."""
        (self.folder.parent / name).write_text(f"{self}\n", encoding="utf-8")


_WITHOUT_STATE: Final = (
    "unknown: every value is finite in the state in which it ran, which is not that of the step. The step cannot be "
    "replayed without its state: give make() the checkpoint before it, or record with xla_amp.monitor(..., "
    "save_state=True)"
)
_REASONS: Final[Mapping[str, str]] = {
    "loss": "its loss was not finite",
    "skip": "the scaler skipped it, and the scale had not just grown",
    "gradient": "a gradient was not finite",
}


def recorded(folder: Path, bad: BadStep) -> StepRecord:
    """The record of the step in the run.

    Raises:
        FileError: there is none.
    """
    records = history.read(folder / bad_step.HISTORY)
    for record in records.steps:
        if record.step == bad.step:
            return record
    raise FileError(f"{folder / bad_step.HISTORY}: it has no record of step {bad.step}")


def compared(then: StepRecord, now: StepRecord, leave_out: Sequence[str] = ()) -> tuple[tuple[str, ...], int]:
    """The numbers of a step that are not the same bits now, and how many were compared.

    Args:
        then: of the run.
        now: of the replay.
        leave_out: kinds of values that are not compared.
    """
    one, other = (_numbers(record, leave_out) for record in (then, now))
    names = list(dict.fromkeys([*one, *other]))
    # By their text: two NaNs are the same, and all digits are there.
    different = [name for name in names if repr(one.get(name)) != repr(other.get(name))]
    return tuple(f"{name}: {one.get(name)} then, {other.get(name)} now" for name in different), len(names)


def _numbers(record: StepRecord, leave_out: Sequence[str]) -> dict[str, Any]:
    names = ("loss", "loss_scale", "skipped", "gradient_norm")
    found = {name: getattr(record, name) for name in names if not (name == "gradient_norm" and "gradient" in leave_out)}
    for key, row in record.statistics.items():
        if key.kind not in leave_out:
            for name, value in dataclasses.asdict(row).items():
                found[f"{key.kind} of {key.layer or 'the model'}, {name}"] = value
    return found
