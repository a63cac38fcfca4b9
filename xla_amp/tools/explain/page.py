"""`Page`: what every tool shows people, as text for a terminal and as one HTML file without a script.

    Page("4 operations", {"policy": "tpu"}, [Section("Operations", table=Table(columns=..., rows=...))])

A result of a tool is a `Report`: it makes a page, and gets ``print``, ``to_html`` and a notebook's view from it.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.resources
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, Literal, TypeAlias

from xla_amp.common.tables import Table, terminal_width
from xla_amp.errors import MissingLibraryError, printable, writing

Tone: TypeAlias = Literal["risk", "could", "low", ""]
"""Colour of a section: ``risk`` to look at, ``could`` to consider, ``low`` all is well."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A question with its answer, a table, or a drawing."""

    title: str
    text: str = ""
    state: Tone = ""
    items: Sequence[tuple[str, str]] = ()
    """(what, where or why), the most important first."""
    table: Table | None = None
    svg: str = ""
    """A drawing for the page, as of `curve`."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but a title."""
        return not (self.text or self.items or self.svg or (self.table and (self.table.rows or self.table.note)))


@dataclasses.dataclass(frozen=True)
class Page:
    """A report for people; sections without content are left out."""

    title: str
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sections: Sequence[Section] = ()
    state: Tone = ""
    """``risk`` makes the title red."""

    def text(self, width: int | None = None, most: int = 40) -> str:
        """Lines of at most `width` characters, and at most `most` rows a table; None: the terminal's width."""
        width = width or terminal_width()
        parts = [printable(self.title)]
        if self.facts:
            names = max(map(len, self.facts))
            parts.append("\n".join(_wrapped(f"{n.ljust(names)}  {v}", names + 2, width) for n, v in self.facts.items()))
        for section in self.sections:
            if section.is_empty or (section.svg and not section.text):
                continue
            lines = [_wrapped(section.title, 0, width)]
            lines += [_wrapped(f"  {section.text}", 2, width)] if section.text else []
            lines += [_wrapped(f"  - {a}" + (f": {b}" if b else ""), 4, width) for a, b in section.items]
            lines += [section.table.text(width, most)] if section.table else []
            parts.append("\n".join(filter(None, lines)))
        return "\n\n".join(parts)

    def html(self) -> str:
        """The text of the page.

        Raises:
            MissingLibraryError: jinja2 is not installed.
        """
        try:
            import jinja2
        except ImportError:
            raise MissingLibraryError("an HTML report: jinja2 is not installed: pip install 'xla-amp[cli]'") from None
        source = importlib.resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        return environment.from_string(source).render(page=self, sections=[s for s in self.sections if not s.is_empty])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the page.

        Raises:
            MissingLibraryError: jinja2 is not installed.
            FileError: the file cannot be written.
        """
        text = self.html()
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")


class Report(abc.ABC):
    """A result that ``print`` shows, and `to_html` writes as a page."""

    __slots__ = ()

    @abc.abstractmethod
    def page(self) -> Page:
        """The report for people."""

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one HTML file, which loads nothing.

        Raises:
            MissingLibraryError: jinja2 is not installed.
            FileError: the file cannot be written.
        """
        self.page().write(path)

    def __str__(self) -> str:
        """The page as text."""
        return self.page().text()

    def _repr_html_(self) -> str:
        """The page in an element ``iframe``, for notebooks; without jinja2 its text."""
        try:
            text = self.page().html()
        except MissingLibraryError:
            return f"<pre>{escape(str(self))}</pre>"
        return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 600px; border: 0"></iframe>'


_WIDTH: Final = 300
_HEIGHT: Final = 80


def curve(steps: Sequence[int], values: Sequence[float | None], name: str) -> str:
    """`values` over `steps` as SVG: None leaves a gap, and a red line is where a value is not finite."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    parts: list[list[str]] = [[]]
    bad = []
    for step, value in zip(steps, values, strict=True):
        x = (step - steps[0]) / max(steps[-1] - steps[0], 1) * _WIDTH
        if value is not None and math.isfinite(value):
            share = (value - low) / (high - low) if high > low else 0.5
            parts[-1].append(f"{x:.1f},{(1 - share) * _HEIGHT:.1f}")
            continue
        parts.append([])
        if value is not None:
            bad.append(f'<path class="bad" d="M{x:.1f},0V{_HEIGHT}"/>')
    lines = "".join(f'<polyline points="{" ".join(part)}"/>' for part in parts if part)
    label = f"{name}: {low:.4g} to {high:.4g} in steps {steps[0]:,} to {steps[-1]:,}" if steps else name
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(label)}</title>{''.join(bad)}{lines}</svg>"
    )


def _wrapped(line: str, indent: int, width: int) -> str:
    line = printable(line)
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * min(indent, width // 2), break_on_hyphens=False)
