"""examples/mnist.py, unchanged, with torch_xla's own counters read where the example reads ours: JSON on the last line.

    PJRT_DEVICE=CPU python tests/torch_xla_engine/counted_example.py [--stock] [flags of the example]

`--stock` replaces our `GradScaler` with torch's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.debug.metrics as counters
from absl import app

import xla_amp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mnist.py"

measured: list[dict[str, int]] = []
meters: list[Any] = []


class Stock(torch.amp.GradScaler):
    """torch's own, with the one method that it lacks."""

    def skipped_steps(self) -> int:
        return 0


def counted() -> dict[str, int]:
    """In the place of `xla_amp.metrics`: what that says, after noting what torch_xla counts."""
    torch_xla.sync(wait=True)
    transfers = counters.metric_data("TransferFromDeviceTime")
    measured.append(
        {
            "executions": counters.counter_value("ExecuteComputation") or 0,
            "transfers": 0 if transfers is None else transfers[0],
        }
    )
    return plain()


plain = xla_amp.metrics
xla_amp.metrics = counted

spec = importlib.util.spec_from_file_location("mnist", EXAMPLE)
mnist = importlib.util.module_from_spec(spec)
sys.modules["mnist"] = mnist
sys.path.append(str(EXAMPLE.parent))  # of the modules that it imports
spec.loader.exec_module(mnist)


class Meter(mnist.Meter):
    """Remembers itself."""

    def __init__(self) -> None:
        super().__init__()
        meters.append(self)


mnist.Meter = Meter
if "--stock" in sys.argv:
    sys.argv.remove("--stock")
    mnist.GradScaler = Stock
with contextlib.suppress(SystemExit):
    app.run(mnist.main)
befores, afters = measured[::2], measured[1::2]
steps = meters[0].steps
print(
    json.dumps(
        {name: sum(a[name] - b[name] for a, b in zip(afters, befores, strict=True)) / steps for name in measured[0]}
    )
)
