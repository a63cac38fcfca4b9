"""Run two StableHLO programs on the same inputs and subtract their results."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from xla_amp.cli import arguments as common
from xla_amp.errors import FileError

HELP = "difference of two programs on the same inputs, by result"

TOLERANCE = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``compare``."""
    common.program(parser, "a", "A")
    common.program(parser, "b", "B")
    parser.add_argument("--inputs", type=Path, metavar="NPZ", help="one array for each argument, in order")
    parser.add_argument("--seed", type=int, default=0, help="seed of random inputs, without --inputs (default 0)")
    parser.add_argument(
        "--tolerance",
        type=common.positive,
        default=TOLERANCE,
        help=f"largest accepted relative error of a result of B (default {TOLERANCE})",
    )
    common.function(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {
            "xla-amp compare step.mlir low.mlirbc --inputs samples.npz": "their results on samples",
            "xla-amp compare step.mlir low.mlirbc --quiet": "only whether they agree, for a script",
        },
        {0: "the results agree", 1: "they differ, or A or B holds no program"},
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.stablehlo.measure import comparison, samples

    if arguments.a == arguments.b == common.STANDARD:
        raise FileError("compare - -: standard input holds one program; name a file for A or B")
    a, b = (common.read(path, arguments.function) for path in (arguments.a, arguments.b))
    inputs = None if arguments.inputs is None else samples.read_samples(arguments.inputs)
    found = comparison.compare(a, b, inputs, seed=arguments.seed)
    agrees = found.agrees(arguments.tolerance)
    page = found.page(f"A = {common.shown(arguments.a)}, B = {common.shown(arguments.b)}", arguments.tolerance)
    used = f"random, seed {arguments.seed}" if inputs is None else str(arguments.inputs)
    page = dataclasses.replace(page, facts={"inputs": used})
    if arguments.json:
        return common.as_json({"agrees": agrees, "tolerance": arguments.tolerance, **found.to_dict()}), int(not agrees)
    return page.text(), int(not agrees)
