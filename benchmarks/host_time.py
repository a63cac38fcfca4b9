"""Host time of an AMP training step on the lazy device, compared with native torch on the CPU, and with JAX.

On the lazy device: recording a step (forward in bf16 autocast, scaled backward, scaler step and update, zero_grad) and
computing its cache key, without running the program.  In native torch: the same step at tiny widths, where the
arithmetic is negligible and Python, dispatch and autograd remain.  Both alternate in one process.

With --captured: replaying the step, beside one iteration of a JAX loop, ``state = step(state)``.  That calls an
executable that takes and returns arrays of the same shapes, with the same donations, and computes nothing, and it
releases the replaced arrays.  Replay and recording run with that executable instead of the step's, so the difference is
our Python alone, in CPU time of the calling thread.

    python benchmarks/host_time.py [--captured] [--rounds 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from models import GPT, GPTConfig, ResNet50
from results import interleaved, machine

import xla_amp
from xla_amp.lazy.base import private_api
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import XlaProgram


def resnet() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """ResNet-50 at width 4 on images of 32 pixels, SGD with momentum."""
    model = ResNet50(width=4, classes=10)
    return model, (torch.randn(2, 3, 32, 32), torch.randint(10, (2,))), xla_amp.syncfree.SGD


def gpt2() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """GPT-2's graph (12 layers, dropout 0.1) at width 24 on 8 tokens, AdamW."""
    model = GPT(GPTConfig(vocabulary=64, context=8, width=24, dropout=0.1))
    return model, (torch.randint(64, (2, 8)), torch.randint(64, (2, 8))), xla_amp.syncfree.AdamW


def gpt2_as_written() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """`gpt2` with torch's AdamW and without a scaler, as most training in bfloat16 is written."""
    return *gpt2()[:2], torch.optim.AdamW


WORKLOADS: dict[str, Callable[[], Any]] = {
    "ResNet-50": resnet,
    "GPT-2 124M": gpt2,
    "GPT-2, torch.optim.AdamW": gpt2_as_written,
}


def step_of(make: Callable[[], Any], device: torch.device) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """A whole AMP step and its batch."""
    torch.manual_seed(0)
    model, batch, make_optimizer = make()
    model.to(device)
    options = {"momentum": 0.9} if make_optimizer is xla_amp.syncfree.SGD else {}
    optimizer = make_optimizer(model.parameters(), lr=1e-3, **options)
    scaler = xla_amp.GradScaler(device.type, enabled=make_optimizer is not torch.optim.AdamW)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step, tuple(tensor.to(device) for tensor in batch)


