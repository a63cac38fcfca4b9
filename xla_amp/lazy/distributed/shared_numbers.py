"""Which Python numbers of a program must be the same in all processes that have values of their own.

A number that a process uses before gradients are averaged is its own affair: a factor of its batch, the seed of its
dropout.  One that goes into a weight behind the average is not: a learning rate, a limit of the gradients' norm, the
seed of noise on weights.  If it differs, the weights do from then on, and nothing else shows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xla_amp.lazy.graph.tape import Node, Tape
from xla_amp.lazy.graph.trace import Instruction, Spec
from xla_amp.lazy.programs.compile import XlaProgram

_SAME = ("all_reduce.", "all_gather", "collective_broadcast")
"""Beginnings of the names of collectives that give all processes the same value."""


def positions(program: XlaProgram) -> tuple[list[int], list[int]]:
    """Positions of such numbers among the floats of `program`, and among its ints, which begin with the seeds.

    A weight is what the program overwrites and computes from its old value, other such values, results of collectives
    and scalars: so the running sum of what each process measures is none.
    """
    tape = Tape(program.key.code)
    specs = tape.specs()
    behind: list[bool] = []
    """By number of a value: whether it depends on a collective."""
    separate: list[bool] = []
    """Whether it depends on data that may differ from process to process."""
    for node in tape:
        instruction = node.instruction
        if node.is_parameter:
            written = node.at.parameters in program.overwritten
            states = [(False, not written and _size(instruction.outs[0]) > 1)]
        elif instruction.collective:
            states = [(True, not _is_same(instruction))] * len(instruction.outs)
        else:
            states = [
                (any(behind[number] for number in given), any(separate[number] for number in given))
                for given in _read_by_each(node, specs)
            ]
        behind += [state[0] for state in states]
        separate += [state[1] for state in states]
    written_to = program.key.wanted[: len(program.overwritten)]
    needed = {number for number in written_to if behind[number] and not separate[number]}
    seeds = program.abstract[3].shape[0] - sum(node.instruction.ints for node in tape)
    of_floats: set[int] = set()
    of_ints: set[int] = set()
    for node in reversed(tape.nodes):
        if node.instruction.collective or needed.isdisjoint(node.results):
            continue
        for result, given in enumerate(_read_by_each(node, specs), node.first):
            if result in needed:
                needed.update(given)
        of_floats.update(range(node.floats.start, node.floats.stop))
        of_ints.update(range(seeds + node.ints.start, seeds + node.ints.stop))
        if node.draw:
            of_ints.update((2 * node.draw[0], 2 * node.draw[0] + 1))
    return sorted(of_floats), sorted(of_ints)


def _read_by_each(node: Node, specs: Sequence[Spec | None]) -> Iterator[Sequence[int]]:
    """The numbers of the values that each result depends on."""
    count, given, name = len(node.results), [number for number in node.inputs if number >= 0], node.instruction.name
    if name.startswith("_foreach_") and len(given) == len(node.inputs) and not len(given) % count:
        yield from (given[index::count] for index in range(count))
        return
    if name == "write_view" and _size(specs[given[0]]) == _size(specs[given[1]]):
        given = given[1:]  # nothing of the old value is left
    yield from [given] * count


def _size(spec: Spec | None) -> int:
    return 0 if spec is None else spec.size


def _is_same(instruction: Instruction) -> bool:
    return instruction.name.startswith(_SAME) and "groups" not in instruction.constants
