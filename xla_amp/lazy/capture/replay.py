"""Running the program of two agreeing calls again without recording it.

Of each input of the program this file says which of three things it is, from what the two calls had in common: an
argument, a constant that the host brought, or a value that lives on between the calls, the step's state.  An input that
is none of them is a reason not to replay.

A step of a large model has hundreds of arrays of state, and touching each of them in Python costs as much as JAX's own
dispatch.  So between two replays the state stays here, in the order of the program, and its buffers are empty; reading
one of them brings everything back (`Buffer.owner`), and the next replay collects it anew.
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
from xla_amp.lazy.capture.observer import NotReplayable, Reference, Run, first_difference
from xla_amp.lazy.graph.buffer import Buffer, Poisoned
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.runtime import execute, generator, memory_layout, mesh, pjrt
from xla_amp.lazy.runtime.metrics import metrics


class Replay:
    """A program with what to feed it and where its outputs go.

    Args:
        earlier: the run of one call.
        later: the run of the next call.
        begin, end: random state around the later call.
        arguments: buffers of the later call's tensor arguments.

    Raises:
        NotReplayable: an input is neither an argument, nor a value that lives on, nor the same in both calls.
    """

    def __init__(
        self,
        earlier: Run,
        later: Run,
        begin: tuple[int, int],
        end: tuple[int, int],
        arguments: Sequence[Buffer],
    ) -> None:
        if earlier.program is not later.program:
            raise NotReplayable(f"its calls differ: {first_difference(earlier.code, later.code)}")
        if earlier.ints != later.ints:
            raise NotReplayable(f"whole numbers in it change from call to call: {_changed(earlier.ints, later.ints)}")
        self.program = program = later.program
        self.ints = later.ints
        self._targets = later.targets
        self._donations = len(program.donated)
        # Inputs are counted in the order of the program: what it is handed over, then what it only reads.
        self._arguments: list[tuple[int, int]] = []
        """(input, argument) pairs."""
        self._constants: list[tuple[int, jax.Array]] = []
        """(input, value) pairs."""
        self._state: list[tuple[int, Reference]] = []
        """(input, buffer) pairs."""
        position = {id(buffer): index for index, buffer in enumerate(arguments)}
        for place, parameter in enumerate((*program.donated, *program.kept)):
            self._classify(place, parameter, earlier, later, position)
        self._connect(position)
        self._layouts = [struct.sharding for part in program.abstract[:2] for struct in part]
        self._orders = {each.place: each.format for each in program.arranged}
        self._inputs: list[Any] | None = None
        """The arrays of the inputs, with gaps for the arguments; None while the state is in its buffers."""
        self._mesh: Any = None
        self._fresh_arrays: list[weakref.ref[jax.Array]] = []
        self._floats: Any = None
        self._words: tuple[int, ...] | None = None
        seed, offset = begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        if end[0] != seed:
            raise NotReplayable("it seeds the random generator; seed it outside")
        self._advance = end[1] - offset

    # -- learning ------------------------------------------------------------------------------------------------

    def _classify(self, place: int, parameter: int, earlier: Run, later: Run, position: dict[int, int]) -> None:
        buffer, spec = later.parameters[parameter](), later.specs[parameter]
        if buffer is not None and id(buffer) in position:
            self._arguments.append((place, position[id(buffer)]))
        elif buffer is not None and earlier.parameters[parameter]() is buffer:
            self._state.append((place, later.parameters[parameter]))
        elif parameter in later.carried:  # the last call left it: this one's counterpart is what the next call reads
            self._state.append((place, later.targets[later.carried[parameter]]))
        elif parameter not in later.arrays:
            raise NotReplayable(
                f"it reads a tensor, {spec}, that is another one in each call and no argument; pass it as an argument"
            )
        elif parameter not in earlier.arrays or not _same(earlier.arrays[parameter], later.arrays[parameter]):
            raise NotReplayable(
                f"it brings a value from the host, {spec}, that is another in each call; make it a tensor on the "
                "device outside and pass it as an argument"
            )
        else:
            self._constants.append((place, later.arrays[parameter]))

    def _connect(self, position: dict[int, int]) -> None:
        """Finds where the next call's inputs are among the results: the outputs, the inputs that are kept, a gap."""
        program = self.program
        computed = len({place for place in program.outputs if place >= 0})
        kept = {parameter: computed + place for place, parameter in enumerate(program.kept)}
        self._size = computed + len(kept) + 1
        self._places = [place if place >= 0 else kept[~place] for place in program.outputs]
        given = {id(ref()): place for ref, place in zip(self._targets, self._places, strict=True) if ref() is not None}
        following: list[Any] = [*([None] * self._donations), *range(computed, self._size - 1)]
        for place, _ in self._arguments:
            following[place] = self._size - 1
        for place, ref in self._state:
            following[place] = given.get(id(ref()), following[place])
        lives_on = {id(ref()) for _, ref in self._state}
        if None in following:
            raise NotReplayable("it uses up a value that nothing replaces, so that a next call has none")
        self._following = _picker(following)
        self._left: list[tuple[int, Reference]] = []
        """(result, buffer) for buffers that get a value and are neither state nor argument."""
        self._overwritten: list[tuple[int, int]] = []
        """(result, argument) for arguments that the step overwrites."""
        for ref, place in zip(self._targets, self._places, strict=True):
            buffer = ref()
            if buffer is not None and id(buffer) in position:
                self._overwritten.append((place, position[id(buffer)]))
            elif buffer is None or id(buffer) not in lives_on:
                self._left.append((place, ref))
        takers = Counter((*following, *(place for place, _ in self._left), *(place for place, _ in self._overwritten)))
        self._shared = [place for place in range(self._donations) if takers[following[place]] > 1]
        """Inputs handed over whose array may be another tensor's too."""
        self._broken = False
        self._state = [
            (place, ref if (buffer := ref()) is None else weakref.ref(buffer, functools.partial(self._died, place)))
            for place, ref in self._state
        ]

    def _died(self, place: int, _: Any) -> None:
        """A buffer of the state is gone; its array goes too."""
        self._broken = True
        if self._inputs is not None:
            self._inputs[place] = None

    def place_of(self, buffer: Buffer) -> int | None:
        """Where among the results of `run` the value of `buffer` is, or None."""
        found = zip(self._targets, self._places, strict=True)
        return next((place for ref, place in found if ref() is buffer), None)

    def values(self) -> list[Any]:
        """What `run` would have returned for the call that was recorded (None for what nobody holds any more)."""
        values: list[Any] = [None] * self._size
        for ref, place in zip(self._targets, self._places, strict=True):
            if (buffer := ref()) is not None:
                values[place] = buffer.array
        return values

    def keeps(self, buffer: Buffer) -> bool:
        """Whether `buffer` is part of the state."""
        return any(ref() is buffer for _, ref in self._state)

    # -- replaying -----------------------------------------------------------------------------------------------

    def run(self, arguments: Sequence[Buffer], floats: Any) -> list[Any] | None:
        """Runs the program; returns its results, or None when a value it needs is no longer there.

        Args:
            arguments: buffers of the tensor arguments.
            floats: the lifted numbers, float64; the same object as in the last run where they are the same.

        Raises:
            StepFailedError: a value that it needs was lost in a failed step.
        """
        if mesh.active is not None:
            mesh.bring_home(arguments)
        given = list(map(_array, arguments))  # first: this may bring the state back
        if not _all_there(given) or not self._collect():
            return None
        inputs = self._inputs
        assert inputs is not None  # noqa: S101  (collected)
        for place, index in self._arguments:
            inputs[place] = self._arranged(place, given[index])
        if mesh.is_partitioned():
            places = [place for place, _ in self._arguments]
            if not all(_lies(inputs[place], self._layouts[place]) for place in places):
                return None
        del given
        donated, kept = inputs[: self._donations], inputs[self._donations :]
        self._copy_shared(donated)
        seed, offset = generator.state()
        try:
            numbers = self._numbers(floats), self._whole_numbers(seed, offset)
            with private_api.x64():
                outputs = execute.dispatch(self.program, donated, kept, *numbers)
        except Exception as error:
            raise self._failed(arguments, error) from error
        metrics.executions += 1
        metrics.operations += self.program.operations
        if self._advance:
            generator.set_state(seed, offset + self._advance)
        results = [*outputs, *kept, None]
        self._inputs = self._following(results)
        for place, ref in self._left:
            if (buffer := ref()) is not None:
                buffer.array = results[place]
        for place, index in self._overwritten:
            arguments[index].array = results[place]
        self._fresh_arrays = [weakref.ref(results[place]) for place, _ in (*self._left, *self._overwritten)]
        execute.note(self._newest)
        return results

    def _collect(self) -> bool:
        """Takes the state out of its buffers unless it is here; False when something of it is missing."""
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
            mesh.bring_home(buffers)  # type: ignore[arg-type]
        arrays = list(map(_array, buffers))
        if not _all_there(arrays):
            return False
        inputs: list[Any] = [None] * len(self._layouts)
        self._fill(inputs, self._constants)
        self._fill(inputs, zip((place for place, _ in self._state), arrays, strict=True))
        if mesh.is_partitioned():
            here = [(array, layout) for array, layout in zip(inputs, self._layouts, strict=True) if array is not None]
            if not all(_lies(*pair) for pair in here):
                return False
            del here
        counts = execute.reference_counts(arrays)
        for (place, _), buffer, count in zip(self._state, buffers, counts, strict=True):
            # Beside the two lists and its buffer somebody holds it: a copy of the tensor, a read under way, JAX.
            if place < self._donations and count > execute.ALONE + 2:
                inputs[place] = memory_layout.copy(inputs[place])
                buffer.external = None  # type: ignore[union-attr]
        for buffer in dict.fromkeys(buffers):
            buffer.set_owner(self)  # type: ignore[union-attr]
        self._inputs, self._mesh = inputs, mesh.active
        self._floats = self._words = None  # they lie where the last state did
        return True

    def _fill(self, inputs: list[Any], values: Iterable[tuple[int, jax.Array]]) -> None:
        for place, array in values:  # in a function of its own: a name left behind would count as a holder
            inputs[place] = self._arranged(place, array)

    def _arranged(self, place: int, array: jax.Array) -> jax.Array:
        """`array` in the order of the input `place`; what the program itself gives is in it."""
        order = self._orders.get(place)
        return array if order is None else memory_layout.put(array, order)

    def release(self) -> None:
        """Returns the state to its buffers."""
        with trace.lock:
            inputs, self._inputs = self._inputs, None
            if inputs is not None:
                for place, ref in self._state:
                    if (buffer := ref()) is not None:
                        buffer.clear_owner(inputs[place])

    def _copy_shared(self, donated: list[Any]) -> None:
        for place, _ in self._arguments:
            # Two lists and the tensor's own buffer hold it, and the list that is made for counting.
            if place < self._donations and execute.reference_counts(donated[place : place + 1])[0] > execute.ALONE + 3:
                donated[place] = memory_layout.copy(donated[place])
        for place in self._shared:
            if execute.reference_counts(donated[place : place + 1])[0] > execute.ALONE + 2:
                donated[place] = memory_layout.copy(donated[place])

    def _newest(self) -> list[Any]:
        """What the last run gave, as far as somebody still has it."""
        results = [ref() for ref in self._fresh_arrays]
        if self._inputs is not None:
            return [*self._inputs, *results]
        return [*(buffer.array for _, ref in self._state if (buffer := ref()) is not None), *results]

    def _numbers(self, floats: np.ndarray) -> Any:
        """The lifted numbers on the device."""
        if floats is not self._floats:
            self._floats, self._floats_there = floats, _uploaded(floats)
        return self._floats_there

    def _whole_numbers(self, seed: int, offset: int) -> Any:
        """The random streams and the lifted whole numbers, on the device."""
        words = tuple(word for s, at in self._streams for word in ((seed, offset + at) if s is None else (s, at)))
        if words != self._words:
            self._words, self._ints_there = words, _uploaded(np.array([*words, *self.ints], np.int64))
        return self._ints_there

    def _failed(self, arguments: Sequence[Buffer], error: Exception) -> StepFailedError:
        self.release()
        reason = f"{type(error).__name__}: {error}"
        for buffer in (*map(call, (ref for _, ref in self._state)), *arguments):
            if buffer is not None and isinstance(buffer.array, jax.Array) and buffer.array.is_deleted():
                buffer.array = Poisoned(f"this tensor's memory was handed to a step that then failed: {reason}")
        return StepFailedError(reason)


