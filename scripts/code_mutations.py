#!/usr/bin/env python3
"""Makes deliberate mistakes in a copy of the tree, one at a time, and shows which test finds each.

python scripts/code_mutations.py                     # all of scripts/code_mutations.toml
python scripts/code_mutations.py --only scaler       # those whose name contains a word
python scripts/code_mutations.py --root ../old       # another checkout, with this table

Run it by hand after tests were cut: each mistake must still be found.  A mistake is looked for in its row's files and
folders, in order, until a test fails; exit status 1 if one is found by none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from source_tree import ROOT

TABLE = Path(__file__).with_suffix(".toml")
LIMIT = 900
"""Seconds for one file or folder of tests."""


def copy_of(root: Path, folder: Path) -> Path:
    """The files of `root` that git knows, below `folder`."""
    copy = folder / "xla_amp"
    copy.mkdir()
    packed = subprocess.run(["git", "-C", str(root), "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(copy)], input=packed, check=True)
    return copy


def found_by(tree: Path, tests: list[str]) -> str:
    """The first test that fails; empty if none does."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    for place in tests:
        if not (tree / place).exists():
            continue
        try:
            run = subprocess.run(
                [*command, place], cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return f"{place}: more than {LIMIT} s"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        if failed:
            return str(failed[1])
        if run.returncode not in (0, 5):  # 5: every test of it is left out by default
            return f"{place}: pytest ended with {run.returncode}"
    return ""


def apply(tree: Path, row: dict[str, Any]) -> Path:
    """Makes the mistake of a row, and returns the changed file."""
    path = tree / str(row["file"])
    text = path.read_text()
    if text.count(row["old"]) != 1:
        sys.exit(f"{row['name']}: {row['file']} has its `old` {text.count(row['old'])} times; write what stands there")
    path.write_text(text.replace(row["old"], row["new"]))
    return path


def main() -> int:
    """Prints a table row for each mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to copy")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    rows = [row for row in tomllib.loads(TABLE.read_text())["mutation"] if options.only in row["name"]]
    missed = 0
    print("| mistake | file | found by | seconds |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of(options.root, Path(folder))
        for row in rows:
            kept = Path(folder) / "kept"
            shutil.copy(tree / row["file"], kept)
            changed, start = apply(tree, row), time.monotonic()
            test = found_by(tree, row["tests"])
            shutil.copy(kept, changed)
            missed += not test
            took = time.monotonic() - start
            print(f"| {row['name']} | {row['file']} | {test or '**none**'} | {took:.0f} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
