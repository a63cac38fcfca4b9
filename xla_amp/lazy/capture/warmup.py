"""Restore training state after trial calls of a step: Python objects, device buffers, and the random state."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import jax

from xla_amp.backends.step_state import StepState
from xla_amp.lazy.capture.guards import Guards
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import Program


@contextlib.contextmanager
def restored_state(guards: Guards) -> Iterator[None]:
    """Restores gradients, optimizers, scalers, tensors and the random state after trial calls of a step.

    Args:
        guards: of the step.
    """
    execute.flush()
    copies, outer = _InputCopies(), execute.observer
    state = StepState([*guards.optimizers, *guards.scalers], guards.parameters)
    execute.observer = copies
    try:
        yield
        execute.flush()
    finally:
        execute.observer = outer
        copies.restore()
        state.restore()


class _InputCopies:
    """An observer that copies the inputs that programs overwrite, since donation needs the originals."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Buffer], jax.Array]] = {}

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Copies parameters that get a new value, when they first do."""
        for parameter, number in zip(parameters, trace.parameter_numbers, strict=True):
            if parameter.number != number and isinstance(parameter.array, jax.Array):
                reference, _ = self._values.get(id(parameter), (None, None))
                if reference is None or reference() is not parameter:  # a new buffer may have a freed one's address
                    self._values[id(parameter)] = weakref.ref(parameter), parameter.array.copy()

    def after(self, program: Program, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Does nothing: results are overwritten in the end."""

    def restore(self) -> None:
        """Gives each buffer that exists its copy."""
        for reference, array in self._values.values():
            if (buffer := reference()) is not None:
                buffer.array, buffer.number = array, -1
