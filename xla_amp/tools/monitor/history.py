"""Records of training steps, and the JSON-lines file that holds them; free of torch and JAX.

What the numbers mean, on every front.  They are computed in float32 on the device, over all elements of a tensor:

``amax``          largest magnitude of the finite values
``rms``           root of the mean square of the finite values (infinite where a square exceeds float32)
``underflow``     share of the values which are not zero that the low dtype rounds to zero
``inf``, ``nan``  shares of all values
``headroom``      log2(largest finite value of the low dtype / amax): exponents left; negative beyond the low dtype
``update_ratio``  rms(update) / rms(weight), of updates only

A gradient is the one that the optimizer gets: unscaled, and clipped if the step clips.  Its underflow and headroom are
those of the gradient times the loss scale, as the backward pass holds it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, get_args

from xla_amp.common import files
from xla_amp.common.types import DTYPES, RANGES, Dtype, ValueKind
from xla_amp.errors import FileError

FORMAT: Final = "xla_amp history 1"
"""The first line of a file is ``{"format": FORMAT, "low": dtype}``; each other line is one step."""


class Sums(NamedTuple):
    """What the device computes of the tensors of one layer and kind; `Statistics.of` makes shares of it."""

    amax: float
    squares: float
    """Sum of the squares of the finite values."""
    flushed: float
    """Number of values that are not zero and that the low dtype rounds to zero."""
    nonzero: float
    inf: float
    nan: float
    size: float
    """Number of all values."""


class ValueKey(NamedTuple):
    """Which values: those of `kind` in the module or scope at the path `layer`."""

    layer: str
    """Path as ``named_modules`` gives it, with dots; empty for the model itself."""
    kind: ValueKind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of one layer and kind in one step."""

    amax: float
    rms: float
    underflow: float
    inf: float
    nan: float
    headroom: float
    """Infinite where all values are zero."""
    update_ratio: float | None = None
    """Of updates where the weights are recorded too; NaN where all weights are zero."""

    @classmethod
    def of(cls, sums: Sums, low: str, *, scale: float = 1.0, weights: Sums | None = None) -> Statistics:
        """Statistics of what the device summed.

        Args:
            sums: from the device.
            low: the low dtype, of `xla_amp.common.types.RANGES`.
            scale: the loss scale, for gradients; `flushed` already counts at this scale.
            weights: sums of the layer's weights, for updates.
        """
        finite = sums.size - sums.inf - sums.nan
        rms = math.sqrt(sums.squares / finite) if finite else 0.0
        largest = sums.amax * scale
        ratio = None
        if weights is not None:
            of_weights = weights.size - weights.inf - weights.nan
            weight = math.sqrt(weights.squares / of_weights) if of_weights else 0.0
            ratio = rms / weight if weight else math.nan
        return cls(
            amax=sums.amax,
            rms=rms,
            underflow=sums.flushed / sums.nonzero if sums.nonzero else 0.0,
            inf=sums.inf / sums.size if sums.size else 0.0,
            nan=sums.nan / sums.size if sums.size else 0.0,
            headroom=math.log2(RANGES[low].largest) - math.log2(largest) if largest else math.inf,
            update_ratio=ratio,
        )

    @classmethod
    def of_layers(
        cls, sums: Mapping[ValueKey, Sums], low: Dtype, loss_scale: float | None
    ) -> dict[ValueKey, Statistics]:
        """`of` for what a step summed in all layers; a layer without values has none."""
        return {
            key: cls.of(
                row,
                low,
                scale=(loss_scale or 1.0) if key.kind == "gradient" else 1.0,
                weights=sums.get(ValueKey(key.layer, "weight")) if key.kind == "update" else None,
            )
            for key, row in sums.items()
            if row.size
        }

    @property
    def finite(self) -> bool:
        """Whether every value is finite."""
        return not (self.inf or self.nan)


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
    """Whether the scaler skipped the update."""
    gradient_norm: float | None = None
    """2-norm of all gradients that the optimizer got, unscaled."""
    statistics: Mapping[ValueKey, Statistics] = dataclasses.field(default_factory=dict)
    """Empty in a step that was not sampled."""

    def to_dict(self) -> dict[str, Any]:
        """The line of this step in a file: plain data; numbers that JSON lacks become strings."""
        given = {name: plain(getattr(self, name)) for name in _FIELDS if getattr(self, name) is not None}
        rows = [[*key, *(plain(getattr(row, name)) for name in _STATISTICS)] for key, row in self.statistics.items()]
        return {**given, "statistics": rows}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> StepRecord:
        """The step of a line.

        Raises:
            ValueError: it is no such line.
        """
        try:
            rows = {
                ValueKey(layer, kind): Statistics(**dict(zip(_STATISTICS, map(number, numbers), strict=True)))
                for layer, kind, *numbers in line["statistics"]
            }
            given = {name: number(line[name]) for name in _FIELDS if name in line}
            if not isinstance(given["step"], int) or any(key.kind not in get_args(ValueKind) for key in rows):
                raise ValueError("expected a whole number as step, and statistics by layer and kind")
            return cls(**given, statistics=rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


_FIELDS = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name != "statistics")
_STATISTICS = tuple(field.name for field in dataclasses.fields(Statistics))


def plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> Any:
    """What `plain` was given.

    Raises:
        ValueError: it is no number, nor None.
    """
    if isinstance(value, bool | float | None):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, str):
        return float(value)
    raise ValueError(f"expected a number, got {str(value)[:40]!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Records of steps, oldest first; not every step needs one."""

    low: Dtype
    """The low dtype that `Statistics.underflow` and `headroom` refer to."""
    steps: Sequence[StepRecord]

    def of(self, key: ValueKey) -> list[tuple[int, Statistics]]:
        """(step, statistics) of one layer and kind, e.g. for a sparkline."""
        return [(record.step, record.statistics[key]) for record in self.steps if key in record.statistics]

    def layers(self) -> list[ValueKey]:
        """Every layer and kind that a step has, in the order of the first steps that have them."""
        return list(dict.fromkeys(key for record in self.steps for key in record.statistics))


def write_header(file: TextIO, low: Dtype) -> None:
    """Writes the first line of a file."""
    file.write(json.dumps({"format": FORMAT, "low": low}) + "\n")


def write_steps(file: TextIO, steps: Iterable[StepRecord]) -> None:
    """Appends a line for each step."""
    for record in steps:
        file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")


def write(path: str | Path, history: History) -> None:
    """Writes a whole file."""
    with open(path, "w", encoding="utf-8") as file:
        write_header(file, history.low)
        write_steps(file, history.steps)


def read(path: str | Path) -> History:
    """Reads a file; a last line that a killed program left unfinished is dropped.

    Raises:
        FileError: it cannot be read, or is no such file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    found = list(_parsed(path, lines))
    first = found[0] if found else {}
    if not isinstance(first, dict) or first.get("format") != FORMAT or first.get("low") not in DTYPES:
        raise FileError(f'{path}: expected a first line with "format": "{FORMAT}" and "low": a dtype')
    steps = []
    for number, line in enumerate(found[1:], 2):
        if isinstance(line, dict) and line.get("format") == FORMAT:
            continue  # a run that went on in the same file
        try:
            steps.append(StepRecord.from_dict(line))
        except ValueError as error:
            raise FileError(f"{path}:{number}: no record of a step: {error}") from error
    return History(low=first["low"], steps=steps)


def _parsed(path: str | Path, lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        try:
            yield files.parsed(json.loads, line)
        except ValueError as error:
            raise FileError(f"{path}:{number}: no JSON: {error}") from error
