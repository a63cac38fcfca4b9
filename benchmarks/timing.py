"""Timing for the benchmarks: interleaved runs, medians, and a description of the machine."""

from __future__ import annotations

import gc
import platform
import statistics
from collections.abc import Callable, Mapping

import jax
import torch

from xla_amp import hardware


def interleaved(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of the seconds that each contestant returns, one call of each per round, garbage collection off.

    A shared machine drifts; alternating contestants drift together, so their ratio is stable.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, contestant in contestants.items():
                samples[name].append(contestant())
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in samples.items()}


def machine() -> str:
    """Processor, cores in use and versions, as one line."""
    found = hardware.processor()
    return (
        f"{found.name} ({', '.join(found.features)}), {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}"
    )
