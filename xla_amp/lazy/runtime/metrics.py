"""Counters of executions, compilations, host syncs and transfers."""

from __future__ import annotations

from typing import Any

COUNTERS: dict[str, str] = {
    "executions": "executables run",
    "compilations": "executables built",
    "host_syncs": "times that Python waited for the device",
    "host_values": "values that the host worked out from what was uploaded, without waiting",
    "device_to_host": "transfers of a value to the host",
    "host_to_device": "uploads of a tensor to the device",
    "operations": "operations inside the executables run",
    "fallbacks": "operations run on the CPU for want of a lowering",
}
"""Counter -> description."""


class Metrics:
    """Counters since start or the last `reset()`; call it for a dict.

    >>> sorted(Metrics()())[:3]
    ['compilations', 'device_to_host', 'executions']
    """

    __slots__ = tuple(COUNTERS)

    executions: int
    compilations: int
    host_syncs: int
    host_values: int
    device_to_host: int
    host_to_device: int
    operations: int
    fallbacks: int

    def __init__(self) -> None:
        self.reset()

    def __call__(self) -> dict[str, int]:
        """All counters by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def reset(self) -> None:
        """Sets every counter to zero."""
        for name in COUNTERS:
            setattr(self, name, 0)

    def report(self) -> str:
        """The counters as an aligned text table."""
        counts: dict[str, Any] = self()
        width = max(len(f"{count:,}") for count in counts.values())
        name_width = max(map(len, COUNTERS))
        return "\n".join(f"{name:<{name_width}}  {counts[name]:>{width},}  {what}" for name, what in COUNTERS.items())


metrics = Metrics()
