"""Look at what xla_amp.monitor kept of a training run in PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

from xla_amp.cli import arguments as common

HELP = "replay: run a bad step that a monitor kept once more, and find where it overflows"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds ``replay``."""
    examples = {"xla-amp monitor replay runs/7 --make train:make": "train.py has a function make"}
    statuses = {0: "the same bits", 1: "the step was not reproduced bit for bit"}
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    common.epilog(parser, examples, statuses)
    replay = actions.add_parser("replay", help=_REPLAY, description=_REPLAY)
    replay.add_argument("directory", type=Path, metavar="DIRECTORY", help="of the monitor, or a bad step's")
    replay.add_argument(
        "--make",
        required=True,
        metavar="MODULE:FUNCTION",
        help="function that returns (model, optimizer, scaler, step)",
    )
    common.report(replay)
    common.json_instead(replay)
    common.epilog(replay, examples, statuses)
    replay.set_defaults(run=_run)


_REPLAY = (
    "run a bad step that the monitor kept once more, under find_overflow, and write report.txt beside it; "
    "MODULE:FUNCTION returns (model, optimizer, scaler, step)"
)


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
