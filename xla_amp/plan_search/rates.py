"""Peak rates of a machine, and the time that an operation takes at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xla_amp import hardware
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
    """The rates of a row of ``hardware.toml``.

    Raises:
        DeviceError: unknown target.
    """
    known = [name for name in hardware.names() if "matrix" in hardware.specification(name)]
    if target not in known:
        raise DeviceError(f"target {target!r}: expected one of {', '.join(known)}, or None to measure on this machine")
    row = hardware.specification(target)
    return Rates(name=target, title=row["title"], bandwidth=row["bandwidth"], peak=row["matrix"], source=row["source"])
