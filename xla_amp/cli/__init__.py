"""The command ``xla-amp``; ``python -m xla_amp`` is the same.

Exit status: 0 success; 1 negative answer (malformed file, programs or policies that differ); 2 usage error;
3 a conversion that cannot reach its target error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from xla_amp import __version__
from xla_amp.cli import arguments as common
from xla_amp.cli import convert_command, native
from xla_amp.common import progress
from xla_amp.errors import FileError, ModuleError, TargetError, XlaAmpError, printable

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "convert": "xla_amp.cli.convert_command",
        "doctor": "xla_amp.cli.doctor_command",
        "inspect": "xla_amp.cli.inspect_command",
        "compare": "xla_amp.cli.compare_command",
        "policy": "xla_amp.cli.policy_command",
    }
)
"""Command -> module with ``HELP`` and ``configure(parser)``, which sets ``run``: arguments -> (text, exit status).

Every call imports all of these modules, so they import torch and jax only in ``run``."""

_STATUSES: Final = ((ModuleError, 1), (TargetError, convert_command.TARGET_MISSED))
"""Errors that are no usage errors -> exit status."""

_LONGEST: Final = 1000
"""Largest length of an error message; MLIR's can contain a whole call stack."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="xla-amp", description="Automatic mixed precision for XLA.")
    top.set_defaults(on_cpu=False, quiet=False, output=None)
    common.epilog(
        top,
        {
            "xla-amp convert step.mlir -o low.mlirbc": "mixed precision for one StableHLO program",
            "xla-amp inspect --help": "options, examples and exit statuses of one command",
        },
        {0: "done", 1: "a negative answer: no program, programs or policies that differ, something that is not finite"},
    )
    top.add_argument("--version", action="version", version=f"xla-amp {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, module in COMMANDS.items():
        command = importlib.import_module(module)
        given = commands.add_parser(name, help=command.HELP, description=command.__doc__, allow_abbrev=False)
        given.set_defaults(refuse=given.error)  # with the usage of the command, where argparse has that of all
        command.configure(given)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` excludes the program's name. Returns the exit status."""
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    silent = arguments.quiet or not arguments.on_cpu
    show = contextlib.nullcontext() if silent else progress.shown(f"xla-amp {arguments.command}")
    try:
        with show:
            if arguments.on_cpu:
                native.start()
            answer: tuple[str, int] = arguments.run(arguments)
    except XlaAmpError as error:
        print(textwrap.shorten(f"xla-amp: {error}", _LONGEST, placeholder=" ..."), file=sys.stderr)
        return next((status for kind, status in _STATUSES if isinstance(error, kind)), 2)
    except KeyboardInterrupt:
        print("xla-amp: interrupted", file=sys.stderr)
        return 130
    text, status = answer
    if arguments.quiet:
        return status
    try:
        with common.writing_standard_output():
            print(printable(text), file=sys.stderr if arguments.output == common.STANDARD else sys.stdout, flush=True)
    except FileError as error:
        print(f"xla-amp: {error}", file=sys.stderr)
        return 2
    return status
