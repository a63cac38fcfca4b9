"""Peak rates of a machine, and the time that an operation takes at them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from xla_amp import hardware
from xla_amp.errors import DeviceError

_SIZE: Final = 512
_PRODUCTS: Final = 8
_ELEMENTS: Final = 16 * 2**20
"""What runs to measure this machine (`measured`)."""
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


def measured(
    where: str,
    low: str,
    full: Callable[[tuple[int, ...], float, str], Any],
    wait: Callable[[Any], object],
    compiled: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lambda function: function,
) -> Rates:
    """The rates of this machine, from the times of matrix products in float32 and `low`, and of a sum.

    Args:
        where: the device.
        low: the low dtype.
        full: an array on it, of a shape, a value and a dtype.
        wait: waits until an array is computed.
        compiled: compiles a function of an array.
    """

    def median(function: Callable[[Any], Any], array: Any) -> float:
        run = compiled(function)
        return median_seconds(lambda: wait(run(array)))

    seconds = {name: median(_products, full((_SIZE, _SIZE), 1 / _SIZE, name)) for name in ("float32", low)}
    peak = {name: 2.0 * _PRODUCTS * _SIZE**3 / taken for name, taken in seconds.items()}
    bandwidth = 2.0 * _ELEMENTS * 4 / median(lambda block: block + 1, full((_ELEMENTS,), 1.0, "float32"))
    return Rates(
        name="here",
        title=f"this machine ({where})",
        bandwidth=bandwidth,
        peak=peak,
        source=f"measured: float32 {peak['float32'] / 1e9:.3g}, {low} {peak[low] / 1e9:.3g} GFLOP/s, "
        f"{bandwidth / 1e9:.3g} GB/s",
    )


def _products(matrix: Any) -> Any:
    value = matrix
    for _ in range(_PRODUCTS):
        value = value @ matrix
    return value


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
