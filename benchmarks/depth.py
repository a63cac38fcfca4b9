"""Cost of recording, looking up and compiling a step, by depth of the model and number of parameters.

    python benchmarks/depth.py [--layers 12 24 48 96] [--rounds 3] [--no-compile]

A GPT of width 64 on 8 tokens with AdamW, so that only the number of operations and tensors grows.  Recording is the
step's Python; the key is the program lookup (hashing and comparing the trace, running nothing); compiling is JAX's
tracing and XLA:CPU.  For comparison, XLA:CPU's time for the same step written in Flax.  Writes
benchmarks/results/depth.{json,md,png}.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax_models import step_of
from models import GPT, GPTConfig
from results import plot, write_json, write_markdown
from workloads import Workload, language

import xla_amp
from xla_amp.lazy import private_api
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import XlaProgram


def trainer(layers: int) -> tuple[Callable[[], None], int]:
    """A step on the lazy device, and the number of parameter tensors."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, context=8, width=64, heads=4, layers=layers)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = (torch.randint(64, (2, 8)).to(device) for _ in range(2))

    def step() -> None:
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(1 for _ in model.parameters())


@contextlib.contextmanager
def recorded() -> Iterator[list[XlaProgram]]:
    """The programs of steps inside, which are not run."""
    programs: list[XlaProgram] = []

    def run(program: XlaProgram, *_: Any) -> list[Any]:
        programs.append(program)
        return program.result_shapes()

    with execute.instead(run):
        yield programs
        xla_amp.sync()


def program_of(layers: int) -> XlaProgram:
    """The program of a steady step of a model with `layers` layers; nothing is run or compiled."""
    with recorded() as programs:
        step, _ = trainer(layers)
        for _ in range(2):
            programs.clear()
            step()
            xla_amp.sync()
    (program,) = programs
    return program


def measure(layers: int, rounds: int, compile_: bool) -> dict[str, Any]:
    """Counts, and median times in seconds."""
    row: dict[str, Any] = {"layers": layers}
    with recorded() as programs:
        step, row["tensors"] = trainer(layers)
        samples: dict[str, list[float]] = {"record": [], "key": []}
        for number in range(rounds + 2):
            programs.clear()
            start = time.process_time()
            step()
            middle = time.process_time()
            xla_amp.sync()
            if number >= 2:  # optimizers make their state in the first step
                samples["record"].append(middle - start)
                samples["key"].append(time.process_time() - middle)
        program = programs[0]
    row |= {name: statistics.median(times) for name, times in samples.items()}
    row["operations"] = program.operations
    if compile_:
        start = time.process_time()
        with private_api.x64():
            lowered = program.call.lower(*program.abstract)
            row["trace"] = time.process_time() - start
            start = time.perf_counter()
            lowered.compile()
            row["compile"] = time.perf_counter() - start
        lowered = flax_step(layers)
        start = time.perf_counter()
        lowered.compile()
        row["compile Flax"] = time.perf_counter() - start
    return row


def flax_step(layers: int) -> Any:
    """The same step in Flax and optax, lowered."""
    sizes = language(2, 8, vocabulary=64, context=8, width=64, heads=4, layers=layers)
    workload = Workload(name="GPT", **sizes)
    step, state = step_of(workload, jnp.bfloat16, abstract=True)
    return step.lower(*state, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in workload.flax_batch()))


def main() -> None:
    """Print a line for each depth, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", type=int, default=[12, 24, 48, 96])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true", help="leave out tracing by JAX and compiling by XLA")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for layers in options.layers:
        rows.append(measure(layers, options.rounds, not options.no_compile))
        print(rows[-1], flush=True)
    write_json("depth", {"rows": rows})
    names = [name for name in ("record", "key", "trace", "compile", "compile Flax") if name in rows[0]]
    cells = [
        (
            *(str(row[name]) for name in ("layers", "tensors", "operations")),
            *(f"{1e3 * row[name]:.1f} ({1e3 * row[name] / row['layers']:.2f})" for name in names),
        )
        for row in rows
    ]
    headings = ("layers", "parameter tensors", "operations", *(f"{name} ms (per layer)" for name in names))
    write_markdown("depth", headings, cells, __doc__.splitlines()[0])
    panels: dict[str, dict[str, dict[Any, float]]] = {}
    for name in names:
        panels[f"{name}, by layers"] = {"s": {row["layers"]: row[name] for row in rows}}
    panels["recording, by tensors"] = {"s": {row["tensors"]: row["record"] for row in rows}}
    plot("depth", panels, "seconds")


if __name__ == "__main__":
    main()
