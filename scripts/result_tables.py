#!/usr/bin/env python
"""Write the tables of the documentation that come from tests.

pytest tests/lazy/torch_integration/test_device_generic.py -m "full or not full" --junit-xml results.xml
python scripts/result_tables.py devices results.xml        # docs/lists/device_tests.md
python scripts/result_tables.py scaler scaler.xml          # the same page; tests/helpers/torch_test_device.py makes it

pytest tests/integrations -m "full or not full" --junit-xml results.xml
python scripts/result_tables.py frameworks results.xml     # docs/frameworks.md

python scripts/result_tables.py operations [--check]       # docs/lists/operations.md, from limitations.toml

Tests of frameworks record what they measured (the fixture `record` of tests/integrations/conftest.py), and fail if the
page has no such row: so the page is what the tests found.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from limitations import Limitation, limitations  # noqa: E402

# ---- tests for any device --------------------------------------------------------------------------------------------

DEVICES = ROOT / "docs" / "lists" / "device_tests.md"
BEGIN, END = "<!-- begin: scripts/result_tables.py devices -->\n", "<!-- end -->\n"
BEGIN_SCALER, END_SCALER = "<!-- begin: scripts/result_tables.py scaler -->\n", "<!-- end of scaler -->\n"
OTHER_DEVICES = {
    "test_grad_scaler_deprecated_warning": "asks for the old classes of torch.cuda.amp and torch.cpu.amp",
    "test_grad_scaling_state_dict": "asks any device but CUDA and XPU for a torch.FloatTensor, a type of the CPU; "
    "passes with the type torch.jax.FloatTensor in its place",
}
"""Test of torch's -> why it fails on each device that it does not name."""
DEVICE_COLUMNS = ("test", "passed", "does not apply", "fails as known", "fails")
_NAME = re.compile(r"(test_[a-z_]+?)(?:_(nn_\w+?|[A-Z]\w+?)(?:_(?:train|eval)_mode)?)?_jax(?:_float32)?")
Counts = dict[str, collections.Counter[str]]


def counted(report: Path) -> tuple[Counts, dict[tuple[str, str], str]]:
    """(test -> outcome -> number, (test, entry) -> why it fails)."""
    counts: Counts = collections.defaultdict(collections.Counter)
    reasons: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        match = _NAME.fullmatch(case.get("name", ""))
        if match is None:
            continue
        test, entry = match[1].removeprefix("test_").replace("_", " "), (match[2] or "").replace("nn_", "nn.")
        failed, skipped = case.find("failure"), case.find("skipped")
        if failed is not None:
            outcome = "fails"
            reasons[test, entry] = failed.get("message", "").splitlines()[0]
        elif skipped is not None and skipped.get("type") == "pytest.xfail":
            outcome = "fails as known"
            reasons[test, entry] = skipped.get("message", "")
        else:
            outcome = "passed" if skipped is None else "does not apply"
        counts[test][outcome] += 1
    return counts, reasons


