"""`Page`: what every tool shows people, as text for a terminal.

    Page("4 operations", {"policy": "tpu"}, [Section("Operations", table=Table(columns=..., rows=...))])

A result of a tool is a `Report`: it makes a page, and gets ``print`` and a notebook's view from it.
"""

from __future__ import annotations

import abc
import dataclasses
import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from xla_amp.common.tables import Table, terminal_width
from xla_amp.errors import printable
from xla_amp.public_names import Left


@dataclasses.dataclass(frozen=True)
class Section:
    """A question with its answer, or a table."""

    title: str
    text: str = ""
    items: Sequence[tuple[str, str]] = ()
    """(what, where or why), the most important first."""
    table: Table | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but a title."""
        return not (self.text or self.items or (self.table and (self.table.rows or self.table.note)))


@dataclasses.dataclass(frozen=True)
class Page:
    """A report for people; sections without content are left out."""

    title: str
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sections: Sequence[Section] = ()

    def text(self, width: int | None = None, most: int = 40) -> str:
        """Lines of at most `width` characters, and at most `most` rows a table; None: the terminal's width."""
        width = width or terminal_width()
        parts = [printable(self.title)]
        if self.facts:
            names = max(map(len, self.facts))
            parts.append("\n".join(_wrapped(f"{n.ljust(names)}  {v}", names + 2, width) for n, v in self.facts.items()))
        for section in self.sections:
            if section.is_empty:
                continue
            lines = [_wrapped(section.title, 0, width)]
            lines += [_wrapped(f"  {section.text}", 2, width)] if section.text else []
            lines += [_wrapped(f"  - {a}" + (f": {b}" if b else ""), 4, width) for a, b in section.items]
            lines += [section.table.text(width, most)] if section.table else []
            parts.append("\n".join(filter(None, lines)))
        return "\n\n".join(parts)

    def html(self) -> str | None:
        """The same for a notebook, each table drawn by pandas; None where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            return None
        parts = [f"<b>{html.escape(printable(self.title))}</b>"]
        for section in (Section("", items=tuple(self.facts.items())), *self.sections):
            if section.is_empty:
                continue
            lines = (section.text, *(f"{a}: {b}" if b else a for a, b in section.items))
            parts += [f"<p><b>{html.escape(section.title)}</b>", *map(html.escape, map(printable, lines))]
            if (table := section.table) is not None:
                names, rows = table.shown()
                parts += [pandas.DataFrame(rows, columns=names).to_html(index=False), html.escape(table.note)]
        return "<br>".join(filter(None, parts))


class Report(Left, abc.ABC):
    """A result that ``print`` shows, and a notebook where it is a cell's last line."""

    __slots__ = ()

    @abc.abstractmethod
    def page(self) -> Page:
        """The report for people."""

    def __str__(self) -> str:
        """The page as text."""
        return self.page().text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython's way to show an object."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """A notebook's way to show an object."""
        return self.page().html()


def _wrapped(line: str, indent: int, width: int) -> str:
    line = printable(line)
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * min(indent, width // 2), break_on_hyphens=False)
