"""Run docs/tutorial.md and measure its steps: ``python scripts/tutorial_figures.py [--write]`` (its table)."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from source_tree import ROOT, python_blocks

PAGE = ROOT / "docs" / "tutorial.md"
STEPS = {
    "float32": "float32_step",
    "bfloat16": "bfloat16_step",
    "float16 with a scaler": "float16_step",
    "bfloat16, captured": "captured_step",
}
"""Row of the table -> function of the page."""


def milliseconds(step: Any, rounds: int = 7, calls: int = 20) -> float:
    """Time of a call: the median of `rounds`, each of which waits for its last of `calls` results."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls - 1):
            step()
        step().item()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times[1:])


def table() -> str:
    """The figures as Markdown.  Each step is measured right after its block, on the block's own model."""
    import jax
    import torch

    namespace: dict[str, Any] = {"__name__": "tutorial"}
    rows = []
    for block in python_blocks("docs/tutorial.md"):
        exec(compile(block, str(PAGE), "exec"), namespace)
        for title, name in STEPS.items():
            if f"def {name}(" in block or f"{name} = " in block:
                rows.append((title, milliseconds(namespace[name])))
    lines = [f"| {title} | {time:.1f} | {time / rows[0][1]:.2f} |\n" for title, time in rows]
    machine = f"{os.cpu_count()} CPU cores, torch {torch.__version__.partition('+')[0]}, JAX {jax.__version__}"
    return f"{machine}:\n\n| step | milliseconds | share of float32 |\n|---|---|---|\n{''.join(lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    arguments = parser.parse_args()
    found = table()
    print(found)
    if arguments.write:
        head, mark, rest = PAGE.read_text().partition("<!-- figures: python scripts/tutorial_figures.py -->\n")
        PAGE.write_text(f"{head}{mark}\n{found}\n{rest[rest.index('<!-- end -->') :]}")


if __name__ == "__main__":
    main()