_array = attrgetter("array")


def _all_there(arrays: Sequence[Any]) -> bool:
    """Whether each of them is an array; False when memory was never written.

    Raises:
        StepFailedError: one was lost in a failed step.
    """
    kinds = set(map(type, arrays))
    if Poisoned in kinds:
        raise StepFailedError(next(array.reason for array in arrays if type(array) is Poisoned))
    return type(None) not in kinds


def _lies(array: jax.Array, layout: Any) -> bool:
    """Whether an array is laid out over the mesh as the program has it."""
    return layout is not None and array.sharding.is_equivalent_to(layout, array.ndim)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """What gives the items at `places`, in one call."""
    if len(places) < 2:  # `itemgetter` of one gives no tuple
        return lambda items: [items[place] for place in places]
    getter = itemgetter(*places)
    return lambda items: list(getter(items))


def _uploaded(numbers: np.ndarray) -> Any:
    """Numbers for a program; over a mesh JAX brings them to each device."""
    return numbers if mesh.active is not None else private_api.upload_numbers(numbers, pjrt.jax_device())


def _changed(one: Sequence[Any], other: Sequence[Any]) -> str:
    return next((f"{a} in one, {b} in the next" for a, b in zip(one, other, strict=False) if a != b), "")


def _same(one: jax.Array, other: jax.Array) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
