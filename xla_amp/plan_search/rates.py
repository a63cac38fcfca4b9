"""Peak rates of a machine, and the time that an operation takes at them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import tomllib
from collections.abc import Mapping

from xla_amp.errors import DeviceError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does per second."""

    name: str
    title: str
    bandwidth: float
    """Bytes per second between memory and the units."""
    peak: Mapping[str, float]
    """Operations per second of a matrix product, by the dtype of its operands."""
    source: str

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Time of one operation: the longer of its arithmetic (`flops`) and its memory traffic (`moved` bytes)."""
        return max(flops / self.peak[dtype], moved / self.bandwidth)


def rates(target: str) -> Rates:
    """The row of ``rates.toml`` for `target`.

    Raises:
        DeviceError: unknown target.
    """
    rows = _table()
    if target not in rows:
        raise DeviceError(f"target {target!r}: expected one of {', '.join(rows)}, or None to measure on this machine")
    return rows[target]


@functools.cache
def _table() -> Mapping[str, Rates]:
    text = importlib.resources.files(__package__).joinpath("rates.toml").read_text(encoding="utf-8")
    return {name: Rates(name=name, **row) for name, row in tomllib.loads(text).items()}
