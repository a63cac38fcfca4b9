"""Trace torch code as pure functions of arrays, without running it.

Placeholders are the arguments.  The trace is read as one function, or as two: a forward part, and a backward part that
also takes the values of the forward part that it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from xla_amp.common.events import Place
from xla_amp.errors import EngineError
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.tape import Position, Tape, nodes
from xla_amp.lazy.graph.trace import Buffer, Poisoned, Spec, add_parameter, spec, trace
from xla_amp.lazy.interop.locations import Locations
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lazy.programs.compile import Key, XlaProgram, build
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.torch_integration import generator


class _Placeholder:
    """The value of a buffer that is an argument."""


def _refuse_flush(parameters: list[Buffer], held: list[bool]) -> None:
    raise EngineError(
        "torch code called from JAX looked at a value (item(), bool(), a mask as an index, print or sync), but "
        "there are no values while JAX traces; compute it with torch operations, or call the module outside of JAX"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PureFunction:
    """A trace, or a part of one, as a function of arrays."""

    program: XlaProgram
    arguments: tuple[int, ...]
    """Per parameter of the program: its index among the arguments, or ``~index`` among `constants`."""
    constants: tuple[jax.Array, ...]
    floats: np.ndarray[Any, Any]
    ints: np.ndarray[Any, Any]
    streams: np.ndarray[Any, Any]
    """Offsets of the random streams, each a (seed, offset) pair relative to that of the first one."""
    draws: bool
    """Whether anything is random."""

    def __call__(self, values: Sequence[Any], words: Any = None) -> list[Any]:
        """The wanted values; `words` are seed and offset of random draws (64-bit types must be on)."""
        parameters = [values[index] if index >= 0 else self.constants[~index] for index in self.arguments]
        # JAX lowers the creation of a key later, when 64-bit types are off again: a seed must not need them.
        small = self.draws and bool(np.all(abs(self.ints) < 2**31))
        integer = np.int32 if small else np.int64
        streams = [_scalar(word, integer) for word in self.streams.reshape(-1)]
        if words is not None:
            streams = [word + words[index % 2].astype(integer) for index, word in enumerate(streams)]
        ints = _vector([*streams, *(_scalar(value, integer) for value in self.ints)], integer)
        floats = _vector([_scalar(value, np.float64) for value in self.floats], np.float64)
        program = self.program
        outputs = program.nested([], [parameters[index] for index in program.kept], floats, ints)
        return [outputs[index] if index >= 0 else parameters[~index] for index in program.outputs]


def _scalar(value: Any, dtype: Any) -> jax.Array:
    return jax.lax.full((), value, dtype)


def _vector(values: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Numbers as data of a program.  A NumPy array would be a constant that transformations carry along."""
    return jax.numpy.stack(values) if values else jax.lax.full((0,), 0, dtype)


