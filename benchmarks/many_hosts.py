"""Collectives and memory of a training step of GPT-2 on 16 and 512 absent devices, as XLA compiles it.

    python benchmarks/many_hosts.py [--targets h100 v5p] [--devices 16 512] [--layers 4]

The model is transformers' at its real width (768, 12 heads, a vocabulary padded to 50,304) with some of its layers,
trained on 1024 tokens for each part of the axis "data", under autocast in bfloat16 with AdamW.  Nothing is run: counts,
bytes and memory are those of the compiled program, for one device.  Each row is saved to
benchmarks/results/many_hosts.json when it is ready; saved rows are compiled again only with `--again`.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from results import RESULTS, stamp, write_markdown

import xla_amp
from xla_amp.tools.inspect import targets

MESHES: dict[tuple[int, str], dict[str, int]] = {
    (16, "fsdp"): {"data": 16},
    (16, "fsdp+tp"): {"data": 4, "model": 4},  # 12 heads over 4
    (512, "fsdp+tp"): {"data": 128, "model": 4},  # 768 does not divide over 512
}
"""Devices and recipe -> axes."""


def step_on(axes: Mapping[str, int], recipe: str, layers: int) -> Callable[[], Callable[[], torch.Tensor]]:
    """For `export_for`: makes the model on a mesh, and returns its step."""

    def make_step() -> Callable[[], torch.Tensor]:
        device, mesh = xla_amp.xla_device(), xla_amp.make_mesh(axes)
        config = transformers.GPT2Config(n_layer=layers, vocab_size=50304, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        model = transformers.GPT2LMHeadModel(config)
        xla_amp.shard(model, mesh, recipe)
        optimizer = xla_amp.syncfree.AdamW(model.parameters())
        tokens = torch.zeros(axes["data"], 1024, dtype=torch.int64).to(device)

        def step() -> torch.Tensor:
            with xla_amp.autocast(device, dtype=torch.bfloat16):
                loss: torch.Tensor = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return make_step


def measure(compilers: targets.Compilers, target: str, devices: int, recipe: str, layers: int) -> dict[str, Any]:
    """Compile one case."""
    axes = MESHES[devices, recipe]
    program = xla_amp.export_for(target, step_on(axes, recipe, layers))
    compiled = compilers.compile(program, target, program.compiler_options)
    return {
        "target": target,
        "devices": devices,
        "recipe": recipe,
        "layers": layers,
        "mesh": axes,
        "argument_memory": compiled.argument_memory,
        "peak_memory": compiled.peak_memory,
        "collectives": [[*kind, *traffic] for kind, traffic in sorted(compiled.collectives().items())],
    }


HEADINGS = ("target", "devices", "recipe", "mesh", "layers", "state MiB", "peak MiB", "sent MiB", "collectives")


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text; collectives of less than 0.1 MiB are left out."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["target"], row["devices"], row["recipe"], row["layers"])):
        kinds = [
            f"{count} {name} {dtype}{f' over {group}' if group else ''}: {size / 2**20:.1f}"
            for name, dtype, group, count, size, _ in row["collectives"]
            if size >= 2**20 / 10
        ]
        numbers = [row["argument_memory"], row["peak_memory"], sum(each[-1] for each in row["collectives"])]
        lines.append(
            (
                row["target"],
                str(row["devices"]),
                row["recipe"],
                " x ".join(f"{name} {extent}" for name, extent in row["mesh"].items()),
                str(row["layers"]),
                *(f"{number / 2**20:.0f}" for number in numbers),
                "; ".join(kinds),
            )
        )
    return lines


def main() -> None:
    """Compile missing rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=["h100", "v5p"])
    parser.add_argument("--devices", nargs="*", type=int, default=[16, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--again", action="store_true", help="compile rows that are there, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    path = RESULTS / "many_hosts.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    with targets.Compilers() as compilers:
        for target in options.targets:
            for devices, recipe in MESHES:
                key = {"target": target, "devices": devices, "recipe": recipe, "layers": options.layers}
                have = [row for row in rows if key.items() <= row.items()]
                if devices not in options.devices or (have and not options.again):
                    continue
                began = time.monotonic()
                new = measure(compilers, target, devices, recipe, options.layers)
                rows = [each for each in rows if each not in have] + [new]
                path.write_text(json.dumps({"stamp": stamp(), "rows": rows}, indent=1) + "\n")
                print(*table([new])[0], f"({time.monotonic() - began:.0f} s)", flush=True)
    title = __doc__.splitlines()[0] + "  Sizes in MiB for one device: of results, and sent by the ring algorithms."
    write_markdown("many_hosts", HEADINGS, table(rows), title)


if __name__ == "__main__":
    main()
