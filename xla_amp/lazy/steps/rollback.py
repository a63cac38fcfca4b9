"""Undo on the device what a block wrote to tensors, so that any optimizer can skip a step.

A conditional would make the host or the device wait; old values are still in the trace, so a select costs nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from xla_amp.lazy.graph.trace import (
    Buffer,
    Instruction,
    Poisoned,
    Spec,
    add_parameter,
    instruction_cache,
    record,
    trace,
)
from xla_amp.lazy.programs import execute
from xla_amp.lazy.tensors import tensor_io

_Reference = weakref.ref[Buffer]


@contextlib.contextmanager
def guard(tensors: Callable[[], Iterable[torch.Tensor]] = tuple) -> Iterator[Guard]:
    """Context manager with the `Guard` of its block, whose writes are recorded: `tensors` is for other engines."""
    made = Guard()
    try:
        with execute.flush_nears.subscribed(made.keep):
            yield made
    finally:
        with trace.lock:
            trace.guards.remove(made)


def spare(*tensors: torch.Tensor) -> None:
    """Lets the guards that are open not undo what is written to `tensors`, such as statistics of the step."""
    with trace.lock:
        guards = trace.guards
    for each in guards:
        each.spared.update(weakref.ref(tensor_io.buffer_of(tensor)) for tensor in tensors)


class Guard:
    """The values that buffers had when a block began, for all that the block writes to."""

    def __init__(self) -> None:
        self._kept: dict[_Reference, Buffer] = {}
        """A written buffer -> its old value, from before a program that ran in the block."""
        self.spared: set[_Reference] = set()
        """Buffers whose writes stay."""
        self._begin()

    def _begin(self) -> None:
        with trace.lock:
            trace.guards.append(self)
            self._reads = trace.reads
            self._numbers = {weakref.ref(buffer): buffer.at for buffer in trace.results()}
            self._parameters = trace.numbers()
            self._computed = len(trace.computed)

    def keep(self) -> None:
        """Before a program runs in the block: the old values become results of it."""
        for buffer, number in list(self._written()):
            self._kept[weakref.ref(buffer)] = old = _at(buffer.spec, number)
            trace.computed.append(weakref.ref(old))
        self._numbers, self._parameters, self._computed = {}, [], 0

    def _written(self) -> Iterator[tuple[Buffer, int]]:
        """Buffers older than the block that it has written to since the last program, and their old numbers."""
        begun = len(self._parameters)
        numbers = [*self._parameters, *trace.parameter_numbers[begun:]]
        later = trace.computed[self._computed :]
        older = [(buffer, buffer.number, was) for ref, was in self._numbers.items() if (buffer := ref()) is not None]
        for buffer, now, was in (*older, *zip(trace.parameters, trace.numbers(), numbers, strict=True)):
            if now != was and not self._is_kept(buffer):
                yield buffer, was
        for buffer in [reference() for reference in later]:
            if buffer is None or buffer.array is None or type(buffer.array) is Poisoned or self._is_kept(buffer):
                continue
            if weakref.ref(buffer) not in self._numbers:  # overwritten as a whole, its array was not read
                yield buffer, add_parameter(Buffer(buffer.spec, array=buffer.array))

    def _is_kept(self, buffer: Buffer) -> bool:
        return weakref.ref(buffer) in self._kept or weakref.ref(buffer) in self.spared

    def waited(self) -> bool:
        """Whether the block has read a value on the host so far."""
        with trace.lock:
            return trace.reads != self._reads

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the block made the memory of a tensor on the device."""
        buffer = tensor_io.buffer_of(tensor)
        with trace.lock:
            return buffer.number >= 0 and buffer.array is None and weakref.ref(buffer) not in self._numbers

    def undo(self, found_inf: torch.Tensor, replaced: Sequence[tuple[torch.Tensor, torch.Tensor, Any]] = ()) -> None:
        """Undoes all writes to older buffers if `found_inf` (a scalar) is not zero.

        Records one operation for all of them; nothing is read back to the host.

        Args:
            found_inf: a scalar on the device.
            replaced: tensors that the block made instead of others, each with the other and the storage that it had:
                they get its old value.
        """
        with trace.lock:
            flag, flag_spec = tensor_io.read(found_inf)
            written = {
                id(buffer): (buffer, old.number if old.number >= 0 else add_parameter(old))
                for reference, old in self._kept.items()
                if (buffer := reference()) is not None and reference not in self.spared
            }
            written |= {id(buffer): (buffer, number) for buffer, number in self._written()}
            for buffer, _ in written.values():
                if buffer.number < 0:
                    add_parameter(buffer)
            now = [(buffer.number, buffer.spec) for buffer, _ in written.values()]
            before = [number for _, number in written.values()]
            for new, old, storage in replaced:
                buffer = storage._xla_amp
                number = written[id(buffer)][1] if id(buffer) in written else buffer.number
                before.append(tensor_io.read(old, buffer if number < 0 else _at(buffer.spec, number))[0])
                now.append(tensor_io.read(new))
            if not now:
                return
            specs = tuple(value_spec for _, value_spec in now)
            instruction = _selects.get((flag_spec, *specs))
            if instruction is None:
                instruction = _selects[flag_spec, *specs] = _instruction(specs)
            first = record(instruction, flag, *(number for number, _ in now), *before)
            for number, (buffer, _) in enumerate(written.values(), first):
                buffer.number = number
            for number, (new, _, _) in enumerate(replaced, first + len(written)):
                tensor_io.write(new, number)


def _at(spec: Spec, number: int) -> Buffer:
    return Buffer(spec, number, generation=trace.generation)


_selects = instruction_cache()


def _instruction(specs: tuple[Spec, ...]) -> Instruction:
    count = len(specs)

    def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
        flag, *values = inputs
        keep = flag.reshape(()) != 0
        return [jnp.where(keep, old, new) for new, old in zip(values[:count], values[count:], strict=True)]

    return Instruction("select", emit, specs, 1 + 2 * count)
