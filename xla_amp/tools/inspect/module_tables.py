"""Tables of `xla_amp.stablehlo.inspect` results: one module, or before and after a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from xla_amp.report.document import Cell, Column, Row, Table

if TYPE_CHECKING:
    from xla_amp.tools.inspect.inspection import Inspection, Tally

_Key = TypeVar("_Key")

States: TypeAlias = "Mapping[str, Inspection]"
"""Column title -> inspection: ``{"": ...}`` for one module, ``{"before": ..., "after": ...}`` for a conversion."""


def by_dtype(states: States) -> Table:
    """Operations and the bytes of their results, by dtype."""
    dtypes = _keys(found.dtypes for found in states.values())
    rows: list[tuple[Cell, ...]] = [
        (dtype, *_tallies(found.dtypes.get(dtype) for found in states.values())) for dtype in dtypes
    ]
    columns = (Column("dtype"), *_pairs("operations", states))
    return Table(title="Operations by dtype of their result", columns=columns, rows=_rows(rows))


def contractions(states: States) -> Table:
    """Products and convolutions by operand dtypes."""
    rows: list[tuple[Cell, ...]] = [
        (
            f"{left} x {right} -> {result}",
            *(found.contractions.get((left, right, result), 0) for found in states.values()),
        )
        for left, right, result in _keys(found.contractions for found in states.values())
    ]
    columns = (Column("operands and result"), *(Column(_title("count", state), "count") for state in states))
    return Table(title="Contractions", columns=columns, rows=_rows(rows))


def casts(states: States) -> Table:
    """Conversions between dtypes."""
    kinds = _keys(found.casts for found in states.values())
    rows: list[tuple[Cell, ...]] = [
        (f"{kind[0]} -> {kind[1]}", *_tallies(found.casts.get(kind) for found in states.values())) for kind in kinds
    ]
    return Table(title="Casts", columns=(Column("from and to"), *_pairs("count", states)), rows=_rows(rows))


def largest(found: Inspection) -> Table:
    """The largest values."""
    columns = (Column("type"), Column("bytes", "bytes"), Column("of"), Column("in"), Column("from"))
    rows = [Row((value.type, value.bytes, value.name, value.function, value.location)) for value in found.largest]
    return Table(title="Largest values", columns=columns, rows=tuple(rows))


def _pairs(word: str, states: States) -> list[Column]:
    return [
        column
        for state in states
        for column in (Column(_title(word, state), "count"), Column(_title("bytes", state), "bytes"))
    ]


def _tallies(found: Iterable[Tally | None]) -> list[int]:
    return [number for tally in found for number in (tally or (0, 0))]


def _rows(cells: Iterable[tuple[Cell, ...]]) -> tuple[Row, ...]:
    return tuple(Row(each) for each in cells)


def _title(word: str, state: str) -> str:
    return f"{word} {state}".rstrip()


def _keys(mappings: Iterable[Mapping[_Key, object]]) -> list[_Key]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
