"""New programs of several processes: compared before they are compiled, so that a deadlock becomes an error.

Digests go through the key-value store of JAX's coordinator.  Known programs are not compared: as in JAX, all processes
must run them in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import linecache
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from xla_amp.common import events
from xla_amp.errors import EngineError
from xla_amp.lazy.distributed import consistency, processes, same_values
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.programs import execute, mesh
from xla_amp.lazy.programs.compile import XlaProgram, build

_agreed: set[bytes] = set()
"""Digests of the programs that all processes have."""


def compare() -> None:
    """From now on new programs are compared, and errors name processes that have ended."""
    execute.program_admitted.subscribe(admit)
    mesh.ended.subscribe(consistency.ended)


def admit(program: XlaProgram, arguments: Sequence[Any]) -> None:
    """Compares a new program that several processes run together, before it is compiled.

    On a CPU its digest leaves out which inputs the program may overwrite: one process may still hold a value that
    another has dropped, and then only one of them has a new program.  Elsewhere all executables must be the same.

    Args:
        program: a new one.
        arguments: its inputs, which a mesh of several processes must hold alike (`same_values`).

    Raises:
        EngineError: another process has another program, or came to none within the timeout.
    """
    if not mesh.spans_processes() and not any(each.collective for each in program.instructions.values()):
        return
    digest = hashlib.sha256(_without_donation(program).lower().as_text().encode())
    if program.context.platform != "cpu":
        digest.update(repr(program.donated).encode())
    if digest.digest() in _agreed:
        return
    try:
        different = _compare(program, digest.digest())
    except EngineError as error:
        raise EngineError(
            f"{error}. Process {processes.ordinal()} has a new program, {_line()}; one that runs a known program "
            f"compares nothing. {_ALIKE}"
        ) from error
    if different:
        raise EngineError(different)
    if mesh.spans_processes():
        same_values.compare_inputs(arguments)
    _agreed.add(digest.digest())


_NEW = "a new program"
_ALIKE = (
    "All processes must record the same operations between two steps: read values, keep tensors and call sync() on all "
    "of them or on none"
)


def _compare(program: XlaProgram, digest: bytes) -> str:
    """How the program of a process differs from that of process 0; empty if all have the same."""
    rank, world = processes.ordinal(), range(processes.world_size())
    digests = processes.rendezvous(_NEW, digest, [] if rank == 0 else [rank])
    odd = next((each for each in world[1:] if digests[each] != digest), 0) if rank == 0 else 0
    odd = int(processes.rendezvous(_NEW, b"%d" % odd, [0])[0])
    if not odd:
        return ""
    texts = processes.rendezvous(_NEW, _describe(program) if rank in (0, odd) else b"", [0, odd])
    here, there = (json.loads(zlib.decompress(text)) for text in texts)
    return (
        f"{consistency.name_of(0)} and {consistency.name_of(odd)} cannot run their next program together, because the "
        "two are different: "
        f"{_difference(here, odd, there)}. Process 0 ended its program at {here['end']}; process {odd} at "
        f"{there['end']}. {_ALIKE}"
    )


def _without_donation(program: XlaProgram) -> XlaProgram:
    tape = Tape(program.key.code)
    specs, numbers = tape.specs(), [node.first for node in tape if node.is_parameter]
    ints = sum(node.instruction.ints for node in tape)
    _, _, floats, words = program.abstract
    return build(
        dataclasses.replace(program.key, spent=()),
        numbers,
        [spec for number in numbers if (spec := specs[number]) is not None],
        (floats.shape[0], ints),
        (words.shape[0] - ints) // 2,
        program.context.platform,
    )


def _line() -> str:
    """The user's line that is running: ``"train.py:12: print(float(loss))"``."""
    frame = events.user_frame()
    if frame is None:
        return "in a backward pass"
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f": {source}" if source else "")


def _describe(program: XlaProgram) -> bytes:
    """The program as text for a process that has another."""
    tape = Tape(program.key.code)
    found = {
        "operations": [str(node) for node in tape],
        "lines": [node.instruction.location for node in tape],
        "results": len(program.outputs),
        "memory": [] if program.context.platform == "cpu" else list(program.donated),
        "end": _line(),
    }
    return zlib.compress(json.dumps(found).encode())


def _difference(here: Mapping[str, Any], rank: int, there: Mapping[str, Any]) -> str:
    """The first difference of the programs of process 0 and another, as `_describe` writes them."""
    pairs = enumerate(zip(here["operations"], there["operations"], strict=False))
    different = [(index, a) for index, (a, b) in pairs if a != b]
    # That an operation differs says more than that an input does.
    operations = (index for index, text in different if not text.startswith("input "))
    index = next(operations, different[0][0] if different else None)
    lengths = len(here["operations"]), len(there["operations"])
    if index is not None:
        return (
            f"operation {index} is {_operation(here, index)} on process 0, {_operation(there, index)} on process {rank}"
        )
    if lengths[0] != lengths[1]:
        longer, longest = (here, 0) if lengths[0] > lengths[1] else (there, rank)
        return f"operation {min(lengths)} is {_operation(longer, min(lengths))}, only on process {longest}"
    if here["results"] != there["results"]:
        return f"{here['results']} values are kept on process 0, {there['results']} on process {rank}"
    if here["memory"] != there["memory"]:
        return "a value that the program may overwrite on one of them is still held on the other"
    return "the operations are the same and something in them differs, such as a constant"


def _operation(program: Mapping[str, Any], index: int) -> str:
    line = program["lines"][index]
    return f"{program['operations'][index]} (recorded at {line})" if line else str(program["operations"][index])
