"""A graph of torch operations that runs once per geometry of its inputs; later calls append what it recorded.

Running the graph dispatches every operation to a kernel, which appends a few integers to the trace.  The same inputs
give the same integers, except for the numbers of values.  So a later call copies them with new numbers: one NumPy
operation for the whole graph, and a program that is the same as if every operation had been called.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from xla_amp.lazy import private_api
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.tape import Position, Tape
from xla_amp.lazy.graph.trace import Instruction, add_parameter, instructions, trace
from xla_amp.lazy.steps.loops import flush_if_full
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_MOST = 64
"""Recordings of a graph that are kept: one for each combination of its inputs' geometries."""


def recorded(graph: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A function with the arguments and results of a graph, for AOTAutograd.

    `graph` is functional: it depends on its arguments only.
    """
    recordings: dict[Hashable, _Recording | None] = {}
    """By what shapes the recording; None if the operations cannot be copied."""

    def run(*values: Any) -> Sequence[Any]:
        with trace.lock:
            flush_if_full()
            inputs = _Inputs.read(values)
            if inputs is None:
                return graph(*values)
            if inputs.key in recordings:
                recording = recordings[inputs.key]
                return graph(*values) if recording is None else recording.append(inputs, values)
            while len(recordings) >= _MOST:
                del recordings[next(iter(recordings))]
            results, recordings[inputs.key] = _record(graph, inputs, values)
            return results

    return run


def _buffer(value: Any) -> Buffer | None:
    """The buffer of a tensor on the device that kernels read by its geometry alone."""
    if not isinstance(value, torch.Tensor) or value.device.type != DEVICE_TYPE or type(value) not in tensor_io.PLAIN:
        return None
    if value.is_complex() or value.is_neg():  # their values depend on a conjugation bit, too
        return None
    return tensor_io.buffer_of(value)


_Geometry = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]
"""dtype, offset, shape and strides."""


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The arguments of a call."""

    buffers: list[Buffer]
    """The different buffers of the tensors."""
    key: Hashable
    """What shapes the recording: geometries, which tensors share a buffer, integers."""

    @classmethod
    def read(cls, values: Sequence[Any]) -> _Inputs | None:
        """The arguments, or None if one of them is neither a tensor of the device nor an integer."""
        buffers: list[Buffer] = []
        positions: dict[int, int] = {}
        key: list[Hashable] = []
        for value in values:
            if value is None or isinstance(value, int):
                key.append((type(value), value))
                continue
            buffer = _buffer(value)
            if buffer is None:
                return None
            position = positions.setdefault(id(buffer), len(buffers))
            if position == len(buffers):
                buffers.append(buffer)
            key.append((position, buffer.spec, _geometry(value)))
        return cls(buffers=buffers, key=tuple(key))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ResultPlace:
    """How a result is made: a window of a new buffer or of an argument's."""

    storage: int
    """Index of a new buffer, or ``~position`` of an argument."""
    geometry: _Geometry


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Recording:
    """What a graph appended to the trace.

    Numbers of values are relative: inputs come first, then constants, then what was computed.
    """

    code: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    """Positions in `code` of the numbers of values."""
    streams: np.ndarray[Any, Any]
    """Positions in `code` of the random operations' stream, which an index of a draw follows."""
    computed: int
    """Count of computed values."""
    constants: tuple[Buffer, ...]
    """Buffers that the graph read beside its arguments."""
    floats: tuple[float, ...]
    ints: tuple[int, ...]
    draws: int
    instructions: dict[int, Instruction]
    buffers: tuple[tuple[Any, int], ...]
    """(spec, relative number) of each new buffer."""
    results: tuple[Any, ...]

    def append(self, inputs: _Inputs, values: Sequence[Any]) -> list[Any]:
        """Records the graph for other arguments of the same key; the caller holds the trace's lock."""
        numbers = [
            buffer.number if buffer.number >= 0 else add_parameter(buffer)
            for buffer in (*inputs.buffers, *self.constants)
        ]
        first = trace.count
        table = np.array([-1, *numbers, *range(first, first + self.computed)], np.int64)
        code = self.code.copy()
        code[self.values] = table[code[self.values] + 1]
        code[self.streams] = trace.stream
        code[self.streams + 1] += trace.draws
        instructions.update(self.instructions)
        trace.code.extend(code.tolist())
        trace.count = first + self.computed
        trace.floats.extend(self.floats)
        trace.ints.extend(self.ints)
        trace.draws += self.draws
        stores = []
        for value_spec, number in self.buffers:
            stores.append(tensor_io.new_tensor(value_spec, int(table[number + 1])))
        return [
            _made(result, stores, values) if isinstance(result, _ResultPlace) else result for result in self.results
        ]


def _made(result: _ResultPlace, stores: Sequence[torch.Tensor], values: Sequence[Any]) -> torch.Tensor:
    whole = stores[result.storage] if result.storage >= 0 else values[~result.storage]
    if result.storage >= 0 and result.geometry == _geometry(whole):
        return whole
    dtype, offset, shape, strides = result.geometry
    return tensor_io.set_geometry(
        private_api.create_tensor((0,), dtype), whole.untyped_storage(), offset, shape, strides
    )


def _record(
    graph: Callable[..., Sequence[Any]], inputs: _Inputs, values: Sequence[Any]
) -> tuple[Sequence[Any], _Recording | None]:
    """Runs the graph; also returns what it recorded, if that is all that it did."""
    numbers = [buffer.number if buffer.number >= 0 else add_parameter(buffer) for buffer in inputs.buffers]
    begin, draws = Position.now(), trace.draws
    before = (trace.generation, trace.stream, len(trace.streams), len(trace.generators))
    limit, trace.limit = trace.limit, sys.maxsize
    try:
        results = graph(*values)
    finally:
        if trace.generation == before[0]:
            trace.limit = limit
    after = (trace.generation, trace.stream, len(trace.streams), len(trace.generators))
    if after != before or [buffer.number for buffer in inputs.buffers] != numbers:
        return results, None  # it read a value, changed the random state, or overwrote an argument
    known = {number: index for index, number in enumerate(numbers)}
    constants: list[Buffer] = []
    elsewhere = {buffer.number: buffer for buffer in trace.buffers()}
    relative: dict[int, int] = {-1: -1}
    flat: list[int] = []
    positions: list[int] = []
    streams: list[int] = []
    used: dict[int, Instruction] = {}
    tape = Tape.since(begin)
    for node in tape:
        if node.is_parameter:
            known[node.first] = len(numbers) + len(constants)
            constants.append(trace.parameters[node.at.parameters])
    for number in tape.earlier():
        if number not in known:
            if number not in elsewhere:
                return results, None
            known[number] = len(numbers) + len(constants)
            constants.append(elsewhere[number])
    count = len(numbers) + len(constants)
    relative |= known
    computed = 0
    for node in tape:
        if node.is_parameter:
            continue
        used[node.instruction.id] = node.instruction
        flat.append(node.instruction.id)
        if node.draw:
            streams.append(len(flat))
            flat += [0, node.draw[1] - draws]
        positions += range(len(flat), len(flat) + len(node.inputs))
        flat += [relative[number] for number in node.inputs]
        for number in node.results:
            relative[number] = count + computed
            computed += 1
    made = _results(results, inputs, values, relative)
    if made is None:
        return results, None
    return results, _Recording(
        code=np.array(flat, np.int64),
        values=np.array(positions, np.int64),
        streams=np.array(streams, np.int64),
        computed=computed,
        constants=tuple(constants),
        floats=tuple(trace.floats[begin.floats :]),
        ints=tuple(trace.ints[begin.ints :]),
        draws=trace.draws - draws,
        instructions=used,
        buffers=made[1],
        results=made[0],
    )


def _results(
    results: Sequence[Any], inputs: _Inputs, values: Sequence[Any], relative: dict[int, int]
) -> tuple[tuple[Any, ...], tuple[tuple[Any, int], ...]] | None:
    """How to make the results again, and the new buffers; None if one is not a value of the trace."""
    given = {id(buffer): ~index for index, value in reversed([*enumerate(values)]) if (buffer := _buffer(value))}
    made: list[Any] = []
    buffers: list[tuple[Any, int]] = []
    for result in results:
        if result is None or isinstance(result, int):
            made.append(result)
            continue
        buffer = _buffer(result)
        if buffer is None:
            return None
        storage = given.get(id(buffer))
        if storage is None:
            if buffer.number not in relative or buffer.number < 0:
                return None
            storage = given[id(buffer)] = len(buffers)
            buffers.append((buffer.spec, relative[buffer.number]))
        made.append(_ResultPlace(storage=storage, geometry=_geometry(result)))
    return tuple(made), tuple(buffers)
