"""Run a bad step that xla_amp.monitor kept once more, under find_overflow; writes report.txt beside it.

MODULE:FUNCTION returns (model, optimizer, scaler, step).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xla_amp.cli import arguments as common

HELP = "run a bad step that a monitor kept once more, and find where it overflows"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``replay``."""
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="of the monitor, or a bad step's")
    parser.add_argument(
        "--make",
        required=True,
        metavar="MODULE:FUNCTION",
        help="function that returns (model, optimizer, scaler, step)",
    )
    common.report(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {"xla-amp replay runs/7 --make train:make": "train.py has a function make"},
        {0: "the same bits", 1: "the step was not reproduced bit for bit"},
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    import dataclasses

    from xla_amp.tools.monitor.on_pytorch.replay import replay

    common.check_report(arguments)
    report = replay(arguments.directory, arguments.make)
    common.write_report(arguments, report.document())
    status = int(not report.reproduced)
    if arguments.json:
        return common.as_json({**dataclasses.asdict(report), "folder": str(report.folder)}), status
    return str(report), status
