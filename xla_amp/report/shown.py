"""What all results with a report for people have."""

from __future__ import annotations

import abc
import dataclasses
import os

from xla_amp.report import page, terminal
from xla_amp.report.document import Document


class Shown(abc.ABC):
    """A result that ``print`` shows, and `to_html` writes as a page."""

    __slots__ = ()

    @abc.abstractmethod
    def document(self) -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""

    def to_html(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Writes the report as one HTML file, which loads nothing.

        Args:
            path: of the file.
            title: of the page; None: what the report is about.

        Raises:
            MissingLibraryError: jinja2 is not installed.
            FileError: the file cannot be written.
        """
        document = self.document()
        page.write(document if title is None else dataclasses.replace(document, title=title), path)

    def __str__(self) -> str:
        """Findings and tables."""
        return terminal.text(self.document())

    def _repr_html_(self) -> str:
        """The page, for notebooks."""
        return page.framed(self.document())
