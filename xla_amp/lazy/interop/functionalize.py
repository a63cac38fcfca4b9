"""Trace torch code as pure functions of arrays, without running it.

Placeholders are the arguments.  The trace is read as one function, or as two: a forward part, and a backward part that
also takes the values of the forward part that it needs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from xla_amp.common.events import Place
from xla_amp.errors import EngineError
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph.tape import BEGIN, Position, Tape
from xla_amp.lazy.graph.trace import Buffer, Poisoned, add_parameter, spec, trace
from xla_amp.lazy.interop.locations import Locations
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import Key
from xla_amp.lazy.programs.observed import Function, function_of
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import tensor_io, transfer


class _Placeholder:
    """The value of a buffer that is an argument."""


def _refuse_flush(run: execute.Run) -> None:
    raise EngineError(
        "torch code called from JAX looked at a value (item(), bool(), a mask as an index, print or sync), but "
        "there are no values while JAX traces; compute it with torch operations, or call the module outside of JAX"
    )


def evaluate(function: Function, values: Sequence[Any], words: Any = None) -> list[Any]:
    """The values of a function; `words` are seed and offset of random draws (64-bit types must be on)."""
    # JAX lowers the creation of a key later, when 64-bit types are off again: a seed must not need them.
    small = function.draws and bool(np.all(abs(function.ints) < 2**31))
    integer = np.int32 if small else np.int64
    streams = [_scalar(word, integer) for word in (function.streams - function.streams[0]).reshape(-1)]
    if words is not None and function.draws:
        streams = [word + words[index % 2].astype(integer) for index, word in enumerate(streams)]
    ints = _vector([*streams, *(_scalar(value, integer) for value in function.ints)], integer)
    return function(values, _vector([_scalar(value, np.float64) for value in function.floats], np.float64), ints)


def _scalar(value: Any, dtype: Any) -> jax.Array:
    return jax.lax.full((), value, dtype)


def _vector(values: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Numbers as data of a program.  A NumPy array would be a constant that transformations carry along."""
    return jax.numpy.stack(values) if values else jax.lax.full((0,), 0, dtype)


@contextlib.contextmanager
def tracing() -> Iterator[FunctionTrace]:
    """Context manager: operations inside are recorded and then dropped, unless `whole` or `halves` reads them.

    Earlier operations run first.  Tensors made inside must not be used outside.

    Raises:
        EngineError: on a flush inside.
    """
    with jax.ensure_compile_time_eval():  # earlier operations are not part of what JAX traces
        execute.flush()
    made = FunctionTrace()
    try:
        with execute.flush_begins.subscribed(_refuse_flush), step_marker.paused(), made.locations:
            with trace.lock:
                trace.limit = sys.maxsize
            yield made
    finally:
        made.drop()


class FunctionTrace:
    """What was recorded inside `tracing`."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._split = BEGIN
        self._state = generator.state()
        self.locations = Locations()

    def drop(self) -> None:
        """Empties the trace."""
        with trace.lock:
            for reference in trace.computed:
                buffer = reference()
                if buffer is not None and buffer.number >= 0 and buffer.array is None:
                    buffer.store(Poisoned("it was computed by torch code called from JAX, which returns its results"))
            for buffer in self._buffers:
                buffer.store(Poisoned("it was a placeholder for an argument of torch code called from JAX"))
            trace.clear()
            generator.set_state(*self._state)

    def argument(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A placeholder tensor for the next argument."""
        buffer = Buffer(spec(tuple(shape), dtype), array=_Placeholder())  # type: ignore[arg-type]
        with trace.lock:
            add_parameter(buffer)
        self._buffers.append(buffer)
        return transfer.tensor_over(buffer)

    def split(self) -> None:
        """Ends the forward part; placeholders made after this are arguments of the backward part."""
        self._split = Position.now()
        self._forward_arguments = len(self._buffers)

    def whole(self, wanted: Sequence[torch.Tensor]) -> Function:
        """The trace as a function from the arguments to the values of `wanted`."""
        with trace.lock:
            places = self.locations.of(trace.code)
            return _function([], trace.code, places, numbers_of(wanted), BEGIN, Position.now(), self._buffers)

    def halves(self, results: Sequence[int], wanted: Sequence[torch.Tensor]) -> tuple[Function, Function]:
        """The two parts.

        Args:
            results: numbers of the forward part's results (`numbers_of`).
            wanted: results of the backward part.

        Returns:
            A function from the first arguments to the results followed by the saved values; and a function from the
            saved values and the arguments made after `split` to `wanted`.
        """
        with trace.lock:
            return self._halves(results, numbers_of(wanted))

    def _halves(self, results: Sequence[int], numbers: Sequence[int]) -> tuple[Function, Function]:
        at = self._split
        first, second = Tape(trace.code).split(at)
        read = [*second.earlier(), *(number for number in numbers if 0 <= number < at.values)]
        saved = {number: index for index, number in enumerate(dict.fromkeys(read))}
        specs = first.specs()
        places = self.locations.of(first.code)
        arguments, others = self._buffers[: self._forward_arguments], self._buffers[self._forward_arguments :]
        forward = _function([], first.code, places, [*results, *saved], BEGIN, at, arguments)

        def renumbered(number: int) -> int:
            return saved[number] if number < at.values else number - at.values + len(saved)

        code = second.renumbered(renumbered)
        places, wanted_numbers = self.locations.of(code, at.code), [renumbered(number) for number in numbers]
        before = [Buffer(specs[number]) for number in saved]  # type: ignore[arg-type]
        return forward, _function(before, code, places, wanted_numbers, at, Position.now(), others)


def numbers_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the tensors' current values in the trace."""
    with trace.lock:
        return [tensor_io.read(tensor)[0] for tensor in tensors]


def _function(
    before: Sequence[Buffer],
    code: Sequence[int],
    places: tuple[Place | None, ...],
    wanted: Sequence[int],
    begin: Position,
    end: Position,
    arguments: Sequence[Buffer],
) -> Function:
    """The part of the trace between two positions; `before` are earlier values, the first arguments."""
    if trace.generators:
        raise EngineError(
            "a function called from JAX cannot draw from a torch.Generator, whose state would not advance with its "
            "calls: leave `generator` out, so that the function's key decides"
        )
    parameters = [*before, *trace.parameters[begin.parameters : end.parameters]]
    run = execute.Run(
        key=Key(code=(*(buffer.spec.parameter.id for buffer in before), *code), wanted=tuple(wanted), spent=()),
        parameters=parameters,
        floats=trace.floats[begin.floats : end.floats],
        ints=trace.ints[begin.ints : end.ints],
        streams=trace.streams or [generator.stream()],
        inputs=[buffer.array for buffer in parameters],
    )
    return function_of(run, [*before, *arguments], (*(None for _ in before), *places))
