"""Run the program of two agreeing calls again without recording it.

Each input of the program is classified by what the two calls had in common: an argument; a constant from the host; or a
value that lives on between the calls, the state of the step.  An input that is none of these prevents a replay.

A step of a large model has hundreds of arrays of state, and touching each of them in Python costs as much as JAX's own
dispatch.  So between two replays the `Replay` owns these arrays, in the order of the program, and their buffers are
empty; reading one of the buffers returns all arrays (`Buffer.owner`), and the next replay collects them again.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, call, itemgetter
from typing import Any

import jax
import numpy as np

from xla_amp.errors import StepFailedError
from xla_amp.lazy import private_api
from xla_amp.lazy.capture.observer import NotReplayableError, ObservedRun, Reference, first_difference
from xla_amp.lazy.graph.buffer import Buffer, Poisoned
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, memory_layout, mesh, pjrt
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.torch_integration import generator


class Replay:
    """A program with the sources of its inputs and the destinations of its outputs.

    Args:
        earlier: the run of one call.
        later: the run of the next call.
        begin, end: random state around the later call.
        arguments: buffers of the later call's tensor arguments.

    Raises:
        NotReplayableError: an input is neither an argument, nor state, nor the same in both calls.
    """

    def __init__(
        self,
        earlier: ObservedRun,
        later: ObservedRun,
        begin: tuple[int, int],
        end: tuple[int, int],
        arguments: Sequence[Buffer],
    ) -> None:
        if earlier.program is not later.program:
            raise NotReplayableError(f"its calls differ: {first_difference(earlier.code, later.code)}")
        if earlier.ints != later.ints:
            raise NotReplayableError(
                f"whole numbers in it change from call to call: {_first_change(earlier.ints, later.ints)}"
            )
        self.program = program = later.program
        self.ints = later.ints
        self._targets = later.targets
        self._donations = len(program.donated)
        # Inputs are numbered in the order of the program: the donated ones, then those that it only reads.
        self._arguments: list[tuple[int, int]] = []
        """(input, argument) pairs."""
        self._constants: list[tuple[int, jax.Array]] = []
        """(input, value) pairs."""
        self._state: list[tuple[int, Reference]] = []
        """(input, buffer) pairs."""
        argument_of = {id(buffer): index for index, buffer in enumerate(arguments)}
        for slot, parameter in enumerate((*program.donated, *program.kept)):
            self._classify(slot, parameter, earlier, later, argument_of)
        self._connect(argument_of)
        self._layouts = [struct.sharding for part in program.abstract[:2] for struct in part]
        self._formats = {each.position: each.format for each in program.input_formats}
        self._inputs: list[Any] | None = None
        """The arrays of the inputs, None for arguments; None as a whole while the state is in its buffers."""
        self._mesh: Any = None
        self._new_arrays: list[weakref.ref[jax.Array]] = []
        self._pending = functools.partial(_newest_of, weakref.ref(self))
        self._floats: Any = None
        self._words: tuple[int, ...] | None = None
        seed, offset = begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        if end[0] != seed:
            raise NotReplayableError("it seeds the random generator; seed it outside")
        self._advance = end[1] - offset

    # -- capturing ------------------------------------------------------------------------------------------------

    def _classify(
        self, slot: int, parameter: int, earlier: ObservedRun, later: ObservedRun, argument_of: dict[int, int]
    ) -> None:
        buffer, spec = later.parameters[parameter](), later.specs[parameter]
        if buffer is not None and id(buffer) in argument_of:
            self._arguments.append((slot, argument_of[id(buffer)]))
        elif buffer is not None and earlier.parameters[parameter]() is buffer:
            self._state.append((slot, later.parameters[parameter]))
        elif parameter in later.carried:  # the last call left it: this one's counterpart is what the next call reads
            self._state.append((slot, later.targets[later.carried[parameter]]))
        elif parameter not in later.arrays:
            raise NotReplayableError(
                f"it reads a tensor, {spec}, that is another one in each call and no argument; pass it as an argument"
            )
        elif parameter not in earlier.arrays or not _same(earlier.arrays[parameter], later.arrays[parameter]):
            raise NotReplayableError(
                f"it brings a value from the host, {spec}, that is another in each call; make it a tensor on the "
                "device outside and pass it as an argument"
            )
        else:
            self._constants.append((slot, later.arrays[parameter]))

    def _connect(self, argument_of: dict[int, int]) -> None:
        """Finds the next call's inputs among the results: the outputs, the inputs that are only read, and one None."""
        program = self.program
        computed = len({slot for slot in program.outputs if slot >= 0})
        kept = {parameter: computed + slot for slot, parameter in enumerate(program.kept)}
        self._size = computed + len(kept) + 1
        self._result_indices = [slot if slot >= 0 else kept[~slot] for slot in program.outputs]
        given = {
            id(ref()): slot for ref, slot in zip(self._targets, self._result_indices, strict=True) if ref() is not None
        }
        next_inputs: list[Any] = [*([None] * self._donations), *range(computed, self._size - 1)]
        for slot, _ in self._arguments:
            next_inputs[slot] = self._size - 1
        for slot, ref in self._state:
            next_inputs[slot] = given.get(id(ref()), next_inputs[slot])
        lives_on = {id(ref()) for _, ref in self._state}
        if None in next_inputs:
            raise NotReplayableError("it uses up a value that nothing replaces, so that a next call has none")
        self._next_inputs = _getter(next_inputs)
        self._others: list[tuple[int, Reference]] = []
        """(result, buffer) for other buffers that get a value."""
        self._overwritten: list[tuple[int, int]] = []
        """(result, argument) for arguments that the step overwrites."""
        for ref, slot in zip(self._targets, self._result_indices, strict=True):
            buffer = ref()
            if buffer is not None and id(buffer) in argument_of:
                self._overwritten.append((slot, argument_of[id(buffer)]))
            elif buffer is None or id(buffer) not in lives_on:
                self._others.append((slot, ref))
        uses = Counter((*next_inputs, *(slot for slot, _ in self._others), *(slot for slot, _ in self._overwritten)))
        self._shared = [slot for slot in range(self._donations) if uses[next_inputs[slot]] > 1]
        """Donated inputs whose array another tensor may hold too."""
        self._broken = False
        self._state = [
            (
                slot,
                ref if (buffer := ref()) is None else weakref.ref(buffer, functools.partial(self._buffer_freed, slot)),
            )
            for slot, ref in self._state
        ]

    def _buffer_freed(self, slot: int, _: Any) -> None:
        """Called when a buffer of the state is freed: frees its array."""
        self._broken = True
        if self._inputs is not None:
            self._inputs[slot] = None

    def result_index(self, buffer: Buffer) -> int | None:
        """The index among the results of `run` of the value of `buffer`, or None."""
        found = zip(self._targets, self._result_indices, strict=True)
        return next((slot for ref, slot in found if ref() is buffer), None)

    def values(self) -> list[Any]:
        """What `run` would have returned for the recorded call; None for buffers that no longer exist."""
        values: list[Any] = [None] * self._size
        for ref, slot in zip(self._targets, self._result_indices, strict=True):
            if (buffer := ref()) is not None:
                values[slot] = buffer.array
        return values

    def keeps(self, buffer: Buffer) -> bool:
        """Whether `buffer` is part of the state."""
        return any(ref() is buffer for _, ref in self._state)

    # -- replaying -----------------------------------------------------------------------------------------------

    def run(self, arguments: Sequence[Buffer], floats: Any) -> list[Any] | None:
        """Runs the program; returns its results, or None if a value that it needs no longer exists.

        Args:
            arguments: buffers of the tensor arguments.
            floats: the lifted floats, float64; the same object as in the last run if they are equal.

        Raises:
            StepFailedError: a value that it needs was lost in a failed step.
        """
        if mesh.active is not None:
            mesh.move_to_mesh(arguments)
        given = list(map(_array, arguments))  # first: this may bring the state back
        if not _all_written(given) or not self._collect():
            return None
        inputs = self._inputs
        assert inputs is not None  # noqa: S101  (collected)
        for slot, index in self._arguments:
            inputs[slot] = self._in_memory_order(slot, given[index])
        if mesh.is_partitioned():
            slots = [slot for slot, _ in self._arguments]
            if not all(_has_layout(inputs[slot], self._layouts[slot]) for slot in slots):
                return None
        del given
        donated, kept = inputs[: self._donations], inputs[self._donations :]
        self._copy_shared(donated)
        seed, offset = generator.state()
        try:
            numbers = self._upload_floats(floats), self._upload_ints(seed, offset)
            with private_api.x64():
                outputs = execute.dispatch(self.program, donated, kept, *numbers)
        except Exception as error:
            raise self._failed(arguments, error) from error
        metrics.executions += 1
        metrics.operations += self.program.operations
        if self._advance:
            generator.set_state(seed, offset + self._advance)
        results = [*outputs, *kept, None]
        self._inputs = self._next_inputs(results)
        for slot, ref in self._others:
            if (buffer := ref()) is not None:
                buffer.array = results[slot]
        for slot, index in self._overwritten:
            arguments[index].array = results[slot]
        self._new_arrays = [weakref.ref(results[slot]) for slot, _ in (*self._others, *self._overwritten)]
        execute.add_pending(self._pending)
        return results

    def _collect(self) -> bool:
        """Takes ownership of the state's arrays; False if one is missing or has another layout on the mesh."""
        if self._broken:
            self.release()
            return False
        if self._inputs is not None:
            if self._mesh is mesh.active:
                return True
            self.release()
        buffers = [ref() for _, ref in self._state]
        if None in buffers:
            return False
        if mesh.active is not None:
            mesh.move_to_mesh(buffers)  # type: ignore[arg-type]
        arrays = list(map(_array, buffers))
        if not _all_written(arrays):
            return False
        inputs: list[Any] = [None] * len(self._layouts)
        self._fill(inputs, self._constants)
        self._fill(inputs, zip((slot for slot, _ in self._state), arrays, strict=True))
        if mesh.is_partitioned():
            here = [(array, layout) for array, layout in zip(inputs, self._layouts, strict=True) if array is not None]
            if not all(_has_layout(*pair) for pair in here):
                return False
            del here
        counts = execute.reference_counts(arrays)
        for (slot, _), buffer, count in zip(self._state, buffers, counts, strict=True):
            # Held outside the two lists and its buffer: by a copy of the tensor, a pending read, or JAX.
            if slot < self._donations and count > execute.ALONE + 2:
                inputs[slot] = memory_layout.copy(inputs[slot])
                buffer.external = None  # type: ignore[union-attr]
        for buffer in dict.fromkeys(buffers):
            buffer.set_owner(self)  # type: ignore[union-attr]
        self._inputs, self._mesh = inputs, mesh.active
        self._floats = self._words = None  # uploaded for the previous placement
        return True

    def _fill(self, inputs: list[Any], values: Iterable[tuple[int, jax.Array]]) -> None:
        for slot, array in values:  # a separate function: a variable left behind would count as a reference
            inputs[slot] = self._in_memory_order(slot, array)

    def _in_memory_order(self, slot: int, array: jax.Array) -> jax.Array:
        """`array` in the memory order of the input `slot`; results of the program already have it."""
        order = self._formats.get(slot)
        return array if order is None else memory_layout.put(array, order)

    def release(self) -> None:
        """Returns the state to its buffers."""
        with trace.lock:
            inputs, self._inputs = self._inputs, None
            if inputs is not None:
                for slot, ref in self._state:
                    if (buffer := ref()) is not None:
                        buffer.clear_owner(inputs[slot])

    def _copy_shared(self, donated: list[Any]) -> None:
        for slot, _ in self._arguments:
            # References: two lists, the tensor's own buffer, and the list that is made for counting.
            if slot < self._donations and execute.reference_counts(donated[slot : slot + 1])[0] > execute.ALONE + 3:
                donated[slot] = memory_layout.copy(donated[slot])
        for slot in self._shared:
            if execute.reference_counts(donated[slot : slot + 1])[0] > execute.ALONE + 2:
                donated[slot] = memory_layout.copy(donated[slot])

    def _newest(self) -> list[Any]:
        """The results of the last run that still exist."""
        results = [ref() for ref in self._new_arrays]
        if self._inputs is not None:
            return [*self._inputs, *results]
        return [*(buffer.array for _, ref in self._state if (buffer := ref()) is not None), *results]

    def _upload_floats(self, floats: np.ndarray) -> Any:
        """The lifted floats on the device."""
        if floats is not self._floats:
            self._floats, self._device_floats = floats, _upload(floats)
        return self._device_floats

    def _upload_ints(self, seed: int, offset: int) -> Any:
        """The random streams and the lifted ints on the device."""
        words = tuple(word for s, at in self._streams for word in ((seed, offset + at) if s is None else (s, at)))
        if words != self._words:
            self._words, self._device_ints = words, _upload(np.array([*words, *self.ints], np.int64))
        return self._device_ints

    def _failed(self, arguments: Sequence[Buffer], error: Exception) -> StepFailedError:
        self.release()
        reason = f"{type(error).__name__}: {error}"
        for buffer in (*map(call, (ref for _, ref in self._state)), *arguments):
            if buffer is not None and isinstance(buffer.array, jax.Array) and buffer.array.is_deleted():
                buffer.array = Poisoned(f"this tensor's memory was handed to a step that then failed: {reason}")
        return StepFailedError(reason)


