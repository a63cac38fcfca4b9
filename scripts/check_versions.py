"""Run the tests with other versions of Python, torch and JAX than the pinned ones, and write one table.

    python scripts/check_versions.py                      # the default tests, each row of MATRIX
    python scripts/check_versions.py --full               # all tests
    python scripts/check_versions.py --rows newest-3.12 --again
    python scripts/check_versions.py --rows newest-3.12 --env /path/to/venv    # an environment that is there already

Each row has its own environment under build/versions, used again when it is there, of a Python that is found by its
name, ``python3.12`` (with pyenv: ``PYENV_VERSION=3.11.7:3.12.1:3.13.0``); pip downloads torch, which can be gigabytes.
Other versions warn of other things, so warnings are no errors.  A row that has no result of this day's commit is run;
the table benchmarks/results/versions.md keeps the others'.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from source_tree import ROOT, commit

FOLDER = ROOT / "build" / "versions"
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
LIMIT = 2 * 60 * 60
"""Seconds of a row's tests."""
FOLLOWS = (
    "jax",
    "jaxlib",
    r"jax-cuda12-p[a-z]*",
    "libtpu",
    "flax",
    "orbax-checkpoint",
    "torch",
)
"""Packages that the constraints leave to pip: they belong to one version of JAX, torch or Python."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One environment."""

    name: str
    python: str
    torch: str
    jax: str
    why: str


MATRIX = (
    Row(name="oldest-3.11", python="3.11", torch="2.10", jax="0.10.0", why="the oldest torch with the lazy device"),
    Row(name="oldest-3.12", python="3.12", torch="2.10", jax="0.10.0", why="the same with Python 3.12"),
    Row(name="oldest-3.13", python="3.13", torch="2.10", jax="0.10.0", why="the same with Python 3.13"),
    Row(name="pinned", python="3.11", torch="2.13", jax="0.10", why="constraints.txt, which CI tests at each change"),
    Row(name="jax-0.11", python="3.12", torch="2.13", jax="0.11", why="JAX between the oldest and the newest"),
    Row(name="newest-3.11", python="3.11", torch="2.14", jax="0.10", why="JAX 0.11 needs Python 3.12"),
    Row(name="newest-3.12", python="3.12", torch="2.14", jax="0.12", why="the newest JAX"),
    Row(name="newest-3.13", python="3.13", torch="2.14", jax="0.12", why="the newest Python"),
    Row(name="torch-2.15", python="3.13", torch="2.15", jax="0.12", why="the newest torch"),
)


