#!/usr/bin/env python3
"""Figures of the documentation.

python scripts/docs_figures.py step        # docs/step.svg: a training step in float32 beside the same under autocast
python scripts/docs_figures.py tutorial [--write]    # runs docs/tutorial.md and measures its steps: its table
python scripts/docs_figures.py notebook    # runs examples/quickstart.ipynb and keeps its output; docs/gallery/*.png

The dtypes of the step are those that `xla_amp.explain` finds for a small network; nothing of it is computed.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import statistics
import time
from typing import Any

import jax
import torch
from source_tree import ROOT, python_blocks

import xla_amp

# ---- the step --------------------------------------------------------------------------------------------------------

STEP = ROOT / "docs" / "step.svg"
COLOURS = {"float32": ("#d7dbe0", "#4a5160"), "bfloat16": ("#9fc5f8", "#1f5fa8")}
"""Dtype -> colour on a light and on a dark page."""
PAPER, INK = ("#ffffff", "#1e2129"), ("#000000", "#e6e8ec")
WIDTH, BOX, GAP = 230, 26, 8
HEAD = 42


def forward_dtypes(low: bool) -> dict[str, str]:
    """Operation -> dtype that it computes in, in the order of the forward pass and the loss."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    )
    network, images = layers.to(device), torch.ones(2, 1, 8, 8, device=device)
    with xla_amp.explain() as report, xla_amp.autocast(device, enabled=low):
        torch.nn.functional.cross_entropy(network(images), torch.zeros(2, dtype=torch.int64, device=device))
    xla_amp.sync()
    shown = ("conv2d", "batch_norm", "relu", "linear", "cross_entropy_loss")
    found = dict.fromkeys(shown, "float32")
    found |= {
        row["operation"]: "bfloat16" for row in report.rows() if row["cast"] == "low" and row["operation"] in shown
    }
    return found


def boxes(low: bool) -> list[tuple[str, str]]:
    """(text, dtype) of each part of the step."""
    dtypes = forward_dtypes(low)
    backward = "backward: dtypes of the forward" if low else "backward"
    return [*dtypes.items(), (backward, "bfloat16" if low else "float32"), ("optimizer: float32 weights", "float32")]


def style() -> str:
    """The colours, for light pages and dark ones."""
    rows = {".paper": PAPER, "text": INK, **{f".{dtype}": pair for dtype, pair in COLOURS.items()}}
    light, dark = ("".join(f"{name}{{fill:{pair[place]}}}" for name, pair in rows.items()) for place in (0, 1))
    return f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def svg() -> str:
    """The figure."""
    columns = {"float32": boxes(False), "with autocast(device)": boxes(True)}
    height = HEAD + len(columns["float32"]) * (BOX + GAP) + 52
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 60} {height}" width="{2 * WIDTH + 60}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>A training step in float32, and the same step under autocast</title>",
        style(),
        '<rect width="100%" height="100%" class="paper"/>',
    ]
    for number, (title, parts) in enumerate(columns.items()):
        left = 20 + number * (WIDTH + 20)
        lines.append(f'<text x="{left + WIDTH / 2:g}" y="26" text-anchor="middle" font-size="14">{title}</text>')
        for place, (text, dtype) in enumerate(parts):
            top = HEAD + place * (BOX + GAP)
            label = text if ":" in text or text == "backward" else f"{text}: {dtype}"
            lines += [
                f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{BOX}" rx="4" class="{dtype}"/>',
                f'<text x="{left + WIDTH / 2:g}" y="{top + 17}" text-anchor="middle">{label}</text>',
            ]
    legend = height - 34
    for number, dtype in enumerate(COLOURS):
        left = 20 + number * 90
        lines.append(f'<rect x="{left}" y="{legend - 10}" width="12" height="12" class="{dtype}"/>')
        lines.append(f'<text x="{left + 18}" y="{legend}">{dtype}</text>')
    said = "Either column is one XLA executable, for which Python does not wait."
    return "\n".join([*lines, f'<text x="20" y="{height - 12}">{said}</text>', "</svg>", ""])


# ---- the tutorial ----------------------------------------------------------------------------------------------------

TUTORIAL = ROOT / "docs" / "tutorial.md"
TUTORIAL_STEPS = {
    "float32, recorded": "float32_step",
    "bfloat16, recorded": "bfloat16_step",
    "bfloat16, captured": "captured_step",
    "float16 with a scaler, recorded": "float16_step",
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


def tutorial_table() -> str:
    """The figures as Markdown.  Each step is measured right after its block, on the block's own model."""
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    rows = []
    for block in python_blocks("docs/tutorial.md"):
        exec(compile(block, str(TUTORIAL), "exec"), namespace)
        for title, name in TUTORIAL_STEPS.items():
            if f"def {name}(" in block or f"{name} = " in block:
                rows.append((title, milliseconds(namespace[name])))
    lines = [f"| {title} | {time:.1f} | {time / rows[0][1]:.2f} |\n" for title, time in rows]
    machine = f"{os.cpu_count()} CPU cores, torch {torch.__version__.partition('+')[0]}, JAX {jax.__version__}"
    return f"{machine}:\n\n| step | milliseconds | share of float32 |\n|---|---|---|\n{''.join(lines)}"


# ---- the notebook ----------------------------------------------------------------------------------------------------

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
GALLERY = ROOT / "docs" / "gallery"
PICTURES = ("losses", "layers", "loss_scale")
"""Names of the notebook's pictures, in its order."""
CELL = re.compile(r"\S*/ipykernel_\d+/\d+\.py")
"""The file in which IPython puts a cell: another one in each run."""


def run_notebook() -> Any:
    """The notebook with what its cells print and draw; what goes to standard error is left out."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, nbformat.current_nbformat)  # type: ignore[no-untyped-call]
    client = nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env={**os.environ, "COLUMNS": "120"})  # the same tables in a terminal of any width
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs = [each for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
        if cell.cell_type == "code":
            cell.outputs = outputs
        for output in outputs:
            if "text" in output:
                output.text = CELL.sub("cell", output.text)
    return notebook


def write_notebook() -> None:
    """Keeps the notebook with its output, and its pictures for the pages."""
    import nbformat

    notebook = run_notebook()
    nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]
    found = [
        o.data["image/png"] for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})
    ]
    GALLERY.mkdir(exist_ok=True)
    for name, picture in zip(PICTURES, found, strict=True):
        (GALLERY / f"{name}.png").write_bytes(base64.b64decode(picture))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("step")
    kinds.add_parser("tutorial").add_argument("--write", action="store_true", help="put the table into the page")
    kinds.add_parser("notebook")
    given = parser.parse_args()
    if given.kind == "notebook":
        write_notebook()
        return
    if given.kind == "step":
        STEP.write_text(svg())
        return
    found = tutorial_table()
    print(found)
    if given.write:
        head, mark, rest = TUTORIAL.read_text().partition("<!-- figures: python scripts/docs_figures.py tutorial -->\n")
        TUTORIAL.write_text(f"{head}{mark}\n{found}\n{rest[rest.index('<!-- end -->') :]}")


if __name__ == "__main__":
    main()
