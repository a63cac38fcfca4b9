"""Running programs for the sake of compiling them: afterwards every buffer has the value that it had."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import jax

from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.runtime import execute, generator
from xla_amp.lazy.runtime.compile import Program


class _Kept:
    """An observer that copies what the programs are about to overwrite (donation needs the original for itself)."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[weakref.ref[Buffer], jax.Array]] = {}

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        for parameter, number in zip(parameters, trace.parameter_numbers, strict=True):
            if parameter.number != number and isinstance(parameter.array, jax.Array):
                reference, _ = self.values.get(id(parameter), (None, None))
                if reference is None or reference() is not parameter:  # a new buffer may have a dead one's address
                    self.values[id(parameter)] = weakref.ref(parameter), parameter.array.copy()

    def after(self, program: Program, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Nothing: what a program gave is overwritten in the end."""


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, programs run; at the end every buffer from before, and the random state, are as at the beginning."""
    execute.cut()
    kept, outer, state = _Kept(), execute.observer, generator.state()
    execute.observer = kept
    try:
        yield
        execute.cut()
    finally:
        execute.observer = outer
        for reference, array in kept.values.values():
            if (buffer := reference()) is not None:
                buffer.array, buffer.number = array, -1
        generator.set_state(*state)
