"""Command-line arguments and output helpers that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xla_amp.cli import native
from xla_amp.common import tables
from xla_amp.errors import FileError

if TYPE_CHECKING:
    from xla_amp.stablehlo.program import Program

STANDARD: Final = Path("-")
"""Standard input, or standard output."""


def program(parser: argparse.ArgumentParser, name: str, metavar: str) -> None:
    """A positional argument: a file with a StableHLO program."""
    what = "MLIR text or bytecode, a portable artifact, a jax.export blob, HLO (text or proto), or - for standard input"
    parser.add_argument(name, metavar=metavar, type=Path, help=what)
    parser.set_defaults(on_cpu=True)


def function(parser: argparse.ArgumentParser) -> None:
    """``--function``."""
    parser.add_argument(
        "--function", metavar="NAME", help="the public function to run or to sign for, where there is no @main"
    )


def read(path: Path, function: str | None = None) -> Program:
    """The program in a file, or on standard input for ``-``; `function` is its entry where it has several.

    Raises:
        FileError: the file cannot be read.
        ModuleError: there is no program, or no such function.
    """
    from xla_amp.stablehlo import io, program

    data = sys.stdin.buffer.read() if path == STANDARD else io.contents(path)
    native.check(data, shown(path))
    return program.parse(data, shown(path), function=function)


def check_readable(path: Path) -> None:
    """Raises FileError for a file that cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise FileError(f"reading {path}: {error.strerror or error}") from None


def shown(path: Path) -> str:
    """The name of a file in reports and messages."""
    return "standard input" if path == STANDARD else str(path)


def json_instead(parser: argparse.ArgumentParser) -> None:
    """``--json`` and ``--quiet``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="JSON instead of tables")
    group.add_argument(
        "-q", "--quiet", action="store_true", help="print errors and warnings only; the exit status has the answer"
    )


def epilog(parser: argparse.ArgumentParser, examples: Mapping[str, str], statuses: Mapping[int, str]) -> None:
    """Examples (command -> what it does) and exit statuses at the end of ``--help``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = tables.terminal_width()
    parser.description = parser.description and textwrap.fill(parser.description, width, break_on_hyphens=False)
    lines = ["examples:", *(f"  {command}\n      {what}" for command, what in examples.items())]
    lines += [
        "",
        "exit status:",
        *(
            textwrap.fill(f"  {status}  {what}", width, subsequent_indent=" " * 5, break_on_hyphens=False)
            for status, what in sorted({**_STATUSES, **statuses}.items())
        ),
    ]
    parser.epilog = "\n".join(lines)


_STATUSES: Final = {
    2: "usage: an unknown option, a file that cannot be opened, a policy that cannot be loaded",
    130: "interrupted",
}
"""Exit statuses of every command."""


def check_written(output: Path, read: Sequence[Path]) -> None:
    """Checks the file of ``-o``, which no file of `read` may be, before any work.

    Raises:
        FileError: a file would be written over.
    """
    given = next((each for each in read if _is_same(output, each)), None)
    if given is not None:
        raise FileError(f"-o {output}: it is the input {given}, which would be lost; give another name")


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths are one file: also by a link, or in another spelling."""
    if STANDARD in (one, other):
        return False
    one, other = one.resolve(), other.resolve()
    return one == other or (one.is_file() and other.is_file() and one.samefile(other))


@contextlib.contextmanager
def writing_standard_output() -> Iterator[None]:
    """Writing to standard output that fails, inside, is a `FileError`.  A reader that has left is none."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # Python writes what is left when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise FileError(f"writing standard output: {error.strerror or error}") from None


def as_json(document: Any) -> str:
    """JSON of plain data; infinity and NaN, which JSON lacks, become strings."""
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value


def positive(text: str) -> float:
    """A positive finite number, for ``type=``."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number
