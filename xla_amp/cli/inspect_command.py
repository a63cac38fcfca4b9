"""Count a StableHLO program's operations, casts and bytes by dtype; estimate its cost on absent hardware."""

from __future__ import annotations

import argparse

from xla_amp.cli import arguments as common
from xla_amp.tools.inspect import targets

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
    common.function(parser)
    common.report(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {
            "xla-amp inspect step.mlir": "tables",
            "xla-amp inspect step.mlir --target v6e --target h100 --json": "with the estimates of two compilers",
            "xla-amp inspect xla_dump/": "the only program of an XLA dump",
        },
        {0: "done", 1: "FILE holds no program, or a target rejects it"},
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.report import terminal
    from xla_amp.tools.inspect import inspection

    common.check_report(arguments)
    program = common.read(arguments.file, arguments.function)
    chosen = targets.names() if EVERY in arguments.target else dict.fromkeys(arguments.target)
    found = inspection.inspect(program, targets=chosen, largest=arguments.largest)
    status = int(any(isinstance(each, str) for each in found.targets.values()))
    document = found.document(f"{common.shown(arguments.file)}: {program.source}")
    common.write_report(arguments, document)
    if arguments.json:
        head = {"file": common.shown(arguments.file), "format": program.source}
        return common.as_json({**head, **found.to_dict()}), status
    return terminal.text(document), status
