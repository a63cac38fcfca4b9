"""Print a shell script that completes commands, options and files: eval "$(xla-amp completion bash)"."""

from __future__ import annotations

import argparse

from xla_amp.cli import arguments as common
from xla_amp.errors import MissingLibraryError

HELP = "shell completion for bash, zsh or tcsh"

SHELLS = ("bash", "zsh", "tcsh")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``completion``."""
    parser.add_argument("shell", choices=SHELLS)
    common.epilog(parser, {'eval "$(xla-amp completion bash)"': "for this shell"}, {0: "done"})
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    try:
        import shtab
    except ImportError:
        raise MissingLibraryError("completion: shtab is not installed: pip install 'xla-amp[cli]'") from None
    return shtab.complete(arguments.top, shell=arguments.shell), 0
