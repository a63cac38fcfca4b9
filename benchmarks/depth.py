"""Cost of recording, looking up and compiling a step, by depth of the model and number of parameters.

    python benchmarks/depth.py [--layers 12 24 48 96] [--rounds 3] [--no-compile]
    python benchmarks/depth.py --first "GPT-2 of 12 layers" UNet    # the parts of a first step

A GPT of width 64 on 8 tokens with AdamW, so that only the number of operations and tensors grows.  Recording is the
step's Python; the key is the program lookup (hashing and comparing the trace, running nothing); compiling is JAX's
tracing and XLA:CPU.  For comparison, XLA:CPU's time for the same step written in Flax.  Writes
benchmarks/results/depth.{json,md,png}.

With --first: CPU seconds of the parts of a first step, those of XLA by their share of its threads' time, and of reading
its programs from the disk instead of tracing, lowering and XLA; benchmarks/results/first_parts.md.  No step is run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from flax_models import step_of
from jax.experimental import serialize_executable
from models import GPT, GPTConfig
from peers.lazy import make
from results import plot, write_json, write_markdown
from workloads import WORKLOADS, Workload, language

import xla_amp
from xla_amp.lazy.base import private_api
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lazy.programs.compile import XlaProgram

XLA: Final = "XLA's passes", "fusions by MLIR", "LLVM"


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
def recorded(timed: Callable[..., Any] = lambda _, function: function()) -> Iterator[list[XlaProgram]]:
    """The programs of steps inside, which are not run, but traced: ``timed("trace", function)`` calls that function."""
    programs: list[XlaProgram] = []

    def run(program: XlaProgram, *_: Any) -> list[Any]:
        programs.append(program)
        return list(timed("trace", program.result_shapes))

    with mock.patch.object(execute, "dispatch", run):
        try:
            yield programs
            xla_amp.sync()
        finally:
            execute.clear_programs()


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
            lowered = program.jitted.lower(*program.abstract)
            row["trace"] = time.process_time() - start
            start = time.perf_counter()
            lowered.compile()
            row["compile"] = time.perf_counter() - start
        lowered = flax_step(layers)
        start = time.perf_counter()
        lowered.compile()
        row["compile Flax"] = time.perf_counter() - start
    return row


def first_step(name: str) -> tuple[str, ...]:
    """A row: CPU seconds of all threads for each part of a first step, and for loading what it compiles."""
    seconds = dict.fromkeys(("record", "trace", "lower", "passes", "fusions", "LLVM", "load"), 0.0)

    def timed(part: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        start = time.process_time()
        found = function(*arguments, **named)
        seconds[part] += time.process_time() - start
        return found

    device = pjrt.jax_device()
    with recorded(timed) as programs:
        trainer = make(WORKLOADS["first"][name], "bf16")
        programs.clear()
        seconds["trace"] = 0.0
        timed("record", trainer.step)
        seconds["record"] -= seconds["trace"]
        for program in programs:
            with private_api.x64():
                traced = program.jitted.trace(*program.abstract)
                lowered = timed("lower", traced.lower)
                start = time.process_time()
                compiled, shares = compile_parts(lowered)
                spent = time.process_time() - start
                for part, share in shares.items():
                    seconds[part] += spent * share
                stored = serialize_executable.serialize(compiled)
                load = serialize_executable.deserialize_and_load
                timed("load", load, *stored, backend=device.client, execution_devices=[device])
    operations = sum(program.operations for program in programs)
    return name, f"{operations:,}", *(f"{each:.2f}" for each in seconds.values())


def compile_parts(lowered: Any) -> tuple[Any, dict[str, float]]:
    """The executable, and the shares of XLA's passes, of the lowering of fusions by MLIR and of LLVM in its making."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            compiled = lowered.compile()
        (file,) = Path(folder).rglob("*.xplane.pb")
        lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    found = dict.fromkeys(("passes", "fusions", "LLVM"), 0.0)
    for line in lines:
        sums = collections.Counter[str]()
        for event in line.events:
            sums[event.name.partition("#")[0]] += event.duration_ns
        # XLA's own thread waits for LLVM, which runs in others.
        waits = sum(sums[name] for name in ("JitCompiler::Compile", "ThunkEmitter::ConsumeKernels"))
        found["passes"] += sums["CpuCompiler::CompileCpuExecutable"] - waits
        found["fusions"] += sums["FusionCompiler::Compile"]
        found["LLVM"] += sums["TaskDispatcher::dispatch"]
    return compiled, {part: took / sum(found.values()) for part, took in found.items()}


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
    parser.add_argument("--first", nargs="+", choices=list(WORKLOADS["first"]), help="the parts of first steps instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first:
        headings = ("workload", "operations", "recording", "tracing", "lowering", *XLA, "loading instead")
        write_markdown("first_parts", headings, [first_step(name) for name in options.first], "CPU s of a first step.")
        return
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
