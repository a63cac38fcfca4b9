"""Select between old and new values of tensors on a device condition, so that any optimizer can skip a step.

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


def snapshot(tensors: Iterable[torch.Tensor]) -> list[Buffer]:
    """The values that `tensors` (lazy device) have now; copies nothing until a flush makes them separate arrays."""
    with trace.lock:
        values = [Buffer(value_spec, number) for number, value_spec in map(tensor_io.read, tensors)]
        trace.computed.extend(map(weakref.ref, values))
    return values


_selects = instruction_cache()


def select(found_inf: torch.Tensor, new: Sequence[torch.Tensor], old: Sequence[Buffer]) -> None:
    """Gives the tensors `new` their values in `old`, a snapshot of as many, if `found_inf` (a scalar) is not zero.

    Records one operation for all of them; nothing is read back to the host.
    """
    if not new:
        return
    with trace.lock:
        flag, flag_spec = tensor_io.read(found_inf)
        now = [tensor_io.read(tensor) for tensor in new]
        before = [add_parameter(buffer) if buffer.number < 0 else buffer.number for buffer in old]
        key = flag_spec, *(value_spec for _, value_spec in now)
        instruction = _selects.get(key)
        if instruction is None:
            instruction = _selects[key] = _instruction(key[1:])
        first = record(instruction, flag, *(number for number, _ in now), *before)
        for offset, tensor in enumerate(new):
            tensor_io.write(tensor, first + offset)


def _instruction(specs: tuple[Spec, ...]) -> Instruction:
    count = len(specs)

    def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
        flag, *values = inputs
        keep = flag.reshape(()) != 0
        return [jnp.where(keep, old, new) for new, old in zip(values[:count], values[count:], strict=True)]

    return Instruction("select", emit, specs, 1 + 2 * count)