def trainer(make: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """A function that runs one step on `device` and returns its host seconds."""
    step, batch = step_of(make, device)

    if device.type == "cpu":

        def native() -> float:
            start = time.perf_counter()
            step(*batch)
            return time.perf_counter() - start

        return native

    def lazy() -> float:
        execution = 0.0
        original = execute.dispatch

        def timed(*args: Any) -> Any:
            nonlocal execution
            start = time.perf_counter()
            try:
                return original(*args)
            finally:
                execution += time.perf_counter() - start

        execute.dispatch = timed
        try:
            start = time.perf_counter()
            step(*batch)
            xla_amp.sync()
            elapsed = time.perf_counter() - start
        finally:
            execute.dispatch = original
        xla_amp.sync(wait=True)
        return elapsed - execution

    return lazy


def empty_program(program: XlaProgram) -> Any:
    """An executable with the inputs, donations and outputs of `program` that computes nothing."""
    outputs = program.result_shapes()

    def nothing(donated: list[Any], kept: list[Any], floats: Any, ints: Any) -> list[Any]:
        given = list(donated)
        results = []
        for output in outputs:
            match = next((x for x in given if x.shape == output.shape and x.dtype == output.dtype), None)
            given = [x for x in given if x is not match]
            results.append(jnp.zeros(output.shape, output.dtype) if match is None else match)
        return results

    return jax.jit(nothing, donate_argnums=0, keep_unused=True)


def successors(donated: list[Any], program: XlaProgram) -> list[int]:
    """For each donated input, the index of the output that replaces it in the next iteration."""
    spare = dict(enumerate(program.result_shapes()))
    indices = []
    for array in donated:
        index = next(i for i, x in spare.items() if x.shape == array.shape and x.dtype == array.dtype)
        indices.append(index)
        del spare[index]
    return indices


def captured(make: Callable[[], Any]) -> tuple[dict[str, Callable[[], float]], int]:
    """Functions that run one step and return its host seconds, and the number of arrays in and out.

    They are a loop of JAX's, a replay, and a recording, all with an executable that computes nothing.
    """
    step, batch = step_of(make, xla_amp.xla_device())
    compiled = xla_amp.compile(step, strict=True)
    while not compiled.replays:
        compiled(*batch)
    xla_amp.sync(wait=True)
    program = execute.programs()[-1]  # which ran last
    nothing = empty_program(program)
    with private_api.x64():
        zeros = [[jnp.zeros(spec.shape, spec.dtype) for spec in part] for part in program.abstract[:2]]
        numbers = [np.zeros(spec.shape, spec.dtype) for spec in program.abstract[2:]]
    replacements = successors(zeros[0], program)
    buffers = len(program.abstract[0]) + len(program.abstract[1])

    def floor() -> float:
        with private_api.x64():
            start = time.thread_time()
            outputs = nothing(*zeros, *numbers)
            zeros[0] = [outputs[index] for index in replacements]
            elapsed = time.thread_time() - start
        jax.block_until_ready(outputs)
        return elapsed

    program.jitted = nothing

    def replayed() -> float:
        start = time.thread_time()
        compiled(*batch)
        elapsed = time.thread_time() - start
        xla_amp.sync(wait=True)
        return elapsed

    def recorded() -> float:
        start = time.thread_time()
        step(*batch)
        xla_amp.sync()
        elapsed = time.thread_time() - start
        xla_amp.sync(wait=True)
        return elapsed

    for contestant in (floor, replayed, recorded) * 3:
        contestant()
    return {"floor": floor, "replay": replayed, "recorded": recorded}, buffers


def native_and_lazy(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of both, and their ratio, by workload."""
    results = {}
    for name, make in WORKLOADS.items():
        contestants = {
            "native": trainer(make, torch.device("cpu")),
            "lazy": trainer(make, xla_amp.xla_device()),
        }
        for _ in range(4):  # compiles, then settles
            for contestant in contestants.values():
                contestant()
        times = interleaved(contestants, rounds)
        results[name] = {**{k: 1e3 * v for k, v in times.items()}, "ratio": times["lazy"] / times["native"]}
    return results


def replay_and_floor(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of the step captured, of JAX's loop and of the step recorded, by workload."""
    results = {}
    for name, make in WORKLOADS.items():
        functions, buffers = captured(make)
        # Separately: a loop either records its steps or replays them.
        recorded = {"recorded": functions.pop("recorded")}
        times = interleaved(functions, rounds) | interleaved(recorded, rounds)
        results[name] = {**{k: 1e3 * v for k, v in times.items()}, "buffers": buffers}
        results[name]["ratio"] = times["replay"] / times["floor"]
    return results


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captured", action="store_true", help="replays, beside JAX's own dispatch")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each contestant")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = (replay_and_floor if options.captured else native_and_lazy)(options.rounds)
    if options.json:
        print(json.dumps({"machine": machine(), "milliseconds": results}))
        return
    print(machine())
    columns = list(next(iter(results.values())))
    print(f"{'ms on the host of an AMP step':<30}" + "".join(f"{column:>12}" for column in columns))
    for name, row in results.items():
        print(f"{name:<30}" + "".join(f"{row[column]:>12.2f}" for column in columns))


if __name__ == "__main__":
    main()