def environment(row: Row) -> Path:
    """The Python of the row's environment, which is made when it is not there.

    Raises:
        OSError, subprocess.CalledProcessError: there is no such Python, or pip failed.
    """
    folder = FOLDER / row.name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([f"python{row.python}", "-m", "venv", str(folder)], check=True)
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        kept = [line for line in lines if not re.match(rf"({'|'.join(FOLLOWS)})==", line)]
        (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
        versions = [f"{package}=={getattr(row, package)}.*" for package in ("torch", "jax")]
        versions.append(f"jaxlib=={row.jax}.*")
        command = [str(python), "-m", "pip", "install", "-q", "-c", str(folder / "constraints.txt")]
        subprocess.run([*command, *versions, "-e", f"{ROOT}[tests]"], check=True, cwd=ROOT)
        (folder / "complete").touch()
    return python


def found_versions(python: Path) -> dict[str, str]:
    """The versions that the environment really has."""
    program = (
        "import importlib.metadata as m, json, platform; "
        "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in ('torch', 'jax')}}))"
    )
    done = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def counts(log: str) -> dict[str, int]:
    """What pytest's last line counts: ``{"passed": 3, "failed": 1}``.

    Example:
        >>> counts("== 1 failed, 12 passed, 4 deselected in 3.2s ==")
        {'failed': 1, 'passed': 12}
    """
    last = next((line for line in reversed(log.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    pairs = re.findall(r"(\d+) (passed|failed|errors?|skipped|xfailed)", last)
    return {kind.removesuffix("s") if kind == "errors" else kind: int(number) for number, kind in pairs}


def run(row: Row, python: Path, tests: list[str]) -> dict[str, Any]:
    """Runs the tests of one row; its versions, counts, seconds and the tests that failed."""
    started, log = time.monotonic(), FOLDER / f"{row.name}.log"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    variables.pop("XLA_FLAGS", None)  # a flag that this JAX does not know ends the process
    command = [str(python), "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-rfE", *tests]
    timed_out = ""
    with log.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            timed_out = f"not finished after {LIMIT} s"
    text = log.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return {
        "versions": found_versions(python),
        "counts": counts(text),
        "seconds": round(time.monotonic() - started),
        "failed": failed,
        "note": timed_out or ("" if counts(text) else f"no result: {text.strip().splitlines()[-1:]}"),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown of all rows."""
    lines = [
        "Tests with other versions than the pinned ones: `python scripts/check_versions.py`. Each row tested the",
        "commit that it names, on its date. A note says which failures were mended later.",
        "",
        "| row | Python | torch | JAX | tests | passed | failed | errors | skipped | date | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in MATRIX:
        got = results.get(row.name)
        if got is None:
            lines.append(f"| {row.name} | {row.python} | {row.torch} | {row.jax} | not here: {row.why} | | | | | | |")
            continue
        had, number = got["versions"], got["counts"]
        cells = [had[name] for name in ("python", "torch", "jax")]
        cells += [got["tests"], *(str(number.get(kind, 0)) for kind in ("passed", "failed", "error", "skipped"))]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {got['date']} | {got['commit']} |")
    noted = [f"- {name}: {got['note']}" for name, got in results.items() if got.get("note")]
    failed = [f"- {name}: `{test}`" for name, got in results.items() for test in got["failed"]]
    lines += ["", *(["Notes:", "", *noted, ""] if noted else []), *(["Failed:", "", *failed, ""] if failed else [])]
    return "\n".join(lines).rstrip() + "\n"


def kept() -> dict[str, dict[str, Any]]:
    """The rows that have a result."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def main() -> int:
    """Runs the rows and writes the table; 1 if a test failed or a row could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in MATRIX], default=[r.name for r in MATRIX])
    parser.add_argument("--full", action="store_true", help="all tests, also those marked full")
    parser.add_argument("--tests", nargs="+", help="these folders, files or pytest options instead")
    parser.add_argument("--env", type=Path, help="an environment that is there, for one row; pip is not called")
    parser.add_argument("--again", action="store_true", help="also rows that have a result of this commit")
    options = parser.parse_args()
    if options.env is not None and len(options.rows) != 1:
        parser.error("--env is the environment of one row: name it with --rows")
    tests = options.tests or (["-n", "auto", *(("-m", "full or not full") if options.full else ())])
    chosen = "all" if options.full else "default"
    if options.tests:
        chosen = options.tests[0] if len(options.tests) == 1 else f"{len(options.tests)} files and folders"
    FOLDER.mkdir(parents=True, exist_ok=True)
    broken = False
    for row in (row for row in MATRIX if row.name in options.rows):
        before = kept().get(row.name, {})
        if (before.get("commit"), before.get("tests")) == (commit(), chosen) and not options.again:
            continue
        print(f"{row.name}: Python {row.python}, torch {row.torch}, JAX {row.jax} ({row.why})", flush=True)
        try:
            python = options.env / "bin" / "python" if options.env else environment(row)
            got = run(row, python, tests)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"  no environment: {error}", file=sys.stderr)
            broken = True
            continue
        results = kept()  # another process may have added a row
        results[row.name] = {**got, "tests": chosen, "date": time.strftime("%Y-%m-%d"), "commit": commit()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(results))
        print(f"  {got['counts'] or got['note']} in {got['seconds']} s", flush=True)
        broken |= bool(got["failed"] or got["note"])
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
