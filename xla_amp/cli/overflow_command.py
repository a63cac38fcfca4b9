"""Run a StableHLO program operation by operation and name the one that makes the first inf or NaN."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from xla_amp.cli import arguments as common

HELP = "which operation of a program makes the first inf or NaN"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``overflow``."""
    common.program(parser, "program", "PROGRAM")
    parser.add_argument("--inputs", type=Path, metavar="NPZ", help="one array for each argument, in order")
    parser.add_argument("--seed", type=int, default=0, help="seed of random inputs, without --inputs (default 0)")
    common.function(parser)
    common.report(parser)
    common.timeout(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {"xla-amp overflow low.mlir --inputs samples.npz": "the operation that makes the first inf or NaN on samples"},
        {
            0: "no operation overflows and the results are finite",
            1: "one does, one is not, or PROGRAM holds no program",
        },
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.report import terminal
    from xla_amp.tools.inspect import samples
    from xla_amp.tools.overflow import on_stablehlo as overflow

    common.check_report(arguments)
    program = common.read(arguments.program, arguments.function)
    given = str(arguments.inputs) if arguments.inputs else f"random, seed {arguments.seed}"
    arrays = (
        samples.read_samples(arguments.inputs)
        if arguments.inputs
        else samples.random_inputs(program.module, arguments.seed)
    )
    found = overflow.find_overflow(program, arrays)
    status = int(bool(found.producers or found.results))
    document = dataclasses.replace(found.document(), facts=(("inputs", given), *found.document().facts))
    common.write_report(arguments, document)
    if arguments.json:
        return common.as_json({"inputs": given, **dataclasses.asdict(found)}), status
    return terminal.text(document), status
