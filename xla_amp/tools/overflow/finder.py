"""Find the operation that makes the first inf or NaN of a program that runs operation by operation, on NumPy arrays."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from xla_amp.common.events import Place
from xla_amp.tools.overflow.report import Producer, ProducerOperand, ProgramOverflowReport, produced, reached

_MOST: Final = 5
"""Producers that a report holds."""


class Finder(abc.ABC):
    """Looks at the operands and results of each operation, and keeps what it finds."""

    def __init__(self) -> None:
        self.operations = 0
        self._producers: list[Producer] = []
        self._passed_on: Producer | None = None
        self._loops: list[str] = []
        self.inside: dict[str, None] = {}
        """What is not watched."""

    @abc.abstractmethod
    def parts(self, value: Any) -> list[np.ndarray[Any, Any]]:
        """A floating-point value on the host: one array, or its shards; nothing of other and of empty values."""

    @abc.abstractmethod
    def place(self, operation: Any) -> Place:
        """The place of an operation, without the loops around it."""

    @contextlib.contextmanager
    def iteration(self, number: int, loop: str) -> Iterator[None]:
        """Inside, operations are in an iteration of a loop."""
        self._loops.append(f"iteration {number} of {loop}")
        try:
            yield
        finally:
            self._loops.pop()

    def look(self, operation: Any, operands: Sequence[Any], results: Sequence[Any], *, own: bool) -> None:
        """Looks at one operation that has run.

        Args:
            operation: as `place` takes it.
            operands: its operands.
            results: its results.
            own: whether it computes nothing: a constant, or a fill of what is out of bounds.
        """
        self.operations += 1
        made, bad = next(((kind, each) for each in results if (kind := self.made(each))), ("", ()))
        if not made or len(self._producers) >= _MOST:
            return
        read = [(f"operand {index}", value, self.parts(value)) for index, value in enumerate(operands)]
        inputs = tuple(_operand(name, np.shape(value), parts) for name, value, parts in read if parts)
        finds = produced(made, inputs, written=made if own else "")
        if not finds and self._passed_on is not None:
            return
        first, *others = self.parts(bad)
        whole = not others and first.shape == np.shape(bad)
        producer = Producer(
            place=dataclasses.replace(self.place(operation), iteration=", ".join(self._loops)),
            made=made,
            inputs=inputs,
            result=str(first.dtype),
            step=self.operations - 1,
            element=tuple(map(int, np.argwhere(~np.isfinite(first))[0])) if whole else None,
        )
        if finds:
            self._producers.append(producer)
        else:
            self._passed_on = producer

    def made(self, value: Any) -> str:
        """``nan`` or ``inf`` if a value has one; otherwise empty."""
        parts = self.parts(value)
        if all(bool(np.isfinite(part).all()) for part in parts):
            return ""
        return "nan" if any(bool(np.isnan(part).any()) for part in parts) else "inf"

    def report(
        self, arguments: tuple[str, ...], results: tuple[str, ...], not_watched: Sequence[str] = ()
    ) -> ProgramOverflowReport:
        """What was found; `arguments` and `results` are the names of those that are not finite."""
        return ProgramOverflowReport(
            producers=tuple(self._producers),
            passed_on=reached(self._producers, self._passed_on, finite=not results),
            arguments=arguments,
            results=results,
            operations=self.operations,
            not_watched=(*self.inside, *not_watched),
        )


def _operand(name: str, shape: tuple[int, ...], parts: Sequence[np.ndarray[Any, Any]]) -> ProducerOperand:
    dtype = parts[0].dtype
    wide = np.complex128 if dtype.kind == "c" else np.float64
    size = np.concatenate([np.abs(part.astype(wide)).reshape(-1) for part in parts])
    finite = size[np.isfinite(size)]
    nonzero = finite[finite > 0]
    return ProducerOperand(
        name=name,
        dtype=str(dtype),
        shape=shape,
        smallest=float(nonzero.min()) if nonzero.size else 0.0,
        largest=float(finite.max()) if finite.size else 0.0,
        infinities=int(np.isinf(size).sum()),
        nans=int(np.isnan(size).sum()),
    )
