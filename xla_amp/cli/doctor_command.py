"""Print versions, devices, what the processor supports, the cache of programs and known conflicts, for an issue."""

from __future__ import annotations

import argparse
import dataclasses

from xla_amp.cli import arguments as common

HELP = "versions, devices, the cache of compiled programs and known conflicts, to paste into an issue"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``doctor``."""
    common.json_instead(parser)
    common.epilog(
        parser,
        {"xla-amp doctor": "everything", "xla-amp doctor --json": "the same for a program"},
        {0: "done", 1: "something does not fit together"},
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.tools import doctor

    found = doctor.diagnose()
    text = common.as_json(dataclasses.asdict(found)) if arguments.json else str(found)
    return text, int(bool(found.conflicts))
