"""Known differences of the lazy device from the CPU: the rows of ``limitations.toml``.

The table drives the comparison with torch's operator database and the published support matrix.  Kinds:

* ``raises``: the operation raises a clear error; a test fails when it no longer does.
* ``tolerance``: results are the CPU's within `tolerance` times float32's usual error, for the reason given.
* ``random``: results are drawn (with `where`: if that argument is not 0); dtype, shape and moments are the CPU's.
* ``unchecked``: as on the CPU for indices in range; of those out of range only uploaded ones raise (`index_checks`).
* ``ties``: values are the CPU's; of equal elements another one's position may be given.
* ``unset``: results are memory that was never written; dtype and shape are the CPU's.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Limitation:
    """One row of the table."""

    operation: str
    """Entry of torch's operator database, ``"add"`` or ``"linalg.norm.subgradients_at_zero"``."""
    kind: str
    reason: str
    dtype: str = "all"
    platform: str = "all"
    tolerance: float = 1.0
    """Factor on float32's usual error; 1 but for the kind ``tolerance``."""
    error: str = ""
    """Words that the error message holds; only of the kind ``raises``."""
    where: str = ""
    """An argument: the row applies to calls with this argument and a value other than 0."""


@functools.cache
def limitations() -> Mapping[str, Limitation]:
    """The rows by operation."""
    rows = tomllib.loads(Path(__file__).with_name("limitations.toml").read_text("utf-8"))["limitation"]
    return {row["operation"]: Limitation(**row) for row in rows}
