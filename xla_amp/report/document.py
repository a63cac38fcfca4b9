"""What a report shows: facts, findings, tables whose rows belong to layers, and the graph between the layers.

`explain`, `find_overflow`, `monitor`, `inspect`, `compare` and `convert` make a `Document` each. `xla_amp.report.page`
and `xla_amp.report.terminal` show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["risk", "could", "low", "wide", "same", "cast", "plumbing", ""]

STATES: Final[dict[State, str]] = {
    "risk": "look here",
    "could": "float32, could be low",
    "low": "low",
    "wide": "float32 on purpose",
    "same": "float32, no rule",
    "cast": "cast",
    "plumbing": "plumbing",
}
"""State of a row -> its words. ``plumbing`` is integers, views and constants: hidden until the reader asks."""

CellKind: TypeAlias = Literal[
    "text", "name", "scope", "place", "count", "bytes", "flops", "seconds", "share", "error", "series"
]
"""How the cells of a column are written. ``scope`` is a path with dots, ``place`` ``file:line``, ``name`` says most at
its end, ``series`` is one number for each of `Table.steps`; the others but ``text`` are single numbers."""

Cell: TypeAlias = str | float | int | Sequence[float | None] | None
"""None is an empty cell."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    kind: CellKind = "text"
    sum: bool = False
    """Whether layers show the sum of their rows."""
    least: bool = False
    """Whether layers show the smallest of their rows; otherwise the largest, unless they show the sum."""
    detail: bool = False
    """Whether the terminal leaves it out, and the page shows it for the chosen row only."""
    meaning: str = ""
    """A sentence for the header's tooltip."""

    @property
    def numeric(self) -> bool:
        return self.kind not in ("text", "name", "scope", "place", "series")


class Row(NamedTuple):
    """One row; the cells are those of the table's columns."""

    cells: tuple[Cell, ...]
    state: State = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in the order of the program. A column of the kind ``scope`` makes a tree of the rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    steps: tuple[int, ...] = ()
    """Steps of the cells of kind ``series``."""
    note: str = ""
    ranked: bool = False
    """Whether the most important rows come first; otherwise those with the most FLOP or bytes are the most important.
    A terminal without room for all rows shows these."""
    page_only: bool = False
    """Whether a terminal shows nothing of it: findings say the same."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{self.title}: {len(self.columns)} columns, and a row of {len(row.cells)} cells")

    def without_empty_columns(self) -> Table:
        """The same table without the columns whose cells are all empty."""
        kept = [i for i in range(len(self.columns)) if any(row.cells[i] not in (None, "") for row in self.rows)]
        return dataclasses.replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(row._replace(cells=tuple(row.cells[i] for i in kept)) for row in self.rows),
        )

    def renamed(self, names: Mapping[str, str]) -> Table:
        """The same table with other names of columns."""
        columns = tuple(column._replace(name=names.get(column.name, column.name)) for column in self.columns)
        return dataclasses.replace(self, columns=columns)


class Finding(NamedTuple):
    """A question of the reader, with the answer."""

    question: str
    answer: str
    state: State = ""
    items: tuple[tuple[str, str], ...] = ()
    """(what, where or why), the most important first."""


class Curve(NamedTuple):
    """One number over the steps of a run; only pages draw it, above all else."""

    title: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    """One for each step; None where it is not known, inf or NaN where it was not finite."""


class Edge(NamedTuple):
    """Values that flow from the operations of one scope to those of another."""

    source: str
    target: str
    dtype: str
    number: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A report for people."""

    title: str
    kind: str
    """The function or command that made it: ``explain``."""
    state: State = ""
    """``risk`` makes the title red."""
    link: tuple[str, str] | None = None
    """(text, address) under the title of the page."""
    facts: tuple[tuple[str, str], ...] = ()
    curves: tuple[Curve, ...] = ()
    findings: tuple[Finding, ...] = ()
    tables: tuple[Table, ...] = ()
    edges: tuple[Edge, ...] = ()
    """The graph between scopes, whose layers are those of the first table."""
