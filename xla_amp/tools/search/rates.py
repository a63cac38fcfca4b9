"""Peak rates of a machine, and the time that an operation takes at them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

from xla_amp import hardware
from xla_amp.errors import DeviceError

SIZE: Final = 512
PRODUCTS: Final = 8
ELEMENTS: Final = 16 * 2**20
"""What a front runs to measure this machine (`measured`)."""
_TIMED: Final = 5


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


def measured(where: str, seconds: Mapping[str, float], copying: float, low: str) -> Rates:
    """The rates of this machine, from the times of what a front has run.

    Args:
        where: the device.
        seconds: dtype -> time of `PRODUCTS` products of square matrices of `SIZE` rows; float32 and `low`.
        copying: time to add one to `ELEMENTS` float32 numbers.
        low: the low dtype.
    """
    peak = {name: 2.0 * PRODUCTS * SIZE**3 / taken for name, taken in seconds.items()}
    bandwidth = 2.0 * ELEMENTS * 4 / copying
    return Rates(
        name="here",
        title=f"this machine ({where})",
        bandwidth=bandwidth,
        peak=peak,
        source=f"measured: float32 {peak['float32'] / 1e9:.3g}, {low} {peak[low] / 1e9:.3g} GFLOP/s, "
        f"{bandwidth / 1e9:.3g} GB/s",
    )


def median_seconds(run: Callable[[], object]) -> float:
    """The median time of `run`, which waits for its result; the first run, which may compile, does not count."""
    taken = []
    for _ in range(_TIMED + 1):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


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
