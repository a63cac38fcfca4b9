"""Runs a slice of torch's operator database on the lazy device and prints one JSON line per entry.

python tests/lazy/op_db/survey_op_db.py --samples all --slice 0:100 > op_db.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

from op_entries import ENTRIES, failures, near

from xla_amp import lazy as engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", default="all", help="samples per entry, or 'all'")
    parser.add_argument("--slice", default="0:", help="START:END of the entries in the order of op_db")
    parser.add_argument("--entries", nargs="*", help="names of entries, instead of a slice")
    options = parser.parse_args()
    start, _, end = options.slice.partition(":")
    names = options.entries or list(ENTRIES)[int(start or 0) : int(end) if end else None]
    count = None if options.samples == "all" else int(options.samples)
    device = engine.device()
    for name in names:
        before = time.process_time()
        try:
            ran, failed = failures(ENTRIES[name], device, count, lambda sample: near(1))
            line = {"ran": ran, "failed": [dataclasses.asdict(failure) for failure in failed]}
        except Exception as error:
            line = {"ran": 0, "failed": [], "broken": f"{type(error).__name__}: {error}"}
        print(json.dumps({"entry": name, **line, "seconds": time.process_time() - before}), flush=True)


if __name__ == "__main__":
    main()
