"""Count a StableHLO program's operations, casts and bytes by dtype.

With --overflow: run it and name the operation that makes the first inf or NaN.
"""

from __future__ import annotations

import argparse
import dataclasses

from xla_amp.cli import arguments as common

HELP = "operations, contractions, casts and bytes by dtype; the first inf or NaN"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``inspect``."""
    common.program(parser, "file", "FILE")
    parser.add_argument(
        "--overflow",
        action="store_true",
        help="instead: run the program on --inputs, operation by operation, and name the one that makes the first inf "
        "or NaN",
    )
    common.left(parser, "--target", "benchmarks/targets.py compiles programs for absent hardware")
    common.inputs(parser)
    common.function(parser)
    common.report(parser)
    common.timeout(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {
            "xla-amp inspect step.mlir": "tables",
            "xla-amp inspect low.mlir --overflow --inputs samples.npz": "the operation that makes the first inf or NaN",
            "xla-amp inspect xla_dump/": "the only program of an XLA dump",
        },
        {
            0: "done; with --overflow: no operation overflows and the results are finite",
            1: "FILE holds no program; with --overflow: one overflows, one is not finite",
        },
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    common.check_report(arguments)
    common.check_needs(arguments, {"inputs": "overflow"})
    return _overflow(arguments) if arguments.overflow else _inspect(arguments)


def _inspect(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.report import terminal
    from xla_amp.tools.inspect import inspection

    program = common.read(arguments.file, arguments.function)
    found = inspection.inspect(program)
    document = found.document(f"{common.shown(arguments.file)}: {program.source}")
    common.write_report(arguments, document)
    if arguments.json:
        head = {"file": common.shown(arguments.file), "format": program.source}
        return common.as_json({**head, **found.to_dict()}), 0
    return terminal.text(document), 0


def _overflow(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.report import terminal
    from xla_amp.stablehlo import samples
    from xla_amp.tools.overflow.on_stablehlo import find_overflow

    program = common.read(arguments.file, arguments.function)
    if arguments.inputs is None:
        arrays = samples.random_inputs(program.module, arguments.seed)
    else:
        arrays = samples.read_samples(arguments.inputs)
    found = find_overflow(program, arrays)
    status = int(bool(found.producers or found.results))
    document = found.document()
    document = dataclasses.replace(document, facts=(("inputs", common.given(arguments)), *document.facts))
    common.write_report(arguments, document)
    if arguments.json:
        return common.as_json({"inputs": common.given(arguments), **dataclasses.asdict(found)}), status
    return terminal.text(document), status
