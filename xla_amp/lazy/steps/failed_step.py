"""Compute what a failed step can still compute: every value that does not depend on the operation that failed.

First each instruction is lowered alone, without data: that finds a lowering that raises, and the rest runs as one
program.  If all of them can be lowered, XLA has refused the program, so the operations run one by one until those that
fail are found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xla_amp.lazy import private_api
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.graph.trace import Instruction, Spec
from xla_amp.lazy.programs import compile as compiling
from xla_amp.lazy.programs.compile import Context, Key
from xla_amp.lowering.operand import materialize

_MOST_INSTRUCTIONS = 256
"""Different instructions of a program up to which they run one by one, each of which XLA compiles."""


class Rest(NamedTuple):
    """What is left of a failed step."""

    values: dict[int, Any]
    """Wanted value number -> its array."""
    lost: dict[int, str]
    """Value number -> the failure that it depends on."""
    reason: str
    """The first failure."""


def rest(
    key: Key,
    parameter_numbers: Sequence[int],
    parameter_specs: Sequence[Spec],
    arrays: Sequence[Any],
    numbers: tuple[np.ndarray, np.ndarray],
    streams: int,
    platform: str,
) -> Rest | None:
    """What does not depend on a failure; None if no single operation fails.

    Args:
        key: of the program that failed.
        parameter_numbers, parameter_specs, arrays: of its inputs, none of which was donated.
        numbers: its lifted floats and ints.
        streams: count of (seed, offset) pairs, which precede the ints.
        platform: XLA platform.
    """
    tape = Tape(key.code)
    context = Context(platform)
    with private_api.x64():
        errors = _find(tape, lambda instruction, specs: _lower(instruction, specs, context))
        if errors:
            lost = _dependents(tape, errors)
            wanted = tuple(number for number in key.wanted if number not in lost)
            reduced = Key(code=tuple(tape.without(lost)), wanted=wanted, spent=())
            values = {}
            if wanted:
                counts = len(numbers[0]), len(numbers[1]) - 2 * streams
                program = compiling.build(reduced, parameter_numbers, parameter_specs, counts, streams, platform)
                outputs = program.nested([], [arrays[index] for index in program.kept], *numbers)
                found = (outputs[p] if p >= 0 else arrays[~p] for p in program.outputs)
                values = dict(zip(wanted, found, strict=True))
        else:
            if len({node.instruction for node in tape}) > _MOST_INSTRUCTIONS:
                return None
            values, lost = _one_by_one(tape, key.wanted, arrays, numbers, streams, context)
            if not lost:
                return None
    return Rest(values, lost, next(iter(lost.values())))


def _find(tape: Tape, run: Callable[[Instruction, list[Spec | None]], None]) -> dict[Instruction, str]:
    """Instruction -> its failure; an instruction fixes the specs of its inputs, so each is tried once."""
    errors: dict[Instruction, str] = {}
    specs = tape.specs()
    tried: set[Instruction] = set()
    for node in tape:
        if not node.is_parameter and node.instruction not in tried:
            tried.add(node.instruction)
            try:
                run(node.instruction, [specs[number] if number >= 0 else None for number in node.inputs])
            except Exception as error:
                errors[node.instruction] = str(error)
    return errors


def _emit(
    instruction: Instruction, context: Context, inputs: list[Any], floats: Any, ints: Any, seed: Any
) -> list[Any]:
    rng = compiling.random_key(*seed) if instruction.random else None
    count = instruction.floats, instruction.ints
    lifted = [floats[i] for i in range(count[0])], [ints[i] for i in range(count[1])]
    return [materialize(value) for value in compiling.emit(instruction, context, inputs, *lifted, rng)]


def _lower(instruction: Instruction, specs: list[Spec | None], context: Context) -> None:
    structs = [None if spec is None else spec.struct() for spec in specs]
    number = functools.partial(jax.ShapeDtypeStruct, dtype=np.int64)
    floats = jax.ShapeDtypeStruct((instruction.floats,), np.float64)
    run = functools.partial(_emit, instruction, context)
    jax.eval_shape(run, structs, floats, number((instruction.ints,)), number((2,)))


def _dependents(tape: Tape, errors: dict[Instruction, str]) -> dict[int, str]:
    """Value number -> the failure that it depends on."""
    lost: dict[int, str] = {}
    for node in tape:
        said = errors.get(node.instruction) or next((lost[number] for number in node.inputs if number in lost), None)
        if said is not None:
            lost |= dict.fromkeys(node.results, said)
    return lost


def _one_by_one(
    tape: Tape,
    wanted: Sequence[int],
    arrays: Sequence[Any],
    numbers: tuple[np.ndarray, np.ndarray],
    streams: int,
    context: Context,
) -> tuple[dict[int, Any], dict[int, str]]:
    """(wanted value number -> array, value number -> the failure that it depends on)."""
    last_use = {number: index for index, node in enumerate(tape) for number in node.inputs}
    last_use |= dict.fromkeys(wanted, len(tape))
    values: dict[int, Any] = {}
    lost: dict[int, str] = {}
    compiled: dict[Instruction, Any] = {}
    floats, (words, ints) = numbers[0], np.split(numbers[1], [2 * streams])
    for index, node in enumerate(tape):
        instruction, draw, outs = node.instruction, node.draw, node.results
        if node.is_parameter:
            values[node.first] = arrays[node.at.parameters]
        elif (said := next((lost[number] for number in node.inputs if number in lost), None)) is not None:
            lost |= dict.fromkeys(outs, said)
        else:
            run = compiled.get(instruction)
            if run is None:
                run = compiled[instruction] = jax.jit(functools.partial(_emit, instruction, context))
            seed = words[2 * draw[0] : 2 * draw[0] + 2] + [0, draw[1]] if draw else np.zeros(2, np.int64)
            given = [values[number] if number >= 0 else None for number in node.inputs]
            try:
                results = run(given, floats[node.floats], ints[node.ints], seed)
                values |= zip(outs, jax.block_until_ready(results), strict=True)
            except Exception as error:
                said = compiling.failure(instruction, given, error)
                lost |= dict.fromkeys(outs, said)
        for number in (*node.inputs, *outs):
            if last_use.get(number, index) <= index:
                values.pop(number, None)
    return {number: values[number] for number in wanted if number in values}, lost
