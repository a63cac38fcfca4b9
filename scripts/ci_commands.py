#!/usr/bin/env python3
"""README's commands: ``scripts/ci_commands.py readme example|tests`` prints one of the two."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MARKS = {"example": "examples/demo.py", "tests": "-m pytest"}


def command(name: str, text: str | None = None) -> str:
    """The only command of README that creates an environment and contains the mark of `name`, on one line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README.read_text() if text is None else text, re.DOTALL | re.MULTILINE)
    lines: list[str] = [
        line
        for block in blocks
        for line in re.sub(r"&&\n\s*", "&& ", block).splitlines()
        if "-m venv" in line and MARKS[name] in line
    ]
    if len(lines) != 1:
        raise ValueError(f"looking for README's {name} command: expected one line, got {len(lines)}")
    return lines[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("readme").add_argument("name", choices=MARKS)
    print(command(parser.parse_args().name))


if __name__ == "__main__":
    main()
