"""The command ``xla-amp``; ``python -m xla_amp.cli`` is the same.

Exit status: 0 yes or done, 1 no (a file that is malformed, programs or policies that differ), 2 a mistake in the call.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from xla_amp.errors import ModuleError, XlaAmpError

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "convert": "xla_amp.cli.convert_command",
        "inspect": "xla_amp.cli.inspect_command",
        "compare": "xla_amp.cli.compare_command",
        "policy": "xla_amp.cli.policy_command",
        "completion": "xla_amp.cli.completion_command",
    }
)
"""Command -> module with ``HELP`` and ``configure(parser)``, which sets ``run``: parsed arguments -> `Answer`.

The modules are loaded for every call, so they load torch and jax only when they run."""

_LONGEST: Final = 1000
"""Characters of an error; MLIR's may quote a whole call stack."""


class Answer(NamedTuple):
    """What a command has to say."""

    text: str
    status: int = 0


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="xla-amp", description="Automatic mixed precision for XLA.")
    top.set_defaults(top=top)  # for a command that is about the others: completion
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = importlib.import_module(module)
        command.configure(commands.add_parser(name, help=command.HELP, description=command.__doc__))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` is without the program's name. Returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        answer = arguments.run(arguments)
    except XlaAmpError as error:
        print(textwrap.shorten(f"xla-amp: {error}", _LONGEST, placeholder=" ..."), file=sys.stderr)
        return 1 if isinstance(error, ModuleError) else 2
    except KeyboardInterrupt:
        print("xla-amp: interrupted", file=sys.stderr)
        return 130
    try:
        print(answer[0], flush=True)
    except BrokenPipeError:  # `xla-amp ... | head`
        sys.stderr.close()
    status: int = answer[1]
    return status
