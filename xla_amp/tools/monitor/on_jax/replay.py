"""`replay`: run a bad step that a monitor kept once more, and find where it overflows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from xla_amp.errors import StepError
from xla_amp.tools.monitor import bad_step, history
from xla_amp.tools.monitor.bad_step import BadStep
from xla_amp.tools.monitor.history import StepRecord
from xla_amp.tools.monitor.on_jax import kept_step
from xla_amp.tools.monitor.on_jax.monitor import Monitor
from xla_amp.tools.monitor.run import Options
from xla_amp.tools.overflow.on_jax import find_overflow
from xla_amp.tools.overflow.report import ProgramOverflowReport


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The result of `replay`; ``print(replay)`` for people."""

    bad: BadStep
    """What is known of the step."""
    record: StepRecord
    """Of the step as it ran now."""
    reproduced: bool
    """Whether its record is that of the run, bit for bit."""
    overflow: ProgramOverflowReport
    folder: Path
    rank: int | None
    """The process whose part of the batch overflows first; None if that is not known."""

    def __str__(self) -> str:
        same = "bit for bit as in the run" if self.reproduced else "NOT as in the run: its numbers differ"
        where = "" if self.rank is None else f", process {self.rank} of {self.bad.world_size}"
        return f"step {self.bad.step:,} ({self.bad.reason}){where}, {same}\n{self.overflow}"


def replay(step: Callable[..., Any], directory: str | Path, *args: Any, **kwargs: Any) -> Replay:
    """Runs the first bad step of a run again: compiled, as it ran, and under `find_overflow`.  Writes ``report.txt``.

    Args:
        step: the step, not the monitor around it.
        directory: of the monitor, or the folder of the bad step.
        *args: as for `step`.  Arrays and numbers that were kept take the place of these; what was not kept (the state,
            where the step's ``jax.jit`` donates it and ``save_state`` was not set) is used as it is given.
        **kwargs: as for `step`.

    Raises:
        FileError: there is no bad step, or it cannot be read.
        StepError: the arguments do not fit those that were kept, or have another loss scale than the step had.

    Arrays that the processes of a run had in parts are joined, so one process replays the whole step.
    """
    folders = bad_step.ranks(directory)
    folder = folders[min(jax.process_index(), len(folders) - 1)]
    bad, kept = kept_step.load(folder)
    step = getattr(step, "__wrapped__", step) if isinstance(step, Monitor) else step
    call = kept_step.Call(step, args, kwargs)
    for index, leaf in kept.items():
        if index >= len(call.leaves) or jax.numpy.shape(leaf) != jax.numpy.shape(call.leaves[index]):
            got = "nothing" if index >= len(call.leaves) else f"shape {jax.numpy.shape(call.leaves[index])}"
            raise StepError(
                f"replay: leaf {index} of the arguments was kept with shape {jax.numpy.shape(leaf)}, got {got}; pass "
                "arguments as the step had them"
            )
    leaves = [kept.get(index, leaf) for index, leaf in enumerate(call.leaves)]
    sampled = bad.options["sampled"]
    options = Options(
        every=1,
        history=1,
        layers=tuple(bad.options["layers"]),
        kinds=tuple(bad.options["kinds"]),
        sample=1 if sampled else 2,
        low=bad.low,
        first_step=bad.step if sampled else bad.step - 1,
    )
    again = Monitor(call.run, options, donate=False)
    again.skip_to(bad.step)
    again(leaves)
    record = again.read().steps[-1]
    then = next((each for each in history.read(folder / bad_step.HISTORY).steps if each.step == bad.step), None)
    if then is not None and then.loss_scale != record.loss_scale:
        raise StepError(
            f"replay: the step ran at a loss scale of {_scale(then)}, the arguments have {_scale(record)}, so it "
            f"cannot be replayed without the state; pass the state with a loss scale of {_scale(then)}, or record with "
            "save_state=True"
        )
    report = find_overflow(call.run, leaves)
    found = Replay(
        bad=bad,
        record=record,
        reproduced=then is not None and record.to_dict() == then.to_dict(),
        overflow=report,
        folder=folder,
        rank=_rank(folder, bad, report),
    )
    (folder.parent / "report.txt").write_text(f"{found}\n", encoding="utf-8")
    return found


def _scale(record: StepRecord) -> str:
    return "none" if record.loss_scale is None else f"{record.loss_scale:g}"


def _rank(folder: Path, bad: BadStep, report: ProgramOverflowReport) -> int | None:
    first = report.first
    if bad.world_size == 1:
        return 0
    if first is None or not first.element:
        return None
    rows = [operand.shape[0] for operand in first.inputs if operand.shape]
    return kept_step.rank_of(folder, bad, first.element[0], max(rows, default=0))
