"""Counters of executions, compilations, host syncs and transfers."""

from __future__ import annotations

from typing import Annotated, get_type_hints

from xla_amp.lazy.programs import recompile_reasons


class Metrics:
    """Counters since start or the last `reset()`; call it for a dict.

    >>> sorted(Metrics()())[:3]
    ['compilations', 'device_to_host', 'executions']
    """

    executions: Annotated[int, "executables run"]
    compilations: Annotated[int, "executables built"]
    programs_loaded: Annotated[int, "executables read from the disk instead"]
    host_syncs: Annotated[int, "times that Python waited for the device"]
    host_values: Annotated[int, "values that the host worked out from what was uploaded, without waiting"]
    device_to_host: Annotated[int, "transfers of a value to the host"]
    host_to_device: Annotated[int, "uploads of a tensor to the device"]
    operations: Annotated[int, "operations inside the executables run"]
    fallbacks: Annotated[int, "operations run on the CPU for want of a lowering"]
    programs_dropped: Annotated[int, "executables dropped to stay within XLA_AMP_PROGRAM_MEMORY"]
    programs_kept: Annotated[int, "executables kept now"]
    program_bytes: Annotated[int, "bytes that they take, as estimated"]

    def __init__(self) -> None:
        self.programs_kept = self.program_bytes = 0
        self.reset()

    def __call__(self) -> dict[str, int]:
        """All counters by name."""
        return {name: getattr(self, name) for name in _DESCRIPTIONS}

    def reset(self) -> None:
        """Sets every counter to zero, except for what is counted as it is now: the programs kept, and their bytes."""
        vars(self).update(dict.fromkeys(_DESCRIPTIONS.keys() - {"programs_kept", "program_bytes"}, 0))
        recompile_reasons.reset()

    def host_waits(self) -> None:
        """Counts a wait for the device, by line of the program."""
        self.host_syncs += 1
        recompile_reasons.host_waits()

    def report(self) -> str:
        """The counters as an aligned text table; below it, compilations and host syncs by line of the program."""
        counts = self()
        width = max(len(f"{count:,}") for count in counts.values())
        name_width = max(map(len, counts))
        return (
            "\n".join(f"{name:<{name_width}}  {counts[name]:>{width},}  {what}" for name, what in _DESCRIPTIONS.items())
            + recompile_reasons.report()
        )


_DESCRIPTIONS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Metrics, include_extras=True).items()}
metrics = Metrics()
