"""Cells of a table as text."""

from __future__ import annotations

import math

from xla_amp.common.units import bits as bits
from xla_amp.common.units import error as error
from xla_amp.common.units import flops as flops
from xla_amp.common.units import is_floating as is_floating
from xla_amp.common.units import is_low as is_low
from xla_amp.common.units import shape as shape
from xla_amp.common.units import short as short
from xla_amp.common.units import size as size
from xla_amp.common.units import time as time
from xla_amp.report.document import Cell, CellKind


def cell(value: Cell, kind: CellKind) -> str:
    """A cell as text; a series is its last number."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, int | float):
        return f"{value[-1]:.4g}" if len(value) and value[-1] is not None else ""
    if not math.isfinite(value):
        return str(value)
    if kind == "bytes":
        return size(value)
    if kind == "flops":
        return flops(value)
    if kind == "seconds":
        return time(value)
    if kind == "share":
        return f"{100 * value:.3g} %"
    if kind == "error":
        return error(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
