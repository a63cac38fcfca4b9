"""Errors of plans, measured once each and kept in a file, and the bound that they give for other batches."""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from xla_amp.common import files
from xla_amp.errors import FileError, writing
from xla_amp.tools.search.candidates import Candidate

Plan: TypeAlias = frozenset[str]
"""Names of the candidates that run low; the others run in float32."""


class SearchProgram(abc.ABC):
    """A program as a front gives it to `search`."""

    candidates: Sequence[Candidate] = ()
    """In the order of the program: an error of the first can reach the others."""
    batches: int
    """Number of batches."""
    fingerprint: str = ""
    """Text that changes with the program, its weights, its batches and the versions of libraries, for the journal."""

    @abc.abstractmethod
    def evaluate(self, plan: Plan, batch: int) -> Mapping[str, float]:
        """Relative errors of the program under `plan` against float32 on the same batch, by quantity (``loss``).

        A value that is finite in float32 only is an infinite error.
        """

    @abc.abstractmethod
    def noise(self) -> Mapping[str, float]:
        """The same errors of float32 itself with operands that differ by one rounding: no smaller error means much."""


class Measurements:
    """The errors of plans: each (plan, batch) is measured once, and appended to a JSON lines file if there is one."""

    def __init__(self, program: SearchProgram, journal: str | os.PathLike[str] | None = None) -> None:
        self._program = program
        self._known: dict[tuple[str, int], dict[str, float]] = {}
        self._journal = None if journal is None else Path(journal)
        self.run = 0
        """How many were measured now, not read."""
        if self._journal is not None and self._journal.exists():
            self._read(self._journal)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise FileError(f"reading {path}: {error.strerror}") from error
        for line in lines:
            try:
                row: dict[str, Any] = files.parsed(json.loads, line)
                if row["program"] == self._program.fingerprint:
                    self._known[row["plan"], row["batch"]] = {k: float(v) for k, v in row["errors"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the last line of a run that was killed

    def errors(self, plan: Plan, batch: int) -> Mapping[str, float]:
        """The errors of `plan` on one batch."""
        key = (digest(*sorted(plan)), batch)
        if key not in self._known:
            found = dict(self._program.evaluate(plan, batch))
            self.run += 1
            self._known[key] = {k: math.inf if math.isnan(v) else abs(float(v)) for k, v in found.items()}
            self._append({"program": self._program.fingerprint, "plan": key[0], "batch": batch, "low": sorted(plan)})
        return self._known[key]

    def _append(self, row: dict[str, Any]) -> None:
        if self._journal is None:
            return
        row["errors"] = self._known[row["plan"], row["batch"]]
        with writing(self._journal), self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def digest(*parts: str) -> str:
    """16 characters that stand for `parts`."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def bound(values: Sequence[float], confidence: float, least: float = 0.0) -> float:
    """An upper bound for the error on one more batch, at `confidence`, from the errors on `values`' batches.

    It is the prediction limit of a normal sample, ``mean + t s sqrt(1 + 1/n)``, and at least the largest value.  The
    deviation ``s`` is at least `least` times the mean.

    Example:
        >>> round(bound([1.0, 1.0, 1.0], 0.99), 3), round(bound([0.9, 1.0, 1.1], 0.99), 2)
        (1.0, 1.76)
    """
    worst = max(values)
    if len(values) < 2 or math.isinf(worst):
        return worst
    mean = statistics.fmean(values)
    spread = max(statistics.stdev(values), least * mean) * math.sqrt(1 + 1 / len(values))
    return max(worst, mean + student(confidence, len(values) - 1) * spread)


def spread(values: Sequence[float]) -> float:
    """The standard deviation relative to the mean; 0 of zeros."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if mean else 0.0


def student(confidence: float, freedom: int) -> float:
    """The quantile of Student's t distribution, by the expansion of Cornish and Fisher (Abramowitz, Stegun 26.7.5).

    Within 10 % for two degrees of freedom, and 1 % from five on, at the confidences of `search`.
    """
    z = statistics.NormalDist().inv_cdf(confidence)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