class FunctionTrace:
    """Context manager: operations inside are recorded and then dropped, unless `whole` or `halves` reads them.

    Earlier operations run first.  Tensors made inside must not be used outside.  Only one thread may record.

    Raises:
        EngineError: on a flush inside.
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._split: Position | None = None
        self._locations = Locations()

    def __enter__(self) -> FunctionTrace:
        with jax.ensure_compile_time_eval():  # earlier operations are not part of what JAX traces
            execute.flush()
        self._state = generator.state()
        execute.flush_begins.subscribe(_refuse_flush)
        self._paused = step_marker.paused()
        self._paused.__enter__()
        self._limit, trace.limit = trace.limit, sys.maxsize
        self._locations.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._locations.__exit__(*_)
        execute.flush_begins.unsubscribe(_refuse_flush)
        self._paused.__exit__(None, None, None)
        with trace.lock:
            trace.limit = self._limit
            for reference in trace.computed:
                buffer = reference()
                if buffer is not None and buffer.number >= 0:
                    buffer.number = -1
                    if buffer.array is None:
                        buffer.store(
                            Poisoned("it was computed by torch code called from JAX, which returns its results")
                        )
            for buffer in trace.parameters:
                buffer.number = -1
            for buffer in self._buffers:
                buffer.store(Poisoned("it was a placeholder for an argument of torch code called from JAX"))
            trace.clear()
            generator.set_state(*self._state)

    def argument(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A placeholder tensor for the next argument."""
        value_spec = spec(tuple(shape), dtype)
        tensor = private_api.create_tensor(value_spec.shape, value_spec.dtype)
        storage: Any = tensor.untyped_storage()
        storage._xla_amp = buffer = Buffer(value_spec, array=_Placeholder())  # type: ignore[arg-type]
        with trace.lock:
            add_parameter(buffer)
        self._buffers.append(buffer)
        return tensor

    def split(self) -> None:
        """Ends the forward part; placeholders made after this are arguments of the backward part."""
        self._split = Position.now()
        self._forward_arguments = len(self._buffers)

    def whole(self, wanted: Sequence[torch.Tensor]) -> PureFunction:
        """The trace as a function from the arguments to the values of `wanted`."""
        numbers = _numbers(wanted)
        code, places = list(trace.code), self._locations.of(trace.code)
        return _pure_function([], code, places, numbers, trace.parameters, trace.floats, trace.ints, self._buffers)

    def halves(self, results: Sequence[int], wanted: Sequence[torch.Tensor]) -> tuple[PureFunction, PureFunction]:
        """The two parts.

        Args:
            results: numbers of the forward part's results (`numbers`).
            wanted: results of the backward part.

        Returns:
            A function from the first arguments to the results followed by the saved values; and a function from the
            saved values and the arguments made after `split` to `wanted`.
        """
        numbers = _numbers(wanted)
        at = self._split
        if at is None:
            raise EngineError("FunctionTrace.halves() before split()")
        first, second = Tape(trace.code).split(at)
        read = [*second.earlier(), *(number for number in numbers if 0 <= number < at.values)]
        saved = {number: index for index, number in enumerate(dict.fromkeys(read))}
        specs = first.specs()
        forward = _pure_function(
            [],
            first.code,
            self._locations.of(first.code),
            [*results, *saved],
            trace.parameters[: at.parameters],
            trace.floats[: at.floats],
            trace.ints[: at.ints],
            self._buffers[: self._forward_arguments],
        )

        def renumbered(number: int) -> int:
            return saved[number] if number < at.values else number - at.values + len(saved)

        code = second.renumbered(renumbered)
        before = [Buffer(specs[number]) for number in saved]  # type: ignore[arg-type]
        backward = _pure_function(
            before,
            code,
            self._locations.of(code, at.code),
            [renumbered(number) for number in numbers],
            trace.parameters[at.parameters :],
            trace.floats[at.floats :],
            trace.ints[at.ints :],
            self._buffers[self._forward_arguments :],
        )
        return forward, backward

    def numbers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Numbers of the tensors' current values in the trace."""
        return _numbers(tensors)


def _numbers(tensors: Sequence[torch.Tensor]) -> list[int]:
    with trace.lock:
        return [tensor_io.read(tensor)[0] for tensor in tensors]


def _pure_function(
    before: Sequence[Buffer],
    code: Sequence[int],
    places: tuple[Place | None, ...],
    wanted: Sequence[int],
    parameters: Sequence[Buffer],
    floats: Sequence[float],
    ints: Sequence[int],
    arguments: Sequence[Buffer],
) -> PureFunction:
    full = (*(buffer.spec.parameter.id for buffer in before), *code)
    index = {id(buffer): index for index, buffer in enumerate((*before, *arguments))}
    indices: list[int] = []
    constants: list[Any] = []
    for buffer in (*before, *parameters):
        found = index.get(id(buffer))
        if found is None:
            found = ~len(constants)
            constants.append(buffer.array)
        indices.append(found)
    if trace.generators:
        raise EngineError(
            "a function called from JAX cannot draw from a torch.Generator, whose state would not advance with its "
            "calls: leave `generator` out, so that the function's key decides"
        )
    streams = np.array(trace.streams or [generator.stream()], np.int64)
    program = _program(
        full,
        (*(None for _ in before), *places),
        tuple(wanted),
        tuple(buffer.spec for buffer in (*before, *parameters)),
        len(floats),
        len(ints),
        len(streams),
    )
    return PureFunction(
        program=program,
        arguments=tuple(indices),
        constants=tuple(constants),
        floats=np.array(floats, np.float64),
        ints=np.array(ints, np.int64),
        streams=streams - streams[0],
        draws=any(node.instruction.random for node in nodes(full)),
    )


@functools.lru_cache(maxsize=256)
def _program(
    code: tuple[int, ...],
    places: tuple[Place | None, ...],
    wanted: tuple[int, ...],
    specs: tuple[Spec, ...],
    floats: int,
    ints: int,
    streams: int,
) -> XlaProgram:
    key = Key(code=code, wanted=wanted, spent=())
    parameters = [node.first for node in nodes(code) if node.is_parameter]
    with private_api.x64():
        return build(key, parameters, specs, (floats, ints), streams, pjrt.platform(), places)
