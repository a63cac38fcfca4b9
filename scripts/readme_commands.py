#!/usr/bin/env python3
"""Print one of README's two commands, for .ci/run and the tests: `scripts/readme_commands.py example|tests`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
MARKS = {"example": "examples/mnist.py", "tests": "-m pytest"}


def command(name: str, text: str | None = None) -> str:
    """The only line of README's code blocks that creates an environment and contains the mark of `name`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README.read_text() if text is None else text, re.DOTALL | re.MULTILINE)
    lines: list[str] = [
        line for block in blocks for line in block.splitlines() if "-m venv" in line and MARKS[name] in line
    ]
    if len(lines) != 1:
        raise ValueError(f"looking for README's {name} command: expected one line, got {len(lines)}")
    return lines[0]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in MARKS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(MARKS)}")
    print(command(sys.argv[1]))
