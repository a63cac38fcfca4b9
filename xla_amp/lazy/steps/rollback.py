"""Snapshot tensors and restore them on a device condition, so that any optimizer can skip a step.

A conditional would make the host or the device wait; old values are still in the trace, so a select costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from xla_amp.lazy.graph.trace import Buffer, Instruction, Spec, add_parameter, instruction_cache, record, trace
from xla_amp.lazy.tensors import tensor_io


class Snapshot:
    """Values of tensors at one moment; copies nothing until a flush makes them separate arrays."""

    __slots__ = ("_buffers", "_tensors")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        with trace.lock:
            self._tensors = list(tensors)
            """Keeps the tensors alive, so that their ids are not reused."""
            self._buffers: dict[int, Buffer] = {}
            for tensor in self._tensors:
                number, value_spec = tensor_io.read(tensor)
                self._buffers[id(tensor)] = buffer = Buffer(value_spec, number)
                trace.computed.append(weakref.ref(buffer))

    def number(self, tensor: torch.Tensor) -> int:
        """Number of the tensor's old value in the present trace, or -1 if the snapshot lacks it."""
        buffer = self._buffers.get(id(tensor))
        if buffer is None:
            return -1
        if buffer.number < 0:
            return add_parameter(buffer)
        return buffer.number


def snapshot(tensors: Iterable[torch.Tensor]) -> Snapshot:
    """Takes a snapshot of `tensors` (lazy device) for `restore_where`."""
    return Snapshot(tensors)


_selects = instruction_cache()


def restore_where(condition: torch.Tensor, tensors: Sequence[torch.Tensor], before: Snapshot) -> None:
    """Restores every tensor to its value in `before` if `condition` (a scalar) is not zero.

    Tensors that are not in the snapshot, such as new optimizer state, become zero.  Records one operation for all
    tensors; nothing is read back to the host.
    """
    if not tensors:
        return
    with trace.lock:
        flag, flag_spec = tensor_io.read(condition)
        now = [tensor_io.read(tensor) for tensor in tensors]
        old = [before.number(tensor) for tensor in tensors]
        specs = tuple(value_spec for _, value_spec in now)
        known = tuple(number >= 0 for number in old)
        key = (flag_spec, specs, known)
        instruction = _selects.get(key)
        if instruction is None:
            instruction = _selects[key] = _instruction(specs)
        first = record(instruction, flag, *(number for number, _ in now), *old)
        for offset, tensor in enumerate(tensors):
            tensor_io.write(tensor, first + offset)


def _instruction(specs: tuple[Spec, ...]) -> Instruction:
    count = len(specs)

    def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
        flag, *values = inputs
        keep = flag.reshape(()) != 0
        return [
            jnp.where(keep, jnp.zeros_like(new) if old is None else old, new)
            for new, old in zip(values[:count], values[count:], strict=True)
        ]

    return Instruction("restore_where", emit, specs, 1 + 2 * count)
