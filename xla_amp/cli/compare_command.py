"""Run two StableHLO programs on the same inputs and report their errors against the first one in float64."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xla_amp.cli import arguments as common

if TYPE_CHECKING:
    from xla_amp.cli.documents import Document
    from xla_amp.stablehlo.tools.comparison import Comparison

HELP = "errors of two programs against float64, by result and by operation"

TOLERANCE = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``compare``."""
    common.program(parser, "a", "A")
    common.program(parser, "b", "B")
    sample = parser.add_argument("--inputs", type=Path, metavar="NPZ", help="one array for each argument, in order")
    sample.complete = common.FILE  # type: ignore[attr-defined]
    parser.add_argument("--seed", type=int, default=0, help="seed of random inputs, without --inputs (default 0)")
    parser.add_argument(
        "--tolerance",
        type=common.positive,
        default=TOLERANCE,
        help=f"largest accepted relative error of a result of B (default {TOLERANCE})",
    )
    parser.add_argument("--no-operations", action="store_true", help="compare results only")
    parser.add_argument("--worst", type=common.count, default=10, metavar="N", help="operations to list (default 10)")
    common.report(parser)
    common.json_instead(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.stablehlo import io
    from xla_amp.stablehlo.tools import comparison, samples

    common.check_report(arguments)
    a, b = io.load(arguments.a), io.load(arguments.b)
    inputs = samples.read_samples(arguments.inputs) if arguments.inputs else None
    found = comparison.compare(a, b, inputs, seed=arguments.seed, operations=not arguments.no_operations)
    agrees = found.agrees(arguments.tolerance)
    document = _document(arguments, found, agrees)
    common.write_report(arguments, common.report_page(arguments, document))
    if arguments.json:
        return common.as_json({"agrees": agrees, "tolerance": arguments.tolerance, **found.to_dict()}), int(not agrees)
    return document.text(), int(not agrees)


def _document(arguments: argparse.Namespace, found: Comparison, agrees: bool) -> Document:
    from xla_amp.cli.documents import Bar, Chart, Document, Table, dtype_kind, error

    numbers = ("error of A", "error of B", "largest in A", "largest in B", "not finite in B")
    outputs = [
        [str(each.number), each.type, error(each.a.relative), error(each.b.relative), error(each.a.largest),
         error(each.b.largest), str(each.b.nonfinite)]
        for each in found.outputs
    ]  # fmt: skip
    worst = [
        [each.operation, each.type_a, each.type_b, error(each.a.relative), error(each.b.relative),
         str(each.b.nonfinite), each.location]
        for each in found.worst(arguments.worst)
    ]  # fmt: skip
    bars = tuple(
        Bar(each.operation, each.b.relative, error(each.b.relative), dtype_kind(each.type_b.partition("[")[0]))
        for each in found.worst(40)
        if each.b.relative < float("inf")
    )
    facts = [
        ("inputs", str(arguments.inputs) if arguments.inputs else f"random, seed {arguments.seed}"),
        ("reference", found.reference),
        ("verdict", f"{'agree' if agrees else 'differ'} at a tolerance of {arguments.tolerance:g}"),
    ]
    if any(found.unmatched):
        facts.append(("without counterpart", f"{found.unmatched[0]} results in A, {found.unmatched[1]} in B"))
    return Document(
        title=f"A = {arguments.a}, B = {arguments.b}",
        facts=tuple(facts),
        tables=(
            Table(
                "Results (relative errors, then largest absolute ones)", ("result", "type", *numbers), outputs, numbers
            ),
            Table(
                "Operations with the largest errors, errors of their operands included",
                ("operation", "in A", "in B", "error of A", "error of B", "not finite in B", "from"),
                worst,
                numbers,
            ),
        ),
        charts=(Chart("Relative error of operations in B", bars),) if bars else (),
    )
