#!/usr/bin/env python3
"""What a change is tested with: README's commands, and the files of `pytest -m quick`.

scripts/ci_commands.py readme example|tests      # prints one of README's two commands
pytest -n auto -vv --durations=0 --durations-min=0.2 | tee tests.log
scripts/ci_commands.py quick tests.log           # chooses files whose tests take little time, into tests/quick.txt
"""

from __future__ import annotations

import argparse
import collections
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MARKS = {"example": "examples/demo.py", "tests": "-m pytest"}
MOST = 4.0
"""Seconds of a file, of which a test that is not listed counts 0.04."""
QUICK = ROOT / "tests" / "quick.txt"


def command(name: str, text: str | None = None) -> str:
    """The only line of README's code blocks that creates an environment and contains the mark of `name`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README.read_text() if text is None else text, re.DOTALL | re.MULTILINE)
    lines: list[str] = [
        line for block in blocks for line in block.splitlines() if "-m venv" in line and MARKS[name] in line
    ]
    if len(lines) != 1:
        raise ValueError(f"looking for README's {name} command: expected one line, got {len(lines)}")
    return lines[0]


def quick(log: str) -> list[str]:
    """The quick files, from the output of a run of all tests."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for path in re.findall(r"PASSED (tests/[^:\s]+)::", log):
        seconds[path] += 0.04
    for time, path in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(tests/[^:\s]+)::", log, re.MULTILINE):
        seconds[path] += float(time)
    return sorted(path for path, total in seconds.items() if total <= MOST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("readme").add_argument("name", choices=MARKS)
    kinds.add_parser("quick").add_argument("log", type=Path)
    given = parser.parse_args()
    if given.kind == "readme":
        print(command(given.name))
    else:
        QUICK.write_text("".join(f"{path}\n" for path in quick(given.log.read_text(errors="replace"))))


if __name__ == "__main__":
    main()
