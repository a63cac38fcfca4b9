"""Models of transformers on the lazy device: agreement with torch on the CPU, and programs and syncs per step.

Each model (tests/helpers/zoo.py: configuration classes, tiny sizes, random weights, dropout off) is trained five steps
of AdamW in float32 and in bfloat16 autocast, on the lazy device and in plain torch on the CPU (`torch.autocast` there).
The counts are those of a steady step; nothing is timed.

    python benchmarks/models_table.py [--only GPT-2 BERT] [--policy cpu]
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import jax
import torch
import transformers

import xla_amp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from zoo import ROWS, Row
from zoo_training import STEPS, difference, train

HEADINGS = ("model", "passes", "float32", "bfloat16", "executables", "host syncs", "fallbacks", "host answers")
"""Counts are per step."""
TOLERANCES = (1e-4, 2e-2)
"""Largest relative difference of a loss, float32 and bfloat16."""


def measure(row: Row, policy: str | None) -> tuple[str, ...]:
    """The row's cells: result, largest relative differences of the losses, counts of a steady step."""
    device = xla_amp.xla_device()
    runs = [train(row, device, low, policy) for low in (False, True)]
    differences = [difference(run, train(row, "cpu", low)) for run, low in zip(runs, (False, True), strict=True)]
    passes = all(found <= allowed for found, allowed in zip(differences, TOLERANCES, strict=True))
    counts = [
        [getattr(run, name) for run in runs] for name in ("executables", "host_syncs", "fallbacks", "host_values")
    ]
    return (
        row.name,
        "yes" if passes else "NO",
        *(f"{found:.1e}" for found in differences),
        *(" / ".join(dict.fromkeys(f"{count:g}" for count in pair)) for pair in counts),
    )


def main() -> None:
    """Print the table as Markdown, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[row.name for row in ROWS], help="models to run (all)")
    parser.add_argument("--policy", help="the lazy device's autocast policy (that of its platform)")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    print(
        f"{datetime.date.today()}, {jax.default_backend()}, {STEPS} steps, torch {torch.__version__}, "
        f"jax {jax.__version__}, transformers {transformers.__version__}\n"
    )
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(measure(row, arguments.policy))} |", flush=True)


if __name__ == "__main__":
    main()
