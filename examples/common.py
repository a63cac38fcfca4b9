"""What the examples share: a text to learn, a log, a table of results, `--help` without an error."""

from __future__ import annotations

import ast
import csv
import io
import json
import logging
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import absl.logging
from absl import app
from rich.console import Console
from rich.table import Table
from tqdm import tqdm


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


class Log:
    """Values of training steps: on a progress bar, and in TensorBoard's format and in `log.csv` below `folder`.

    A folder that has a `log.csv` is gone on with, as by a run that resumes from a checkpoint.
    """

    def __init__(self, folder: str | None) -> None:
        self.path: Path | None = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder)
            self.path = Path(folder) / "log.csv"

    def add(self, step: int, values: Mapping[str, Any], bar: tqdm[Any] | None = None) -> None:
        """Writes and shows what a step gave; a value on a device is read here, so Python waits for it."""
        read = {name: float(value) for name, value in values.items()}
        if bar is not None:
            bar.set_postfix({name: f"{value:.4g}" for name, value in read.items()})
        if self.path is None:
            return
        for name, value in read.items():
            self.writer.add_scalar(name, value, step)
        with open(self.path, "a+", newline="") as file:
            file.seek(0)
            names = next(csv.reader(file), None)
            lines = csv.DictWriter(file, names or ["step", *read])
            if names is None:
                lines.writeheader()
            lines.writerow({"step": step, **read})

    def close(self) -> None:
        """Completes TensorBoard's file."""
        if self.path is not None:
            self.writer.close()


def show(title: str, results: Mapping[str, Any], as_json: bool) -> None:
    """Prints results as a table and, if asked for, as one JSON object on the last line."""
    table = Table(title=title, show_header=False)
    for name, value in results.items():
        table.add_row(name.replace("_", " "), f"{value:.5g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if as_json:
        print(json.dumps(results))


class _AboveBars(io.TextIOBase):
    """Standard error, above the progress bars that are open."""

    def write(self, text: str) -> int:
        """Lines of a log end their line."""
        tqdm.write(text, sys.stderr, end="")
        return len(text)


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run`, except that ``--help`` is no error and that log lines do not cut through progress bars.

    Only warnings are logged, unless ``--verbosity`` says otherwise.
    """
    logging.captureWarnings(True)
    absl.logging.get_absl_handler().python_handler.setStream(_AboveBars())
    if {"-h", "--help"} & set(sys.argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)

    def quiet(argv: list[str]) -> None:
        if not any(flag.startswith(("-v", "--v")) for flag in sys.argv[1:]):
            absl.logging.set_verbosity(absl.logging.WARNING)  # `app.run` has set INFO
        main(argv)

    app.run(quiet)