def device_text(counts: Counts, reasons: dict[tuple[str, str], str]) -> str:
    """The tables as Markdown."""
    lines = [f"| {' | '.join(DEVICE_COLUMNS)} |", "|" + "---|" * len(DEVICE_COLUMNS)]
    lines += [
        f"| {test} | {' | '.join(str(of[name]) for name in DEVICE_COLUMNS[1:])} |"
        for test, of in sorted(counts.items())
    ]
    lines += ["", "| fails | of | reason |", "|---|---|---|"]
    lines += [f"| {test} | `{entry}` | {reason} |" for (test, entry), reason in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def scaler_text(report: Path) -> str:
    """The table of torch's GradScaler tests as Markdown."""
    lines = ["| test of torch's `test_torch.py` | result |", "|---|---|"]
    for case in sorted(ElementTree.parse(report).iter("testcase"), key=lambda case: case.get("name", "")):
        name = re.sub(r"_jax(?=_|$)", "", case.get("name", ""))
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        result = "fails" if failed else "skipped" if skipped else "passed"
        if failed and name in OTHER_DEVICES:
            result = f"does not apply: {OTHER_DEVICES[name]}"
        lines.append(f"| `{name}` | {result} |")
    return "\n".join(lines) + "\n"


def write_devices(report: Path, *, scaler: bool) -> None:
    """Puts the tables of a report into the page, in place of those that it has."""
    begin, end = (BEGIN_SCALER, END_SCALER) if scaler else (BEGIN, END)
    before, _, rest = DEVICES.read_text("utf-8").partition(begin)
    _, _, after = rest.partition(end)
    made = scaler_text(report) if scaler else device_text(*counted(report))
    DEVICES.write_text(before + begin + made + end + after, "utf-8")


# ---- training frameworks ---------------------------------------------------------------------------------------------

FRAMEWORKS = ROOT / "docs" / "frameworks.md"
PROPERTY = "framework"
"""Name of the property of a test in pytest's report."""

FRAMEWORK_COLUMNS = ("framework", "precision", "executables a step", "waits a step", "save and resume")
Rows = dict[tuple[str, str], dict[str, str]]


def framework_rows(text: str) -> Rows:
    """The rows of the page's table, by framework and precision."""
    found: Rows = {}
    lines = iter(text.splitlines())
    for line in lines:
        if cells(line) == list(FRAMEWORK_COLUMNS):
            next(lines)
            break
    for line in lines:
        if not line.startswith("|"):
            break
        framework, precision, *rest = cells(line)
        found[framework, precision] = dict(zip(FRAMEWORK_COLUMNS[2:], rest, strict=True))
    return found


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def recorded(reports: Iterable[Path]) -> Rows:
    """What tests recorded, by framework and precision."""
    found: Rows = {}
    for report in reports:
        for entry in ElementTree.parse(report).iter("property"):
            if entry.get("name") == PROPERTY:
                facts: Mapping[str, str] = json.loads(entry.get("value", ""))
                row = found.setdefault(
                    (facts["framework"], facts["precision"]), dict.fromkeys(FRAMEWORK_COLUMNS[2:], "")
                )
                row |= {name: value for name, value in facts.items() if name in row}
    return found


def framework_text(of: Rows) -> str:
    """The table as Markdown."""
    lines = [f"| {' | '.join(FRAMEWORK_COLUMNS)} |", "|" + "---|" * len(FRAMEWORK_COLUMNS)]
    lines += [f"| {' | '.join([*key, *row.values()])} |" for key, row in sorted(of.items())]
    return "\n".join(lines) + "\n"


def write_frameworks(reports: Iterable[Path]) -> None:
    """Replaces the page's table by what the reports have; exits if they lack a row of it."""
    found = recorded(reports)
    text = FRAMEWORKS.read_text("utf-8")
    before = framework_rows(text)
    if missing := sorted(set(before) - set(found)):
        sys.exit(f"the reports have nothing about {missing}: run all tests of tests/integrations")
    FRAMEWORKS.write_text(text.replace(framework_text(before), framework_text(found)), "utf-8")


# ---- operations ------------------------------------------------------------------------------------------------------

OPERATIONS = ROOT / "docs" / "lists" / "operations.md"
HEAD = """# Operations of the lazy device

Every entry of torch's operator database runs on the lazy device and is compared with the CPU, forward and, where the
entry has a gradient, backward, in float32; entries without float32 run in the first dtype that they have. Entries that
are not in the tables below agree within 1e-4, relative to each number, plus 1e-5, relative to the greatest number of
its tensor (of at least 1); a tolerance is a factor on both.

`scripts/result_tables.py operations` makes this list from `tests/helpers/limitations.toml` and the table of lowerings.
"""
WITHOUT = """
## Without a lowering

Operations that a kernel of torch {version} for the CPU computes, and that raise `MissingLoweringError` on the lazy
device. They are torch's internal ones, quantized or for one library, but for those of the first table.
XLA_AMP_FALLBACK=cpu computes them on the CPU.

{names}
"""
TITLES = {
    "raises": "Not supported: a clear error",
    "tolerance": "Less exact than the CPU",
    "random": "Random: other numbers, the same distribution",
    "ties": "Positions of equal elements",
    "unchecked": "Indices out of range: an XLA program cannot raise",
    "unset": "Uninitialized memory",
}


def reason(row: Limitation) -> str:
    """The reason, and the condition if not all calls are affected."""
    return f"with `{row.where}`: {row.reason}" if row.where else row.reason


def without_lowering() -> list[str]:
    """Operations of torch's CPU that neither a kernel of the device nor a decomposition computes."""
    import torch

    import xla_amp
    from xla_amp.lazy.ops import missing
    from xla_amp.lazy.ops.operators import find, functional_variant

    xla_amp.xla_device()
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    names = []
    for full in torch._C._dispatch_get_all_op_names():
        library, _, name = full.partition("::")
        operator = find(name) if library == "aten" and "_test" not in name and name != "_foobar" else None
        if operator is None or any(argument.is_out for argument in operator._schema.arguments):
            continue
        has = operator.has_kernel_for_dispatch_key
        runs = has("PrivateUse1") or any(map(has, composite)) or missing.decomposition(functional_variant(operator))
        if not runs and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
            names.append(name)
    return sorted(names)


def operations_text(rows: list[Limitation]) -> str:
    """The page with these rows."""
    parts = [HEAD]
    for kind, title in TITLES.items():
        found = [row for row in rows if row.kind == kind]
        if not found:
            continue
        parts.append(f"\n## {title}\n\n| operation | dtype | platform | reason | tolerance |\n|---|---|---|---|---|\n")
        for row in found:
            tolerance = f"{row.tolerance:g}" if kind == "tolerance" else ""
            parts.append(f"| `{row.operation}` | {row.dtype} | {row.platform} | {reason(row)} | {tolerance} |\n")
    return "".join(parts)


def without_lowering_text() -> str:
    """The last section of the page."""
    import torch

    names = textwrap.fill(", ".join(f"`{name}`" for name in without_lowering()), 120, break_on_hyphens=False)
    return WITHOUT.format(version=".".join(torch.__version__.split(".")[:2]), names=names)


def write_operations(*, check: bool) -> None:
    """Writes the page; with `check` it only exits with 1 if the page is out of date."""
    text, section = operations_text(list(limitations().values())), without_lowering_text()
    held = OPERATIONS.read_text("utf-8") if OPERATIONS.exists() else ""
    known = re.search(r"kernel of torch ([0-9.]+) for the CPU", held)
    if check and known and known[0] not in section:  # the names are those of another torch
        section = held[held.index("\n## Without a lowering") :]
    text += section
    if not check:
        OPERATIONS.write_text(text, "utf-8")
    elif not OPERATIONS.exists() or OPERATIONS.read_text("utf-8") != text:
        sys.exit(f"{OPERATIONS} is out of date: run python scripts/result_tables.py operations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("devices", "scaler"):
        kinds.add_parser(kind).add_argument("report", type=Path, help="file of pytest's --junit-xml")
    kinds.add_parser("frameworks").add_argument("report", nargs="+", type=Path)
    kinds.add_parser("operations").add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    if given.kind == "operations":
        write_operations(check=given.check)
    elif given.kind == "frameworks":
        write_frameworks(given.report)
    else:
        write_devices(given.report, scaler=given.kind == "scaler")


if __name__ == "__main__":
    main()
