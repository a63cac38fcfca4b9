"""Where a bf16 training step spends its time on this CPU, by kind of kernel, each beside the machine's limit.

    python benchmarks/cpu_profile.py [--workloads GPT-2 ResNet-50] [--steps 7]

XLA:CPU's profiler times each kernel; a kernel's time is its shortest in all steps.  Its floating-point operations are
those of its matrix products, its bytes the sizes of its operands and results, both read from the optimized program.
The limits are measured in the same process: a bfloat16 and a float32 product of 2048 x 2048 matrices by PyTorch, and a
copy of 256 MiB.  Kernels may run at once, so that their sum can exceed the step.  Writes
benchmarks/results/cpu_profile.md.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import hlo_text
import jax
import torch
from hlo_text import HloInstruction
from peers import lazy
from results import write_markdown
from workloads import WORKLOADS

from xla_amp.lazy.programs import execute

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CALLED = re.compile(r"calls=%([\w.\-]+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_MOVES = frozenset({"bitcast", "constant", "convert", "copy", "fusion", "parameter", "reduce-precision", "transpose"})
_KINDS = (
    (r"_fused_|foreach_(?:add|sub|mul|div|addcmul|lerp|sqrt)|_amp_update", "optimizer"),
    (r"_amp_foreach", "unscaling and inf check"),
    (r"norm", "normalization"),
    (r"softmax|nll_loss|cross_entropy", "softmax and loss"),
    (r"attention", "attention, without products"),
)


class Kernel(NamedTuple):
    """What one kernel of a program does."""

    kind: str
    operations: int
    bytes: int


def _multiply_adds(each: HloInstruction, named: Mapping[str, HloInstruction]) -> int:
    """Of a matrix product."""
    left = named[each.operands[0]].shape
    contracted = math.prod(left[int(axis)] for axis in _CONTRACTED.search(each.rest)[1].split(","))  # type: ignore[index]
    return contracted * math.prod(each.shape)


class Frames:
    """Names of the functions that made an instruction, from the tables at the head of a program's text."""

    def __init__(self, text: str) -> None:
        names = self._section(text, "FunctionNames")
        places = [dict(re.findall(r"(\w+)=(\d+)", line)) for line in self._section(text, "FileLocations")]
        self._names = [names[int(place["function_name_id"]) - 1].strip('"') for place in places]
        self._frames = [dict(re.findall(r"(\w+)=(\d+)", line)) for line in self._section(text, "StackFrames")]

    @staticmethod
    def _section(text: str, title: str) -> list[str]:
        found = re.search(rf"^{title}\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
        return [line.split(" ", 1)[1] for line in found[1].splitlines()] if found else []

    def of(self, each: HloInstruction) -> str:
        """All names, innermost first, separated by blanks."""
        found, names = _FRAME.search(each.rest), list[str]()
        index = int(found[1]) if found else 0
        while index:
            frame = self._frames[index - 1]
            names.append(self._names[int(frame["file_location_id"]) - 1])
            index = int(frame["parent_frame_id"]) - 1
        return " ".join(names)


def kernels(text: str) -> dict[str, Kernel]:
    """The kernels of an optimized program, by their names in a profile."""
    frames, named = Frames(text), {each.name: each for each in hlo_text.instructions(text)}
    inside, entry, current = collections.defaultdict[str, list[HloInstruction]](list), "", ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            current = begin[1]
            entry = current if line.startswith("ENTRY") else entry
        for each in hlo_text.instructions(line):
            inside[current].append(each)
    found = {}
    for each in inside[entry]:
        called = _CALLED.search(each.rest)
        body = inside[called[1]] if called else [each]
        operations = 2 * sum(_multiply_adds(part, named) for part in body if part.operation == "dot")
        size = each.bytes + sum(named[operand].bytes for operand in each.operands if operand in named)
        found[each.name] = Kernel(_kind({part.operation for part in body}, frames.of(each)), operations, size)
    return found


def _kind(operations: set[str], made_by: str) -> str:
    if "convolution" in operations:
        return "convolutions in float32"
    if "dot" in operations:
        return "products"
    if operations <= _MOVES:
        return "conversions and copies"
    return next((kind for pattern, kind in _KINDS if re.search(pattern, made_by)), "elementwise and other")


def profile(step: Callable[[], Any], steps: int) -> tuple[dict[str, float], float]:
    """Shortest seconds of each kernel, and the median step's seconds."""
    whole = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                begin = time.perf_counter()
                step()
                whole.append(time.perf_counter() - begin)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    times = collections.defaultdict[str, list[float]](list)
    for event in events:
        if name := event.get("args", {}).get("hlo_op"):
            times[name].append(event["dur"] * 1e-6)
    return {name: min(seconds) for name, seconds in times.items()}, statistics.median(whole)


def shortest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of nine calls."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def limits() -> tuple[float, float, float]:
    """GFLOP/s of a bfloat16 and a float32 product, and GB/s of a copy (read and written)."""
    wide, memory = torch.randn(2048, 2048), torch.randn(1 << 26)
    low, target = wide.bfloat16(), torch.empty_like(memory)
    rate = 2 * 2048**3 / 1e9
    copied = 2 * memory.nbytes / 1e9 / shortest(lambda: target.copy_(memory))
    return rate / shortest(lambda: low @ low), rate / shortest(lambda: wide @ wide), copied


def rows(workload: str, steps: int) -> list[tuple[str, ...]]:
    """The table's rows of a workload, largest kind first."""
    trainer = lazy.make(WORKLOADS["small"][workload], "bf16")

    def step() -> None:
        trainer.wait(trainer.step())

    for _ in range(3):
        step()
    # The newest program is the step's.  Its text is compiled once more, with the same names of kernels.
    known = kernels(execute.programs()[-1].optimized_hlo())
    times, whole = profile(step, steps)
    total = sum(times.values())
    table = collections.defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0, 0.0])
    for name, seconds in times.items():
        kind, operations, size = known.get(name, Kernel("not in the program's text", 0, 0))
        table[kind] = [a + b for a, b in zip(table[kind], (seconds, 1, operations, size), strict=True)]
    lines = [(workload, "the step", f"{1e3 * whole:.0f}", "", str(len(times)), "", "")]
    for kind, (seconds, count, operations, size) in sorted(table.items(), key=lambda item: -item[1][0]):
        rate = f"{operations / seconds / 1e9:.0f}" if operations else ""
        cells = f"{1e3 * seconds:.1f}", f"{seconds / total:.0%}", f"{count:.0f}", rate, f"{size / seconds / 1e9:.1f}"
        lines.append((workload, kind, *cells))
    return lines


def main() -> None:
    """Profile the workloads and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(WORKLOADS["small"])
    parser.add_argument("--workloads", nargs="*", choices=names, default=["GPT-2", "BERT", "ResNet-50"])
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    table = [line for workload in options.workloads for line in rows(workload, options.steps)]
    low, wide, copied = limits()
    table.append(("limit", "bfloat16 product", "", "", "", f"{low:.0f}", ""))
    table.append(("limit", "float32 product", "", "", "", f"{wide:.0f}", ""))
    table.append(("limit", "copy", "", "", "", "", f"{copied:.1f}"))
    headings = ("workload", "kernels", "ms", "share", "kernels", "GFLOP/s", "GB/s")
    write_markdown("cpu_profile", headings, table, __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
