"""Places in the user's program of what the trace records: module paths and lines, for programs that are read."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from xla_amp.lazy.graph.tape import Position, nodes
from xla_amp.torch_common import module_paths
from xla_amp.torch_common.places import LocatingMode, Place


class Locations(LocatingMode):
    """Context manager that follows modules and locates each operation that is recorded inside."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        self._places: list[Place] = []

    def __enter__(self) -> Locations:
        self._ends = module_paths.acquire()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._ends()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, start = self.locate(func), Position.now().code
        result = func(*args, **(kwargs or {}))
        if Position.now().code > start:
            self._starts.append(start)
            self._places.append(place)
        return result

    def of(self, code: Sequence[int], start: int = 0) -> tuple[Place | None, ...]:
        """The places of the instructions of `code`, which the trace has from position `start` on."""
        return tuple(
            None if node.is_parameter else self._at(node.at.code) for node in nodes(code, Position(code=start))
        )

    def _at(self, position: int) -> Place | None:
        """The place of the operation that torch dispatched last before a position of the trace's code, if any."""
        index = bisect.bisect_right(self._starts, position) - 1
        return self._places[index] if index >= 0 else None
