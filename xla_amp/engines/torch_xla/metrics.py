"""Exact event counts of torch_xla, from its counters.

Programs are counted where they are looked up, on the tracing thread, so a count is exact at once.  torch_xla's
``ExecuteComputation`` lags behind: another thread increments it later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch_xla.debug.metrics as counters


def _count(*names: str) -> Callable[[], int]:
    """The sum of torch_xla's counters."""
    return lambda: sum(counters.counter_value(name) or 0 for name in names)


def _measured(name: str, which: int) -> Callable[[], int]:
    """Of torch_xla's measurements of `name` the number (0) or the sum (1)."""
    return lambda: int((counters.metric_data(name) or (0, 0.0))[which])


def _fallbacks() -> int:
    """Operations with an ``aten::`` counter ran on the CPU; reading one number is counted there as well."""
    names = [n for n in counters.counter_names() if n.startswith("aten::") and n != "aten::_local_scalar_dense"]
    return sum(counters.counter_value(name) or 0 for name in names)


COUNTERS: Mapping[str, tuple[str, Callable[[], int]]] = MappingProxyType(
    {
        "executions": ("executables run", _count("UncachedCompile", "CachedCompile")),
        "compilations": ("executables built", _count("UncachedCompile")),
        "host_syncs": ("times that Python waited for the device", _measured("TransferFromDeviceTime", 0)),
        "device_to_host": ("transfers of a value to the host", _measured("TransferFromDeviceTime", 0)),
        "host_to_device": ("uploads of a tensor to the device", _measured("TransferToDeviceTime", 0)),
        "operations": ("nodes of the graphs run", _measured("TensorsGraphSize", 1)),
        "fallbacks": ("operations without a lowering, run on the CPU", _fallbacks),
    }
)
"""Counter -> what it counts, and how to find it."""


class TorchXlaMetrics:
    """Counters since start or the last `reset()`, which leaves torch_xla's own alone; call it for a dict."""

    def __init__(self) -> None:
        self._before = dict.fromkeys(COUNTERS, 0)

    def __call__(self) -> dict[str, int]:
        """All counters by name."""
        return {name: max(read() - self._before[name], 0) for name, (_, read) in COUNTERS.items()}

    def reset(self) -> None:
        """Sets every counter to zero."""
        self._before = {name: read() for name, (_, read) in COUNTERS.items()}

    def report(self) -> str:
        """The counters as an aligned text table."""
        counts = self()
        width = max(len(f"{count:,}") for count in counts.values())
        name_width = max(map(len, COUNTERS))
        return "\n".join(f"{n:<{name_width}}  {counts[n]:>{width},}  {what}" for n, (what, _) in COUNTERS.items())


metrics = TorchXlaMetrics()

steps_ended = _count("MarkStep")
"""Number of steps ended so far, by this package or by the program."""
