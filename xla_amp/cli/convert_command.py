"""Convert a StableHLO program to mixed precision. IN and OUT are MLIR text, bytecode, artifacts or jax.export blobs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from xla_amp.cli import arguments as common
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.policy import BUILTIN
from xla_amp.types import CASTS, LowDtype

if TYPE_CHECKING:
    from xla_amp.report.document import Document
    from xla_amp.stablehlo.passes.autocast import Converted
    from xla_amp.stablehlo.tools.module_tables import States

HELP = "convert a program to mixed precision"

FORMATS = ("text", "bytecode", "artifact", "export")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``convert``."""
    common.program(parser, "source", "IN")
    out = parser.add_argument("-o", "--output", metavar="OUT", type=Path, required=True, help="file to write")
    out.complete = common.FILE  # type: ignore[attr-defined]
    parser.add_argument(
        "--format", choices=FORMATS, help="format of OUT; default: by its suffix, otherwise the format of IN"
    )
    known = f"a built-in policy ({', '.join(BUILTIN)}) or the path of a TOML file"
    parser.add_argument("--policy", default="tpu", help=f"{known}; default tpu")
    parser.add_argument("--dtype", choices=get_args(LowDtype), help="low dtype; default: the policy's")
    parser.add_argument(
        "--rule",
        "--override",
        action="append",
        dest="rules",
        default=[],
        type=_rule,
        metavar="PATTERN=CAST",
        help=f"a rule on top of the policy, e.g. tanh=fp32 or module:*.router=fp32; casts: {', '.join(CASTS)}; may be "
        "repeated",
    )
    parser.add_argument("--strict", action="store_true", help="a rule without an effect on the program is an error")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--keep-io", dest="keep_io", action="store_true", default=True, help="keep the signature (default)"
    )
    group.add_argument(
        "--narrow-parameters",
        dest="keep_io",
        action="store_false",
        help="use the low dtype for arguments that only low operations read and for results computed low",
    )
    sample = parser.add_argument(
        "--inputs",
        action="append",
        default=[],
        type=Path,
        metavar="NPZ",
        help="sample inputs: operations that overflow or lose too much on them stay float32; may be repeated",
    )
    sample.complete = common.FILE  # type: ignore[attr-defined]
    parser.add_argument(
        "--max-error", type=common.positive, help="with --inputs: largest accepted error of one operation"
    )
    common.report(parser)
    common.json_instead(parser)
    parser.set_defaults(run=_run)


def _rule(text: str) -> tuple[str, str]:
    operation, equals, cast = (part.strip() for part in text.partition("="))
    if not (equals and operation and cast):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected PATTERN=CAST, e.g. tanh=fp32, with one of {', '.join(CASTS)}"
        )
    if ";" in text or "," in text:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one rule, PATTERN=CAST; repeat --rule for another")
    return operation, cast


def _rules(given: list[tuple[str, Any]]) -> dict[str, Any] | None:
    rules: dict[str, Any] = {}
    for operation, cast in given:
        if operation in rules:
            raise PolicyError(f"--rule names {operation!r} twice, = {rules[operation]} and = {cast}; keep one")
        rules[operation] = cast
    return rules or None


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from xla_amp.report import page as report_page
    from xla_amp.report import terminal
    from xla_amp.stablehlo import io
    from xla_amp.stablehlo.passes import autocast
    from xla_amp.stablehlo.tools import inspection, samples

    common.check_report(arguments)
    program = io.load(arguments.source)
    kind = io.check_format(program, arguments.output, arguments.format)
    given = [samples.fitted(samples.read_samples(path), program.module, str(path)) for path in arguments.inputs]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuleWarning)
        converted = autocast.autocast(
            program,
            policy=arguments.policy,
            dtype=arguments.dtype,
            rules=_rules(arguments.rules),
            keep_io=arguments.keep_io,
            strict=arguments.strict,
            sample_inputs=[tuple(each) for each in given] or None,
            **({} if arguments.max_error is None else {"max_error": arguments.max_error}),
        )
    for each in caught:
        sys.stderr.write(f"xla-amp: warning: {each.message}\n")
    states = {"before": inspection.inspect(program), "after": inspection.inspect(converted.program)}
    document = _document(arguments, converted, states, program.format, kind)
    page = None if arguments.report is None else report_page.html(document)
    io.save(converted.program, arguments.output, kind)  # last: everything else that may fail has been done
    if page is not None:
        io.write_whole(arguments.report, page.encode())
    if not arguments.json:
        return terminal.text(document), 0
    plain = {
        "input": str(arguments.source),
        "output": str(arguments.output),
        "format": kind,
        "summary": converted.report.summary(),
        **{name: found.to_dict() for name, found in states.items()},
        "operations": converted.report.rows(),
    }
    return common.as_json(plain), 0


def _document(arguments: argparse.Namespace, converted: Converted, states: States, before: str, after: str) -> Document:
    from xla_amp.stablehlo.tools import module_tables

    document = converted.report.document(f"{arguments.source} ({before}) -> {arguments.output} ({after})")
    signature = "kept" if arguments.keep_io else "narrowed where only low operations read or write"
    return dataclasses.replace(
        document,
        facts=(*document.facts, ("signature", signature)),
        tables=(
            *document.tables,
            module_tables.contractions(states),
            module_tables.by_dtype(states),
            module_tables.casts(states),
        ),
        edges=states["after"].edges,
    )
