#!/usr/bin/env python
"""Writes the tables of docs/lists/device_tests.md from results of tests for any device.

pytest tests/lazy/torch_integration/test_device_generic.py -m "exhaustive or not exhaustive" --junit-xml results.xml
python scripts/device_tests_table.py results.xml

tests/helpers/torch_test_device.py says how torch's own tests of GradScaler are run.  Their results:

python scripts/device_tests_table.py --scaler scaler.xml
"""

from __future__ import annotations

import argparse
import collections
import re
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lists" / "device_tests.md"
BEGIN, END = "<!-- begin: scripts/device_tests_table.py -->\n", "<!-- end -->\n"
BEGIN_SCALER, END_SCALER = "<!-- begin: scripts/device_tests_table.py --scaler -->\n", "<!-- end of scaler -->\n"
OTHER_DEVICES = {
    "test_grad_scaler_deprecated_warning": "asks for the old classes of torch.cuda.amp and torch.cpu.amp",
    "test_grad_scaling_state_dict": "asks any device but CUDA and XPU for a torch.FloatTensor, a type of the CPU; "
    "passes with the type torch.jax.FloatTensor in its place",
}
"""Test of torch's -> why it fails on each device that it does not name."""
COLUMNS = ("test", "passed", "does not apply", "fails as known", "fails")
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


def text(counts: Counts, reasons: dict[tuple[str, str], str]) -> str:
    """The tables as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [
        f"| {test} | {' | '.join(str(of[name]) for name in COLUMNS[1:])} |" for test, of in sorted(counts.items())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="file of pytest's --junit-xml")
    parser.add_argument("--scaler", action="store_true", help="it is of torch's own GradScaler tests")
    given = parser.parse_args()
    begin, end = (BEGIN_SCALER, END_SCALER) if given.scaler else (BEGIN, END)
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    made = scaler_text(given.report) if given.scaler else text(*counted(given.report))
    PAGE.write_text(before + begin + made + end + after, "utf-8")


if __name__ == "__main__":
    main()
