"""Write docs/lists/operations.md from the limitations table: ``python scripts/support_matrix.py [--check]``."""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from limitations import Limitation, limitations  # noqa: E402

PAGE = ROOT / "docs" / "lists" / "operations.md"
HEAD = """# Operations of the lazy device

Every entry of torch's operator database runs on the lazy device and is compared with the CPU, forward and, where the
entry has a gradient, backward, in float32; entries without float32 run in the first dtype that they have. Entries that
are not in the tables below agree within 1e-4, relative to each number, plus 1e-5, relative to the greatest number of
its tensor (of at least 1); a tolerance is a factor on both.

`scripts/support_matrix.py` makes this list from `tests/helpers/limitations.toml`.
"""
TITLES = {
    "raises": "Not supported: a clear error",
    "tolerance": "Less exact than the CPU",
    "random": "Random: other numbers, the same distribution",
    "unchecked": "Indices out of range: an XLA program cannot raise",
    "unset": "Uninitialized memory",
}


def reason(row: Limitation) -> str:
    """The reason, and the condition if not all calls are affected."""
    return f"with `{row.where}`: {row.reason}" if row.where else row.reason


def page(rows: list[Limitation]) -> str:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is out of date")
    text = page(list(limitations().values()))
    if not parser.parse_args().check:
        PAGE.write_text(text, "utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text("utf-8") == text:
        return 0
    print(f"{PAGE} is out of date: run python scripts/support_matrix.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
