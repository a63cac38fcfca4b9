"""A document as one HTML file: data as JSON, and a script that draws the rows which are in sight. It loads nothing."""

from __future__ import annotations

import importlib.resources
import json
import math
import os
from html import escape
from pathlib import Path
from typing import Any, Final

from xla_amp.errors import MissingLibraryError, writing
from xla_amp.report import curve, terminal, units
from xla_amp.report.document import STATES, Cell, Document, Table

MISSING: Final = "jinja2 is not installed: pip install 'xla-amp[cli]'"


def write(document: Document, path: str | os.PathLike[str]) -> None:
    """Writes the page.

    Raises:
        MissingLibraryError: jinja2 is not installed.
        FileError: the file cannot be written.
    """
    text = html(document)
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


def html(document: Document) -> str:
    """The text of the page.

    Raises:
        MissingLibraryError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingLibraryError(f"an HTML report: {MISSING}") from None

    files = importlib.resources.files(__package__).joinpath("templates")
    parts = {each: files.joinpath(each).read_text(encoding="utf-8") for each in ("page.html.j2", "page.css", "page.js")}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, loader=jinja2.DictLoader(parts)
    )
    shown = [table for table in document.tables if table.rows]
    data = {
        "states": STATES,
        "tables": [_table(each) for each in shown],
        "edges": [list(edge) for edge in document.edges],
    }
    template = environment.get_template("page.html.j2")
    curves = [(each, curve.line(each)) for each in document.curves if each.steps]
    return template.render(document=document, tables=shown, curves=curves, data=_embedded(data))


def framed(document: Document) -> str:
    """The page in an element ``iframe``, for notebooks; without jinja2 the text of a terminal."""
    try:
        text = html(document)
    except MissingLibraryError:
        return f"<pre>{escape(terminal.text(document, terminal.WIDTH))}</pre>"
    return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 600px; border: 0"></iframe>'


def _embedded(data: Any) -> Any:
    """JSON for an element ``script``: no text can end it."""
    import markupsafe

    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)


def _table(table: Table) -> dict[str, Any]:
    """By columns; a column of text is a list of its texts and one index for each row."""
    states = list(STATES)
    columns = []
    for index, column in enumerate(table.columns):
        cells = [row.cells[index] for row in table.rows]
        entry: dict[str, Any] = {
            "name": column.name,
            "kind": column.kind,
            "sum": column.sum,
            "least": column.least,
            "detail": column.detail,
            "meaning": column.meaning,
        }
        if column.numeric or column.kind == "series":
            entry["cells"] = [_plain(cell) for cell in cells]
        else:
            texts = {text: number for number, text in enumerate(dict.fromkeys(str(cell or "") for cell in cells))}
            entry |= {"texts": list(texts), "cells": [texts[str(cell or "")] for cell in cells]}
        columns.append(entry)
    return {
        "title": table.title,
        "columns": columns,
        "states": [states.index(row.state) if row.state else -1 for row in table.rows],
        "steps": list(table.steps),
    }


def _plain(cell: Cell) -> Any:
    """Infinity and NaN as text: JSON has none."""
    if isinstance(cell, float) and not math.isfinite(cell):
        return units.cell(cell, "count")
    if cell is None or isinstance(cell, str | int | float):
        return cell
    return [_plain(each) for each in cell]
