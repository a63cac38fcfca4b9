"""Known differences of the lazy device from the CPU: the rows of ``limitations.toml``.

The table drives the comparison with torch's operator database and the published support matrix.  Kinds:

* ``raises``: the operation raises a clear error; a test fails when it no longer does.
* ``tolerance``: results are the CPU's within `tolerance` times float32's usual error, for the reason given.
* ``random``: results are drawn (with `where`: if that argument is not 0); dtype, shape and moments are the CPU's.
* ``unchecked``: as on the CPU for indices in range; of those out of range only uploaded ones raise (`index_checks`).
* ``unset``: results are memory that was never written; dtype and shape are the CPU's.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_amp.errors import EngineError

KINDS = ("raises", "random", "tolerance", "unchecked", "unset")
_COLUMNS = {"operation", "dtype", "platform", "kind", "reason", "tolerance", "error", "where"}


@dataclass(frozen=True, kw_only=True)
class Limitation:
    """One row of the table."""

    operation: str
    """Entry of torch's operator database, ``"add"`` or ``"linalg.norm.subgradients_at_zero"``."""
    kind: str
    """One of `KINDS`."""
    reason: str
    dtype: str = "all"
    platform: str = "all"
    tolerance: float = 1.0
    """Factor on float32's usual error; 1 but for the kind ``tolerance``."""
    error: str = ""
    """Words that the error message holds; only of the kind ``raises``."""
    where: str = ""
    """An argument: the row applies to calls with this argument and a value other than 0."""


def parse(text: str) -> Mapping[str, Limitation]:
    """The rows of a table in TOML, by operation.

    Raises:
        EngineError: a row is incomplete, of an unknown kind, out of order or there twice.
    """
    rows: dict[str, Limitation] = {}
    last = ""
    for row in tomllib.loads(text).get("limitation", []):
        limitation = _row(row)
        if limitation.operation <= last:
            raise EngineError(
                f"limitations: expected operations in order and once each, got {limitation.operation!r} after {last!r}"
            )
        last = limitation.operation
        rows[last] = limitation
    return rows


def _row(row: dict[str, Any]) -> Limitation:
    name = row.get("operation", "?")
    if unknown := set(row) - _COLUMNS:
        raise EngineError(f"limitations: {name!r} has unknown columns {sorted(unknown)}; legal: {sorted(_COLUMNS)}")
    if absent := {"operation", "kind", "reason"} - set(row):
        raise EngineError(f"limitations: {name!r} lacks {sorted(absent)}")
    if row["kind"] not in KINDS:
        raise EngineError(f"limitations: kind of {name!r} is {row['kind']!r}, expected one of {KINDS}")
    for column, kind in (("tolerance", "tolerance"), ("error", "raises")):
        if (column in row) != (row["kind"] == kind):
            raise EngineError(f"limitations: {name!r}: column {column!r} belongs to rows of kind {kind!r}, and to each")
    if "where" in row and row["kind"] != "random":
        raise EngineError(f"limitations: {name!r}: column 'where' belongs to rows of kind 'random'")
    return Limitation(**row)


@functools.cache
def limitations() -> Mapping[str, Limitation]:
    """The table that is shipped."""
    return parse(Path(__file__).with_name("limitations.toml").read_text("utf-8"))
