"""Measure in turns, and write results as JSON, Markdown and plots, with the date, the machine and the versions."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch

from xla_amp import hardware

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "flax", "optax")


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


def stamp() -> dict[str, Any]:
    """Date, machine and versions."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"date": str(datetime.date.today()), "machine": machine(), "versions": versions}


def write_json(name: str, content: Mapping[str, Any]) -> None:
    """``results/NAME.json``, with the stamp."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"stamp": stamp(), **content}, indent=1) + "\n")


def write_markdown(name: str, headings: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """``results/NAME.md``: the title, the stamp, the table; printed as well."""
    found = stamp()
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    lines = [f"{title}\n", f"{found['date']}; {found['machine']}; {versions}\n", f"| {' | '.join(headings)} |"]
    lines += ["|" + "---|" * len(headings), *(f"| {' | '.join(row)} |" for row in rows)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def plot(name: str, panels: Mapping[str, Mapping[str, Mapping[float | str, float]]], ylabel: str) -> None:
    """``results/NAME.png``: panels below each other, with bars (names) or lines (numbers) for each series.

    A page shows the picture at its size: 550 pixels wide, which a phone can show.

    Raises:
        ImportError: matplotlib is not installed: ``pip install 'xla-amp[benchmarks]'``.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'xla-amp[benchmarks]', or use --no-plot") from error
    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    heights = [0.8 + 0.2 * max(6, sum(len(points) for points in series.values())) for series in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), 1, squeeze=False, height_ratios=heights, figsize=(5, sum(heights)), layout="constrained"
    )
    for axis, (title, series) in zip(axes[:, 0], panels.items(), strict=True):
        for index, (label, points) in enumerate(series.items()):
            if all(isinstance(x, str) for x in points):
                bars = axis.barh(list(points), list(points.values()), color=f"C{index}", label=label)
                axis.bar_label(bars, fmt="%.0f", padding=2)
                axis.margins(x=0.2)
            else:
                axis.plot(list(points), list(points.values()), "o-", label=label)
                axis.set_ylabel(ylabel)
        if axis.patches:
            axis.invert_yaxis()  # the first bar is the upper one
            axis.set_xlabel(ylabel)
        axis.legend()
        axis.set_title(title)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    pyplot.close(figure)
