"""Convert a StableHLO program to mixed precision. IN and OUT are MLIR text, bytecode, artifacts or jax.export blobs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from xla_amp.cli import arguments as common
from xla_amp.common.types import CASTS, LowDtype
from xla_amp.errors import FileError, PolicyError, RuleWarning, TargetError
from xla_amp.policy import BUILTIN

if TYPE_CHECKING:
    from xla_amp.pages.page import Page
    from xla_amp.stablehlo.conversion_report import Achieved
    from xla_amp.stablehlo.converted import Converted
    from xla_amp.stablehlo.program import Format, Program

HELP = "convert a program to mixed precision"

TARGET_MISSED = 3
"""Exit status."""

FORMATS = ("text", "bytecode", "artifact", "export")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``convert``."""
    common.program(parser, "source", "IN")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        required=True,
        help="file to write; - for standard output, and then the report goes to standard error",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="format of OUT; default: by its suffix, otherwise the format of IN"
    )
    parser.add_argument(
        "--narrow-parameters",
        dest="keep_io",
        action="store_false",
        help="use the low dtype for arguments that only low operations read and for results computed low",
    )
    _policy_options(parser)
    _sample_options(parser)
    common.function(parser)
    common.json_instead(parser)
    common.epilog(
        parser,
        {
            "xla-amp convert step.mlir -o low.mlirbc --policy tpu --rule tanh=fp32": "with a rule on top of the policy",
            "xla-amp convert step.mlir -o low.mlir --inputs samples.npz": "finite on the samples, with the error",
            "xla-amp convert step.mlir -o low.mlir --inputs samples.npz --target-error 1e-2": "within 1 %",
            "cat step.mlir | xla-amp convert - -o - --quiet > low.mlir": "in a pipe",
        },
        {
            0: "written",
            1: "IN holds no program that can be converted",
            TARGET_MISSED: "not written: the program cannot be kept within --target-error; the message has its error",
        },
    )
    parser.set_defaults(run=_run)


def _policy_options(parser: argparse.ArgumentParser) -> None:
    known = f"a built-in policy ({', '.join(BUILTIN)}) or the path of a TOML file"
    parser.add_argument("--policy", default="tpu", help=f"{known}; default tpu")
    parser.add_argument("--dtype", choices=get_args(LowDtype), help="low dtype; default: the policy's")
    parser.add_argument(
        "--rule",
        action="append",
        dest="rules",
        default=[],
        type=_rule,
        metavar="PATTERN=CAST",
        help=f"a rule on top of the policy, e.g. tanh=fp32 or module:*.router=fp32; casts: {', '.join(CASTS)}; may be "
        "repeated",
    )
    parser.add_argument("--strict", action="store_true", help="a rule without an effect on the program is an error")


def _sample_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inputs",
        action="append",
        default=[],
        type=Path,
        metavar="NPZ",
        help="sample inputs: products stay in float32 until the results on them are finite; may be repeated",
    )
    parser.add_argument(
        "--target-error",
        type=common.positive,
        metavar="ERROR",
        help="with --inputs: largest accepted relative error of a result, e.g. 1e-2; products stay in float32 until "
        "the whole program is within it",
    )


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
    from xla_amp.stablehlo import io
    from xla_amp.stablehlo.measure import samples

    common.check_written(arguments.output, [arguments.source, *arguments.inputs])
    if arguments.target_error is not None and not arguments.inputs:
        raise FileError("--target-error needs --inputs")
    program = common.read(arguments.source, arguments.function)
    kind = io.check_format(program, arguments.output, arguments.format)
    if arguments.output == common.STANDARD and kind != "text" and sys.stdout.isatty():
        raise FileError(f"-o -: {kind} is not for a terminal; use --format text, or redirect standard output")
    given = [samples.fitted(samples.read_samples(path), program.module, str(path)) for path in arguments.inputs]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuleWarning)
        converted = _convert(arguments, program, given)
    for each in caught:
        sys.stderr.write(f"xla-amp: warning: {each.message}\n")
    page = _page(arguments, converted, program, kind)
    achieved = converted.achieved
    if achieved is not None:
        page = _with_error(page, arguments, achieved)
    _write(converted.program, arguments.output, kind)  # last: everything else that may fail has been done
    if not arguments.json:
        return page.text(), 0
    plain = {
        "input": common.shown(arguments.source),
        "output": _output(arguments),
        "format": kind,
        "summary": {
            "policy": converted.report.policy,
            "low": converted.report.low,
            "casts_inserted": converted.report.casts,
            "casts_folded": converted.report.folded,
            "functions_unconverted": converted.report.unconverted,
        },
        "operations": converted.report.rows(),
        **({} if achieved is None else {"achieved_error": dataclasses.asdict(achieved)}),
    }
    return common.as_json(plain), 0


