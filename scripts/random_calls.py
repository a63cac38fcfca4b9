"""Compare random calls on the lazy device with the CPU, and list those that differ.

    python scripts/random_calls.py [calls] [seed ...]

Exits with 1 if a call gives another value, dtype or shape without an error.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import call_samples

import xla_amp


def main(arguments: list[str]) -> int:
    """Prints the calls that differ and a summary; returns the exit status."""
    count = int(arguments[0]) if arguments else 1000
    seeds = [int(text) for text in arguments[1:]] or [0]
    device, kinds, silent = xla_amp.xla_device(), Counter[str](), 0
    for seed in seeds:
        for call, difference in call_samples.compare(seed, count, device):
            kinds[difference.partition(":")[0] or "alike"] += 1
            known = call_samples.reason(call, difference) if difference else ""
            if difference and not known:
                silent += not difference.startswith(("accepts", "refuses", "class"))
                print(f"seed {seed}  {call}\n    {difference}", flush=True)
    print(f"{sum(kinds.values())} calls: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    return int(silent > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
