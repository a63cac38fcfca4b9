#!/usr/bin/env python3
"""Choose the tests of `pytest -m quick`: files whose tests take little time together, into tests/quick.txt.

pytest -n auto -vv --durations=0 --durations-min=0.2 | tee tests.log
scripts/quick_tests.py tests.log
"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

MOST = 4.0
"""Seconds of a file, of which a test that is not listed counts 0.04."""
QUICK = Path(__file__).resolve().parent.parent / "tests" / "quick.txt"


def quick(log: str) -> list[str]:
    """The files, from the output of a run of all tests."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for path in re.findall(r"PASSED (tests/[^:\s]+)::", log):
        seconds[path] += 0.04
    for time, path in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(tests/[^:\s]+)::", log, re.MULTILINE):
        seconds[path] += float(time)
    return sorted(path for path, total in seconds.items() if total <= MOST)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} LOG")
    QUICK.write_text("".join(f"{path}\n" for path in quick(Path(sys.argv[1]).read_text(errors="replace"))))
