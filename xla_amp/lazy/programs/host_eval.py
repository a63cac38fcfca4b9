"""Evaluate values of the trace on the host, from copies of what was uploaded, without ending the step.

Programs ask about their inputs: "is this padding mask all ones?", "which labels are not ignored?".  The host keeps
copies of uploaded integers, booleans and single numbers, so a value that depends on them only is computed there.  The
trace does not change and Python does not wait for the device.

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

from xla_amp.lazy.base import private_api
from xla_amp.lazy.base.dtypes import copies
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Instruction, trace
from xla_amp.lazy.programs import program_cache, recompile_reasons
from xla_amp.lazy.programs.compile import Key, build
from xla_amp.lazy.programs.metrics import metrics

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


def known(number: int) -> np.ndarray | None:
    """Value `number` of the trace, or None if it depends on the device; the caller holds the trace's lock."""
    if number not in trace.known and (chosen := _needed(number)) is not None:
        trace.known.update(_evaluate(chosen, number))
    return trace.known.get(number)


def may_know(buffer: Buffer, is_float: bool) -> bool:
    """Whether it is worth asking for the value that the trace computes for `buffer`."""
    if buffer.number > _FAR and is_float:
        return False
    return bool(trace.known) or any(id(parameter.array) in copies for parameter in trace.parameters)


def copy_of(buffer: Buffer) -> np.ndarray | None:
    """The host's copy of an upload that is the value of `buffer`, or None."""
    if copies.get(id(buffer.array)) is None:
        return None
    with trace.lock:
        number, numbers = buffer.number, trace.parameter_numbers
        if number >= 0:  # the trace has read it; its array is the value until the trace writes it
            position = bisect.bisect_left(numbers, number)
            if position == len(numbers) or numbers[position] != number:
                return None
        found = copies.get(id(buffer.array))
    return None if found is None else found[1]


def _needed(number: int) -> list[_HostNode] | None:
    """The part of the trace that computes value `number`, or None if it needs a value that is not on the host."""
    producers: dict[int, _HostNode] = {}
    for node in nodes(trace.code):
        array = None
        if node.is_parameter:
            found = copies.get(id(trace.parameters[node.at.parameters].array))
            array = None if found is None else found[1]
            uploaded = found is not None
        else:
            uploaded = not node.draw and all(i < 0 or i in producers for i in node.inputs)
        if uploaded:
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


def _evaluate(chosen: list[_HostNode], number: int) -> dict[int, np.ndarray]:
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
    with private_api.x64(), jax.default_device(host()):
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
def host() -> jax.Device | None:
    """JAX's CPU device; None if JAX_PLATFORMS leaves it out, and then nothing is known on the host."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
