"""Tables of `xla_amp.stablehlo.inspect` results: one module, or before and after a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from xla_amp.common import units
from xla_amp.common.tables import Cell, Table
from xla_amp.tools.explain.page import Section

if TYPE_CHECKING:
    from xla_amp.tools.inspect.inspection import Inspection, Tally

_Key = TypeVar("_Key")

States: TypeAlias = "Mapping[str, Inspection]"
"""Column title -> inspection: ``{"": ...}`` for one module, ``{"before": ..., "after": ...}`` for a conversion."""


def sections(states: States) -> tuple[Section, ...]:
    """Contractions by the dtypes of their operands, operations by dtype, and casts."""
    products: list[tuple[Cell, ...]] = [
        (f"{key[0]} x {key[1]} -> {key[2]}", *(found.contractions.get(key, 0) for found in states.values()))
        for key in _keys(found.contractions for found in states.values())
    ]
    by_dtype: list[tuple[Cell, ...]] = [
        (dtype, *_tallies(found.dtypes.get(dtype) for found in states.values()))
        for dtype in _keys(found.dtypes for found in states.values())
    ]
    casts: list[tuple[Cell, ...]] = [
        (f"{kind[0]} -> {kind[1]}", *_tallies(found.casts.get(kind) for found in states.values()))
        for kind in _keys(found.casts for found in states.values())
    ]
    counts = tuple(_title("count", state) for state in states)
    return (
        Section("Contractions", table=Table(columns=("operands and result", *counts), rows=products)),
        _with_bytes("Operations by dtype of their result", ("dtype", "operations"), states, by_dtype),
        _with_bytes("Casts", ("from and to", "count"), states, casts),
    )


def largest(found: Inspection) -> Section:
    """The largest values."""
    rows = [(each.type, units.size(each.bytes), each.name, each.function, each.location) for each in found.largest]
    return Section(
        "Largest values", table=Table(columns=("type", "bytes", "of", "in", "where"), rows=rows, right=("bytes",))
    )


def _with_bytes(title: str, names: tuple[str, str], states: States, rows: list[tuple[Cell, ...]]) -> Section:
    """A table with a number and its bytes for each state."""
    sizes = tuple(_title("bytes", state) for state in states)
    pairs = (name for state, size in zip(states, sizes, strict=True) for name in (_title(names[1], state), size))
    return Section(title, table=Table(columns=(names[0], *pairs), rows=rows, right=sizes))


def _tallies(found: Iterable[Tally | None]) -> list[Cell]:
    return [cell for tally in found for cell in ((tally.number, units.size(tally.bytes)) if tally else (0, "0 B"))]


def _title(word: str, state: str) -> str:
    return f"{word} {state}".rstrip()


def _keys(mappings: Iterable[Mapping[_Key, object]]) -> list[_Key]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
