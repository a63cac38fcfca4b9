"""Evaluate values on the host from copies of uploaded tensors, without ending the step.

Programs ask about their inputs: "is this padding mask all ones?", "which labels are not ignored?".  The host keeps
copies of uploaded integers, booleans and single numbers, so a value that depends on them only is computed there.  The
trace does not change and Python does not wait for the device; ``metrics.host_values`` counts these values.

What was computed here stays known: a loop that asks about its state each time (``unfinished.max() == 0``) computes only
what is new, also after the step has ended.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from xla_amp.lazy import private_api
from xla_amp.lazy.dtypes import copies, to_torch
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Instruction, trace
from xla_amp.lazy.programs import execute, mesh, program_cache, recompile_reasons
from xla_amp.lazy.programs.compile import Key, build
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io

MOST_OPERATIONS = 64
"""Longer computations run on the device."""
MOST_ELEMENTS = 1 << 22
"""So do those with larger intermediate values."""

_FAR = 256
"""Count of values in the trace after which a float is probably a loss, so it is not evaluated here."""

_BY_NUMPY: dict[tuple[str, Any], Callable[..., Any]] = {
    ("_to_copy", torch.bool): np.asarray,
    ("all", torch.bool): np.all,
    ("any", torch.bool): np.any,
    ("sum", torch.int64): np.sum,
    ("eq.Scalar", torch.bool): np.equal,
    ("gt.Scalar", torch.bool): np.greater,
}
"""(operation, dtype of its result) that need no program: questions about padding masks, which have many lengths."""

_programs = program_cache.new_cache()


class _HostNode(NamedTuple):
    instruction: Instruction
    first: int
    """Number of its first result."""
    inputs: tuple[int, ...]
    array: np.ndarray | None
    """The value, if the host has it: of an upload, or computed earlier."""
    floats: tuple[float, ...]
    ints: tuple[int, ...]


def value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the lazy device as a CPU tensor, or None if it depends on the device."""
    host = _host()
    if host is None or execute.flush_begins.listeners or mesh.active is not None:
        return None  # an observed step must count this as a read
    with trace.lock:
        buffer = tensor_io.buffer_of(tensor)
        if buffer.number < 0:
            result = copy_of(tensor)
        elif buffer.number > _FAR and tensor.is_floating_point():
            result = None
        elif trace.known or any(id(parameter.array) in copies for parameter in trace.parameters):
            number, value_spec = tensor_io.read(tensor)
            if number not in trace.known and (chosen := _needed(number)) is not None:
                trace.known.update(_evaluate(chosen, number, host))
            known = trace.known.get(number)
            result = None if known is None else to_torch(known.copy()).view(value_spec.shape)
        else:
            result = None
    if result is not None:
        metrics.host_values += 1
    return result


def copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of `tensor` from the host's copy of an upload, or None."""
    buffer = tensor_io.buffer_of(tensor)
    if (found := copies.get(id(buffer.array))) is None:
        return None
    with trace.lock:
        number, numbers = buffer.number, trace.parameter_numbers
        if number >= 0:  # the trace has read it; its array is the value until the trace writes it
            position = bisect.bisect_left(numbers, number)
            if position == len(numbers) or numbers[position] != number:
                return None
        found = copies.get(id(buffer.array))
    # What a program computed is read-only, which torch warns of.
    return None if found is None else tensor_io.window(to_torch(np.require(found[1], requirements="W")), tensor)


def _needed(number: int) -> list[_HostNode] | None:
    """The part of the trace that computes value `number`, or None if it needs a value that is not on the host."""
    producers: dict[int, _HostNode] = {}
    for node in nodes(trace.code):
        array = None
        if node.is_parameter:
            found = copies.get(id(trace.parameters[node.at.parameters].array))
            array = None if found is None else found[1]
            host = found is not None
        else:
            host = not node.draw and all(i < 0 or i in producers for i in node.inputs)
        if host:
            numbers = tuple(trace.floats[node.floats]), tuple(trace.ints[node.ints])
            on_host = _HostNode(node.instruction, node.first, tuple(node.inputs), array, *numbers)
            producers |= dict.fromkeys(node.results, on_host)
        for result, value_spec in enumerate(node.instruction.outs, node.first):
            if value_spec is not None and result in trace.known:
                producers[result] = _HostNode(value_spec.parameter, result, (), trace.known[result], (), ())
    if number not in producers:
        return None
    needed: dict[int, _HostNode] = {}
    todo = [number]
    while todo:
        on_host = producers[todo.pop()]
        if on_host.first not in needed:
            needed[on_host.first] = on_host
            todo.extend(i for i in on_host.inputs if i >= 0)
    chosen = [needed[first] for first in sorted(needed)]
    elements = sum(out.size for node in chosen for out in node.instruction.outs if out is not None)
    return chosen if len(chosen) <= MOST_OPERATIONS and elements <= MOST_ELEMENTS else None


def _by_numpy(chosen: list[_HostNode]) -> np.ndarray | None:
    """The value of the last node, or None if that needs a program."""
    values: dict[int, np.ndarray] = {}
    for node in chosen:
        found, name, result = node.array, node.instruction.name, node.instruction.outs[0]
        if found is None:
            compute = None if result is None else _BY_NUMPY.get((name, result.dtype))
            given = values[node.inputs[0]].dtype if compute is not None else None
            exact = given == np.bool_ if name == "sum" else given == np.int64 and len(node.ints) == 1
            if compute is None or not (exact or name in ("_to_copy", "all", "any")):
                return None
            kind = np.int64 if name == "sum" else np.bool_
            found = np.asarray(compute(values[node.inputs[0]], *node.ints), kind)
        values[node.first] = found
    return found


def _evaluate(chosen: list[_HostNode], number: int, host: jax.Device) -> dict[int, np.ndarray]:
    """Value `number`, and those that tensors have and that are computed on the way, by number."""
    if (found := _by_numpy(chosen)) is not None:
        return {number: found}
    renumbered: dict[int, int] = {-1: -1}
    code: list[int] = []
    parameter_numbers: list[int] = []
    parameter_specs: list[Any] = []
    arrays: list[np.ndarray] = []
    floats: list[float] = []
    ints: list[int] = []
    count = 0
    for node in chosen:
        for position in range(len(node.instruction.outs)):
            renumbered[node.first + position] = count + position
        if node.array is not None:
            parameter_numbers.append(count)
            parameter_specs += node.instruction.outs
            arrays.append(node.array)
        code += [node.instruction.id, *(renumbered[i] for i in node.inputs)]
        floats += node.floats
        ints += node.ints
        count += len(node.instruction.outs)
    held = {*trace.numbers(), *(buffer.at for buffer in trace.results())}.intersection(renumbered)
    wanted = sorted(held.difference(node.first for node in chosen if node.array is not None) | {number})
    key = Key(code=tuple(code), wanted=tuple(renumbered[n] for n in wanted), spent=())
    with private_api.x64(), jax.default_device(host):
        program = _programs.get(key)
        is_new = program is None
        if program is None:
            program = build(key, parameter_numbers, parameter_specs, (len(floats), len(ints)), 0, "cpu")
            metrics.compilations += 1
        outputs = program.jitted([], arrays, np.array(floats, np.float64), np.array(ints, np.int64))
        program_cache.touch(program)
        if is_new:
            program_cache.add(_programs, key, program)
            recompile_reasons.compiled(program)
    return {n: np.asarray(outputs[position]) for n, position in zip(wanted, program.outputs, strict=True)}


@functools.cache
def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS does not name the CPU
        return None
