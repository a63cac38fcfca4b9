"""The decoded view of a trace, whose code is a flat list of integers.

Each operation is ``id, [stream, index of the draw,] inputs...`` there: the id of its instruction, where a random one
draws from, and the numbers of the values that it reads.  Values are numbered in the order in which they are made.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from xla_amp.lazy.graph.trace import Instruction, Spec, instruction_of, trace


class Position(NamedTuple):
    """A place in a trace, by what is before it."""

    code: int = 0
    values: int = 0
    parameters: int = 0
    floats: int = 0
    ints: int = 0

    @classmethod
    def now(cls) -> Position:
        """The end of the trace."""
        with trace.lock:
            return cls(len(trace.code), trace.count, len(trace.parameters), len(trace.floats), len(trace.ints))


BEGIN = Position()


class Node(NamedTuple):
    """An operation of a trace, or the read of a parameter."""

    instruction: Instruction
    draw: Sequence[int]
    """(stream, index of the draw) of a random operation; otherwise empty."""
    inputs: Sequence[int]
    """Numbers of the values that it reads; -1 for an input that is left out."""
    at: Position
    """Where it is.  So `at.parameters` is the index of a parameter, and the lifted numbers begin at `at.floats`."""

    def __str__(self) -> str:
        """Its name, inputs, constants and results: ``"sum.dim_IntList(%4, dim=[0]) -> float32[3]"``."""
        return self.text("%{}".format, sys.maxsize)

    def text(self, value: Callable[[int], str], most: int) -> str:
        """The same with `value` of each input's number; of more than `most` inputs, or results, only the first."""
        instruction = self.instruction
        outs = ", ".join(_first(most, map(str, instruction.outs)))
        if self.is_parameter:
            return f"input {outs}"
        inputs = _first(most, ("None" if number < 0 else value(number) for number in self.inputs))
        constants = [f"{name}={value!r}" for name, value in instruction.constants.items()]
        data = [f"{instruction.ints} integers as data"] if instruction.ints else []
        return f"{instruction.name}({', '.join(inputs + constants + data)}) -> {outs}"

    @property
    def is_parameter(self) -> bool:
        """Whether it reads an input of the program."""
        return self.instruction.emit is None

    @property
    def first(self) -> int:
        """Number of its first result."""
        return self.at.values

    @property
    def results(self) -> range:
        """Numbers of its results."""
        return range(self.at.values, self.at.values + len(self.instruction.outs))

    @property
    def floats(self) -> slice:
        """Where its lifted floats are among those of the trace."""
        return slice(self.at.floats, self.at.floats + self.instruction.floats)

    @property
    def ints(self) -> slice:
        """Where its lifted ints are among those of the trace."""
        return slice(self.at.ints, self.at.ints + self.instruction.ints)


def nodes(code: Sequence[int], begin: Position = BEGIN) -> Iterator[Node]:
    """The operations of `code`, which is in its trace from `begin` on."""
    position, shift = 0, begin.code
    _, values, parameters, floats, ints = begin
    while position < len(code):
        instruction = instruction_of(code[position])
        inputs = position + (3 if instruction.random else 1)
        end = inputs + instruction.inputs
        at = Position(shift + position, values, parameters, floats, ints)
        yield Node(instruction, code[position + 1 : inputs], code[inputs:end], at)
        values += len(instruction.outs)
        parameters += instruction.emit is None
        floats += instruction.floats
        ints += instruction.ints
        position = end


def _first(most: int, texts: Iterable[str]) -> list[str]:
    shown = list(texts)
    return shown if len(shown) <= most else [*shown[:most], f"{len(shown) - most} more"]


class Tape:
    """The operations of a trace, or of a part of one.

    Args:
        code: of that part.
        begin: where it is in the trace.
    """

    def __init__(self, code: Sequence[int], begin: Position = BEGIN) -> None:
        self.code, self.begin = code, begin
        self.nodes = list(nodes(code, begin))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def split(self, at: Position) -> tuple[Tape, Tape]:
        """The parts before and after a position."""
        index = at.code - self.begin.code
        return Tape(self.code[:index], self.begin), Tape(self.code[index:], at)

    def specs(self) -> list[Spec | None]:
        """The spec of each value, in the order of their numbers, which begin at `begin.values`."""
        return [out for node in self.nodes for out in node.instruction.outs]

    def earlier(self) -> list[int]:
        """Numbers of the values from before this part that it reads, in the order of their first reads."""
        read = itertools.chain.from_iterable(node.inputs for node in self.nodes)
        return list(dict.fromkeys(number for number in read if 0 <= number < self.begin.values))

    def renumbered(self, rename: Callable[[int], int]) -> list[int]:
        """The code with other numbers of the values that are read."""
        code: list[int] = []
        for node in self.nodes:
            code += [node.instruction.id, *node.draw, *(n if n < 0 else rename(n) for n in node.inputs)]
        return code