_array = attrgetter("array")


def _all_written(arrays: Sequence[Any]) -> bool:
    """Whether each of them is an array; False if memory was never written.

    Raises:
        StepFailedError: one was lost in a failed step.
    """
    kinds = set(map(type, arrays))
    if Poisoned in kinds:
        raise StepFailedError(next(array.reason for array in arrays if type(array) is Poisoned))
    return type(None) not in kinds


def _has_layout(array: jax.Array, layout: Any) -> bool:
    """Whether an array has the layout over the mesh that the program expects."""
    return layout is not None and array.sharding.is_equivalent_to(layout, array.ndim)


def _getter(slots: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that returns the items at these indices."""
    if len(slots) < 2:  # `itemgetter` of one gives no tuple
        return lambda items: [items[slot] for slot in slots]
    getter = itemgetter(*slots)
    return lambda items: list(getter(items))


def _upload(numbers: np.ndarray) -> Any:
    """Numbers for a program; over a mesh JAX brings them to each device."""
    return numbers if mesh.active is not None else private_api.upload_numbers(numbers, pjrt.jax_device())


def _first_change(one: Sequence[Any], other: Sequence[Any]) -> str:
    return next((f"{a} in one, {b} in the next" for a, b in zip(one, other, strict=False) if a != b), "")


def _same(one: jax.Array, other: jax.Array) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _newest_of(replay: weakref.ref[Replay]) -> list[Any]:
    found = replay()
    return [] if found is None else found._newest()
