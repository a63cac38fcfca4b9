"""Count a StableHLO program's operations, casts and bytes by dtype; estimate its cost on absent hardware."""

from __future__ import annotations

import argparse

from xla_amp.cli import arguments as common
from xla_amp.stablehlo.tools import targets

HELP = "operations, contractions, casts and bytes by dtype; estimates for TPUs and GPUs"

EVERY = "all"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``inspect``."""
    common.program(parser, "file", "FILE")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        choices=[*targets.names(), EVERY],
        help="also compile for this target and print XLA's estimates; may be repeated",
    )
    parser.add_argument(
        "--largest", type=common.count, default=10, metavar="N", help="number of largest values to list (default 10)"
    )
    common.report(parser)
    common.json_instead(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.report import terminal
    from xla_amp.stablehlo import io
    from xla_amp.stablehlo.tools import inspection

    common.check_report(arguments)
    program = io.load(arguments.file)
    chosen = targets.names() if EVERY in arguments.target else dict.fromkeys(arguments.target)
    found = inspection.inspect(program, targets=chosen, largest=arguments.largest)
    status = int(any(isinstance(each, str) for each in found.targets.values()))
    document = found.document(f"{arguments.file}: {program.format}")
    common.write_report(arguments, document)
    if arguments.json:
        return common.as_json({"file": str(arguments.file), "format": program.format, **found.to_dict()}), status
    return terminal.text(document), status