def _convert(arguments: argparse.Namespace, program: Program, given: list[list[Any]]) -> Converted:
    from xla_amp.stablehlo.api import autocast

    try:
        return autocast(
            program,
            policy=arguments.policy,
            dtype=arguments.dtype,
            rules=_rules(arguments.rules),
            keep_io=arguments.keep_io,
            strict=arguments.strict,
            sample_inputs=[tuple(each) for each in given] or None,
            max_error=arguments.target_error,
        )
    except PolicyError as error:
        raise PolicyError(str(error).replace("autocast(rules=...), ", "--rule ")) from None
    except TargetError as error:
        said = str(error).replace("autocast(max_error=", "--target-error ", 1).replace(")", "", 1)
        raise TargetError(f"{said}; {arguments.output} is not written") from None


def _with_error(page: Page, arguments: argparse.Namespace, achieved: Achieved) -> Page:
    """The page with the achieved error first; a warning if it is large."""
    from xla_amp.common import units
    from xla_amp.pages.page import Section
    from xla_amp.stablehlo.measure.comparison import NOT_JUDGED, TOLERANCE

    limit = arguments.target_error or TOLERANCE
    if achieved.error > limit:
        sys.stderr.write(
            f"xla-amp: warning: the results on the samples are wrong by {achieved.error:.2g}, the worst is "
            f"{max(achieved.samples)[1]}; --target-error {limit:g} keeps more in float32\n"
        )
    items = tuple(
        (str(path), f"error {units.error(error)}, the worst is {name}")
        for path, (error, name) in zip(arguments.inputs, achieved.samples, strict=True)
    )
    said = f"achieved error {units.error(achieved.error)}; one rounding of the samples {units.error(achieved.rounding)}"
    if arguments.target_error is not None:
        said += f", the target is {units.error(arguments.target_error)}"
    skipped = tuple((name, NOT_JUDGED) for name in achieved.not_judged)
    section = Section("How wrong are the results?", said, items + skipped)
    return dataclasses.replace(page, sections=(section, *page.sections))


def _write(program: Program, path: Path, kind: Format) -> None:
    from xla_amp.stablehlo import io
    from xla_amp.stablehlo.program import dump

    if path != common.STANDARD:
        io.save(program, path, kind)
        return
    data = dump(program, kind)
    with common.writing_standard_output():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _output(arguments: argparse.Namespace) -> str:
    return "standard output" if arguments.output == common.STANDARD else str(arguments.output)


def _page(arguments: argparse.Namespace, converted: Converted, program: Program, kind: str) -> Page:
    names = common.shown(arguments.source), _output(arguments)
    page = converted.report.page(f"{names[0]} ({program.source}) -> {names[1]} ({kind})")
    signature = "kept" if arguments.keep_io else "narrowed where only low operations read or write"
    facts = {**page.facts, "signature": signature}
    if program.has_vjp:
        facts["gradient"] = (
            "left out: the VJP is the old program's; for a low one export xla_amp.jax.autocast(f) from JAX"
        )
    return dataclasses.replace(page, facts=facts)
