"""Count what a block of a program costs, for tests: executables, compilations, waits of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from xla_amp.engines.base import metrics


class Counts:
    """What the engine in use did during a block, as attributes named as in `xla_amp.metrics`.

    Inside the block they are the counts so far; after it they stay.
    """

    def __init__(self) -> None:
        self._before = metrics()
        self._after: dict[str, int] | None = None

    def __call__(self) -> dict[str, int]:
        """All counts by name."""
        now = metrics() if self._after is None else self._after
        return {name: count - self._before.get(name, 0) for name, count in now.items()}

    def __getattr__(self, name: str) -> int:
        found = {} if name.startswith("_") else self()
        if name not in found:
            raise AttributeError(f"counts() has no {name!r}; it counts {', '.join(found)}")
        return found[name]

    def __repr__(self) -> str:
        return f"Counts({', '.join(f'{name}={count}' for name, count in self().items() if count)})"

    def _stop(self) -> None:
        self._after = metrics()


@contextlib.contextmanager
def counts() -> Iterator[Counts]:
    """Context manager that counts executables, compilations, host waits and transfers of its block.

    ``executions`` are executables that ran, ``compilations`` programs that were built for it, ``host_syncs`` times that
    Python waited for the device, ``device_to_host`` and ``host_to_device`` transfers.  Operations that are recorded and
    have not run are not counted: end the block with `xla_amp.sync`, or with an optimizer's step and the next one.

    Example:
        >>> import torch, xla_amp
        >>> x = torch.ones(3, device=xla_amp.xla_device())
        >>> with counts() as seen:
        ...     y = (x + 1).sum()
        ...     xla_amp.sync()
        >>> seen.executions, seen.host_syncs
        (1, 0)
    """
    seen = Counts()
    try:
        yield seen
    finally:
        seen._stop()
