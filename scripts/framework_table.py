#!/usr/bin/env python
"""Writes the table of training frameworks in docs/frameworks.md from results of the tests.

    pytest tests/integrations --junit-xml results.xml
    python scripts/framework_table.py results.xml

Tests record what they measured (the fixture `record` of tests/integrations/conftest.py), and fail if the page has no
such row: so the page is what the tests found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "frameworks.md"
PROPERTY = "framework"
"""Name of the property of a test in pytest's report."""

COLUMNS = ("framework", "precision", "executables a step", "waits a step", "save and resume")
Rows = dict[tuple[str, str], dict[str, str]]


def rows(text: str) -> Rows:
    """The rows of the page's table, by framework and precision."""
    found: Rows = {}
    lines = iter(text.splitlines())
    for line in lines:
        if cells(line) == list(COLUMNS):
            next(lines)
            break
    for line in lines:
        if not line.startswith("|"):
            break
        framework, precision, *rest = cells(line)
        found[framework, precision] = dict(zip(COLUMNS[2:], rest, strict=True))
    return found


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def recorded(reports: Iterable[Path]) -> Rows:
    """What tests recorded, by framework and precision."""
    found: Rows = {}
    for report in reports:
        for entry in ElementTree.parse(report).iter("property"):
            if entry.get("name") == PROPERTY:
                facts: Mapping[str, str] = json.loads(entry.get("value", ""))
                row = found.setdefault((facts["framework"], facts["precision"]), dict.fromkeys(COLUMNS[2:], ""))
                row |= {name: value for name, value in facts.items() if name in row}
    return found


def table(of: Rows) -> str:
    """The table as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join([*key, *row.values()])} |" for key, row in sorted(of.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", nargs="+", type=Path, help="file of pytest's --junit-xml")
    found = recorded(parser.parse_args().report)
    text = PAGE.read_text("utf-8")
    old = rows(text)
    if missing := sorted(set(old) - set(found)):
        print(f"the reports have nothing about {missing}: run all tests of tests/integrations", file=sys.stderr)
        return 1
    PAGE.write_text(text.replace(table(old), table(found)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
