"""Host time of a captured step, compared with recording it and with a JAX call on the same buffers.

The floor is one iteration of a JAX loop, ``state = step(state)``: it calls an executable that takes and returns arrays
of the same shapes, with the same donations, and computes nothing, and it releases the replaced arrays.  Replay and
recording run with that executable instead of the step's, so the difference is our Python alone.  Times are CPU time of
the calling thread, so that other programs on the machine do not count.

    python benchmarks/replay.py [--rounds 50] [--json]
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
from host_time import gpt2, resnet
from results import interleaved, machine

import xla_amp
from xla_amp.lazy import private_api
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import XlaProgram


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


def step_of(make: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """A whole AMP step and its batch."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model, batch, make_optimizer = make()
    model.to(device)
    options = {"momentum": 0.9} if make_optimizer is xla_amp.syncfree.SGD else {}
    optimizer = make_optimizer(model.parameters(), lr=1e-3, **options)
    scaler = xla_amp.GradScaler(device.type)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step, tuple(tensor.to(device) for tensor in batch)


def contestants(make: Callable[[], Any]) -> tuple[dict[str, Callable[[], float]], int]:
    """Functions that run one step and return its host seconds, and the number of arrays in and out."""
    step, batch = step_of(make)
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

    program.call = nothing

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50, help="timed steps of each contestant")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, make in (("ResNet-50", resnet), ("GPT-2 124M", gpt2)):
        functions, buffers = contestants(make)
        recorded = {
            "recorded": functions.pop("recorded")
        }  # separately: a loop either records its steps or replays them
        times = interleaved(functions, options.rounds) | interleaved(recorded, options.rounds)
        results[name] = {**{k: 1e3 * v for k, v in times.items()}, "buffers": buffers}
        results[name]["ratio"] = times["replay"] / times["floor"]
    if options.json:
        print(json.dumps({"machine": machine(), "milliseconds": results}))
        return
    print(machine())
    print(f"{'host time of a step':<22}{'arrays in':>10}{'JAX floor':>12}{'replay':>12}{'/ floor':>9}{'recorded':>12}")
    for name, row in results.items():
        print(
            f"{name:<22}{row['buffers']:>10}{row['floor']:>9.2f} ms{row['replay']:>9.2f} ms{row['ratio']:>9.2f}"
            f"{row['recorded']:>9.2f} ms"
        )


if __name__ == "__main__":
    main()
