"""Count a StableHLO program's operations, casts and bytes by dtype."""

from __future__ import annotations

import argparse

from xla_amp.cli import arguments as common

HELP = "operations, products, casts and bytes by dtype"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``inspect``."""
    common.program(parser, "file", "FILE")
    common.function(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {
            "xla-amp inspect step.mlir": "tables",
            "xla-amp inspect step.mlir --json": "for a script",
        },
        {0: "done", 1: "FILE holds no program"},
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.stablehlo.measure import inspection

    program = common.read(arguments.file, arguments.function)
    found = inspection.inspect(program)
    if arguments.json:
        head = {"file": common.shown(arguments.file), "format": program.source}
        return common.as_json({**head, **found.to_dict()}), 0
    return found.page(f"{common.shown(arguments.file)}: {program.source}").text(), 0
