"""What several examples share: a text to learn, a table of results, `--help` without an error."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import app
from rich.console import Console
from rich.table import Table


def documentation() -> bytes:
    """The documentation strings of the standard library's modules, classes and functions."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    found.append(text)
    return "\n\n".join(found).encode()


def load_text(path: str | None) -> bytes:
    """The bytes of a file, or those of `documentation`."""
    return documentation() if path is None else Path(path).read_bytes()


def show(title: str, results: Mapping[str, Any], as_json: bool) -> None:
    """Prints results as a table and, if asked for, as one JSON object on the last line."""
    table = Table(title=title, show_header=False)
    for name, value in results.items():
        table.add_row(name.replace("_", " "), f"{value:.5g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if as_json:
        print(json.dumps(results))


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run`, except that ``--help`` is no error."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)
    app.run(main)
