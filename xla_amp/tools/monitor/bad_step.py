"""The folder that keeps a bad step; free of torch and JAX.

::

    DIRECTORY/
        history.jsonl               every step that was read, of process 0
        history_rank_1.jsonl        the same of process 1
        bad_step_0001500/
            rank_0/                 one folder for each process
                step.json           `BadStep`
                history.jsonl       the last records, the bad step's at the end
                batch.pt            what ``monitor.step`` was given (JAX: batch.npz)
                rng.pt              states of the random generators before the step
                state.pt            model, optimizer and scaler before the step, with ``save_state=True``
            report.txt              written by ``xla-amp monitor replay``
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from xla_amp.common import files
from xla_amp.common.types import Dtype
from xla_amp.errors import FileError
from xla_amp.tools.monitor import history
from xla_amp.tools.monitor.advice import is_probe
from xla_amp.tools.monitor.history import History, StepRecord

FORMAT: Final = "xla_amp bad step 1"
METADATA: Final = "step.json"
HISTORY: Final = "history.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """What is known of a bad step, in one process.  Floats are exact: JSON writes all their digits."""

    front: str
    """``pytorch`` or ``jax``."""
    step: int
    rank: int
    world_size: int
    reason: str
    """``loss``: it is not finite; ``skip``: the scaler skipped the step, whose scale had not just grown; ``gradient``:
    without a scaler, a gradient is not finite."""
    local: bool | None
    """Whether this process itself made the inf or NaN; None if unknown.  Reduced gradients are not finite in all."""
    loss: float | None
    loss_scale: float | None
    gradient_norm: float | None
    low: Dtype
    versions: Mapping[str, str]
    """Version by package."""
    options: Mapping[str, Any]
    """Arguments of the monitor that shape the step's program, for a replay."""
    state: str
    """``kept``: the state before the step is here; ``checkpoint``; ``none``."""
    checkpoint: str | None = None
    """Path of the last checkpoint that the run has saved."""
    checkpoint_step: int | None = None
    """The number of the step before which it was saved."""

    def to_json(self) -> str:
        """The text of step.json."""
        plain = {name: history.plain(value) for name, value in dataclasses.asdict(self).items()}
        return json.dumps({"format": FORMAT, **plain}, indent=1, allow_nan=False) + "\n"


_KINDS: Final[Mapping[str, type]] = MappingProxyType(
    {"front": str, "low": str, "options": dict, "rank": int, "reason": str, "state": str, "step": int, "versions": dict,
     "world_size": int}
)  # fmt: skip
"""Fields of step.json that are always there."""


def reason(good: StepRecord | None, record: StepRecord) -> str:
    """Why a step is bad, as in `BadStep.reason`, or empty; `good` is the last step that was not skipped."""
    if record.loss is not None and not math.isfinite(record.loss):
        # Dynamic scaling overflows the scaled loss while it looks for its scale; the loss itself stays finite.
        return "loss"
    if record.skipped:
        return "" if is_probe(good, record) else "skip"
    if record.loss_scale is None and record.gradient_norm is not None and not math.isfinite(record.gradient_norm):
        return "gradient"
    return ""


def folder(directory: str | Path, step: int, rank: int) -> Path:
    """Where the process `rank` keeps the bad step `step`."""
    return Path(directory) / f"bad_step_{step:07d}" / f"rank_{rank}"


def write(path: Path, bad: BadStep, records: History) -> None:
    """Writes step.json and history.jsonl; step.json last and at once, so that a folder with it is whole."""
    history.write(path / HISTORY, records)
    waiting = path / f".{METADATA}"
    waiting.write_text(bad.to_json(), encoding="utf-8")
    os.replace(waiting, path / METADATA)


def read(path: str | Path) -> BadStep:
    """Reads step.json of a ``rank_N`` folder.

    Raises:
        FileError: it is missing or malformed.
    """
    file = Path(path) / METADATA
    try:
        found = files.parsed(json.loads, file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{file}: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise FileError(f'{file}: expected "format": "{FORMAT}"')
    numbers = ("loss", "loss_scale", "gradient_norm")
    try:
        for name, kind in _KINDS.items():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"{name}: expected {kind.__name__}, got {str(found.get(name))[:40]!r}")
        return BadStep(**{name: history.number(value) if name in numbers else value for name, value in found.items()})
    except (TypeError, ValueError) as error:
        raise FileError(f"{file}: {error}") from error


def ranks(directory: str | Path) -> list[Path]:
    """The ``rank_N`` folders of a bad step, in order; `directory` may be the run's, of which the first is taken.

    Raises:
        FileError: there is no bad step.
    """
    path = Path(directory)
    if (path / METADATA).is_file():
        return [path]
    for place in (path, *sorted(path.glob("bad_step_*"))):
        found = [each for each in place.glob("rank_*") if (each / METADATA).is_file()]
        if found:
            return sorted(found, key=lambda each: int(re.sub(r"\D", "", each.name) or 0))
    raise FileError(f"{path}: no bad step here: expected a folder bad_step_NNNNNNN, or one with rank_N/{METADATA}")


def first_rank(found: list[BadStep]) -> BadStep:
    """The process that overflowed first: the lowest rank among those that made the inf or NaN themselves."""
    return next((bad for bad in found if bad.local), found[0])
