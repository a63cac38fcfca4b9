"""`replay`: run a bad step that a monitor kept once more, and find where it overflows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from xla_amp.errors import StepError
from xla_amp.tools.monitor import bad_step
from xla_amp.tools.monitor.bad_step import BadStep
from xla_amp.tools.monitor.history import StepRecord
from xla_amp.tools.monitor.on_jax import kept_step
from xla_amp.tools.monitor.on_jax.monitor import Monitor
from xla_amp.tools.monitor.replay import ReplayReport, compared, recorded
from xla_amp.tools.monitor.run import Options
from xla_amp.tools.overflow.on_jax import find_overflow
from xla_amp.tools.overflow.report import ProgramOverflowReport


def replay(step: Callable[..., Any], directory: str | Path, *args: Any, **kwargs: Any) -> ReplayReport:
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
    call = kept_step.PureCall(step, args, kwargs)
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
        history=1,
        layers=bad.options["layers"] if sampled else "*",
        kinds=bad.options["kinds"] if sampled else (),
        sample=1,
        low=bad.low,
        first_step=bad.step,
    )
    again = Monitor(call.run, options, donate=False)
    again(leaves)
    now, then = again.read().steps[-1], recorded(folder, bad)
    if then.loss_scale != now.loss_scale:
        raise StepError(
            f"replay: the step ran at a loss scale of {_scale(then)}, the arguments have {_scale(now)}, so it "
            f"cannot be replayed without the state; pass the state with a loss scale of {_scale(then)}, or record with "
            "save_state=True"
        )
    overflow = find_overflow(call.run, leaves)
    differences, count = compared(then, now)
    report = ReplayReport(
        bad=bad,
        folder=folder,
        rank=_rank(folder, bad, overflow),
        differences=differences,
        compared=count,
        overflow=overflow,
    )
    report.write()
    return report


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
