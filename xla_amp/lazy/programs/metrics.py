"""Counters of executions, compilations, host syncs and transfers."""

from __future__ import annotations

from typing import Any

from xla_amp.lazy.programs import recompile_reasons

COUNTERS: dict[str, str] = {
    "executions": "executables run",
    "compilations": "executables built",
    "programs_loaded": "executables read from the disk instead",
    "host_syncs": "times that Python waited for the device",
    "host_values": "values that the host worked out from what was uploaded, without waiting",
    "device_to_host": "transfers of a value to the host",
    "host_to_device": "uploads of a tensor to the device",
    "operations": "operations inside the executables run",
    "fallbacks": "operations run on the CPU for want of a lowering",
    "programs_dropped": "executables dropped to stay within XLA_AMP_PROGRAM_MEMORY",
}
"""Counter -> description."""

LEVELS: dict[str, str] = {
    "programs_kept": "executables kept now",
    "program_bytes": "bytes that they take, as estimated",
}
"""What is counted as it is now, which `reset` leaves alone -> description."""


class Metrics:
    """Counters since start or the last `reset()`; call it for a dict.

    >>> sorted(Metrics()())[:3]
    ['compilations', 'device_to_host', 'executions']
    """

    __slots__ = (*COUNTERS, *LEVELS)

    executions: int
    compilations: int
    programs_loaded: int
    host_syncs: int
    host_values: int
    device_to_host: int
    host_to_device: int
    operations: int
    fallbacks: int
    programs_dropped: int
    programs_kept: int
    program_bytes: int

    def __init__(self) -> None:
        self.programs_kept = self.program_bytes = 0
        self.reset()

    def __call__(self) -> dict[str, int]:
        """All counters by name."""
        return {name: getattr(self, name) for name in (*COUNTERS, *LEVELS)}

    def reset(self) -> None:
        """Sets every counter to zero."""
        for name in COUNTERS:
            setattr(self, name, 0)
        recompile_reasons.reset()

    def report(self) -> str:
        """The counters as an aligned text table; below it, compilations and host syncs by line of the program."""
        counts: dict[str, Any] = self()
        width = max(len(f"{count:,}") for count in counts.values())
        name_width = max(map(len, counts))
        rows = (COUNTERS | LEVELS).items()
        return (
            "\n".join(f"{name:<{name_width}}  {counts[name]:>{width},}  {what}" for name, what in rows)
            + recompile_reasons.report()
        )


metrics = Metrics()
