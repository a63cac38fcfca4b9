"""New programs of several processes: compared before they are compiled, so that a deadlock becomes an error.

Digests go through the key-value store of JAX's coordinator.  Known programs are not compared: as in JAX, all processes
must run them in the same order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from xla_amp.errors import EngineError
from xla_amp.lazy import processes
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.processes import consistency, same_values
from xla_amp.lazy.programs import execute, mesh, recompile_reasons
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
        program.key._replace(spent=()),
        numbers,
        [spec for number in numbers if (spec := specs[number]) is not None],
        (floats.shape[0], ints),
        (words.shape[0] - ints) // 2,
        program.context.platform,
    )


def _line() -> str:
    return recompile_reasons.with_source(recompile_reasons.place())


def _describe(program: XlaProgram) -> bytes:
    """The program as text for a process that has another."""
    steps = [(str(node), node.instruction.location) for node in Tape(program.key.code)]
    steps.append((f"the end ({len(program.outputs)} results)", ""))
    if program.context.platform != "cpu":
        steps.append((f"the inputs that it may overwrite, {list(program.donated)},", ""))
    return zlib.compress(json.dumps({"steps": steps, "end": _line()}).encode())


def _difference(here: Mapping[str, Any], rank: int, there: Mapping[str, Any]) -> str:
    """The first difference of the programs of process 0 and another, as `_describe` writes them."""
    pairs = enumerate(itertools.zip_longest(here["steps"], there["steps"], fillvalue=("nothing", "")))
    different = [(index, one, other) for index, (one, other) in pairs if one[0] != other[0]]
    if not different:
        return "the operations are the same and something in them differs, such as a constant"
    # That an operation differs says more than that an input does.
    index, one, other = next((each for each in different if not each[1][0].startswith("input ")), different[0])
    return f"operation {index} is {_named(*one)} on process 0, {_named(*other)} on process {rank}"


def _named(step: str, location: str) -> str:
    return f"{step} (recorded at {location})" if location else step
