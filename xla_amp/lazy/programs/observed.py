"""Observe the programs that run inside a block, and read what was recorded as a function of arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from xla_amp.common import events
from xla_amp.common.events import Place
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Spec, trace
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lazy.programs.compile import Key, XlaProgram, build
from xla_amp.lazy.torch_integration import generator


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Function:
    """A trace, or a part of one, as a function of arrays."""

    program: XlaProgram
    arguments: tuple[int, ...]
    """Per parameter of the program: its index among the arguments, or ``~index`` among `constants`."""
    constants: tuple[Any, ...]
    floats: np.ndarray[Any, Any]
    ints: np.ndarray[Any, Any]
    streams: np.ndarray[Any, Any]
    """(seed, offset) of the random streams."""
    draws: bool
    """Whether anything is random."""

    def __call__(self, values: Sequence[Any], floats: Any, ints: Any) -> list[Any]:
        """The wanted values; `ints` are the words of the streams, then the lifted integers (64-bit types are on)."""
        parameters = [values[index] if index >= 0 else self.constants[~index] for index in self.arguments]
        outputs = self.program.nested([], [parameters[index] for index in self.program.kept], floats, ints)
        return [outputs[index] if index >= 0 else parameters[~index] for index in self.program.outputs]


_NO_KEY: Final = Key(code=(), wanted=(), spent=())


@dataclasses.dataclass(kw_only=True)
class Run:
    """What the trace has recorded, and, once it has run, what it wrote."""

    parameters: list[Buffer]
    inputs: list[Any]
    """What is kept of the value of each parameter."""
    numbers: list[int]
    """Numbers of the parameters in the trace."""
    floats: list[float]
    ints: list[int]
    streams: list[tuple[int, int]]
    generators: bool
    """Whether it draws from a torch.Generator."""
    held: list[bool] = dataclasses.field(default_factory=list)
    """Which parameters some tensor has at the end."""
    where: str = ""
    """The user's ``file:line`` that ended it."""
    key: Key = _NO_KEY
    """Of its program, once it has run."""
    overwritten: list[int] = dataclasses.field(default_factory=list)
    """The parameters that are the first of the targets, in that order."""
    targets: list[Buffer] = dataclasses.field(default_factory=list)
    """Buffers that get the values that `key` wants."""
    is_new: list[bool] = dataclasses.field(default_factory=list)
    """Which targets had no value before."""

    @classmethod
    def now(cls, keep: Callable[[Buffer, bool], Any], held: Sequence[bool] = ()) -> Run:
        """The present trace; ``keep(parameter, held)`` gives what to keep of the value of a parameter."""
        parameters = list(trace.parameters)
        flags = list(held) or [True for _ in parameters]
        return cls(
            parameters=parameters,
            inputs=list(map(keep, parameters, flags)),
            numbers=list(trace.parameter_numbers),
            floats=list(trace.floats),
            ints=list(trace.ints),
            streams=list(trace.streams) or [generator.stream()],
            generators=bool(trace.generators),
            held=flags,
        )

    def ended(self, program: XlaProgram, targets: list[Buffer]) -> None:
        """Adds what is known once `program` was dispatched."""
        self.key, self.targets = program.key, list(targets)
        index_of = {id(buffer): index for index, buffer in enumerate(self.parameters)}
        self.overwritten = [index_of[id(buffer)] for buffer in targets if id(buffer) in index_of]
        self.is_new = [buffer.array is None for buffer in targets]

    def release(self) -> None:
        """Keeps no buffer alive."""
        self.parameters, self.targets = [], []

    def function(self, inputs: Sequence[Buffer], key: Key, places: tuple[Place | None, ...] = ()) -> Function:
        """The values that `key` wants, from arrays for `inputs`; other parameters are constants.

        Args:
            inputs: buffers; those that are no parameters are not read.
            key: of the trace, or of one with the same parameters; none is spent.
            places: of the operations in the user's program (`build`).
        """
        index = {id(buffer): at for at, buffer in enumerate(inputs)}
        free = [at for at, buffer in enumerate(self.parameters) if id(buffer) not in index]
        index.update((id(self.parameters[at]), ~constant) for constant, at in enumerate(free))
        specs = tuple(buffer.spec for buffer in self.parameters)
        return Function(
            program=_program(key, places, specs, len(self.floats), len(self.ints), len(self.streams)),
            arguments=tuple(index[id(buffer)] for buffer in self.parameters),
            constants=tuple(self.inputs[at] for at in free),
            floats=np.array(self.floats, np.float64),
            ints=np.array(self.ints, np.int64),
            streams=np.array(self.streams, np.int64),
            draws=any(node.instruction.random for node in nodes(key.code)),
        )


@functools.lru_cache(maxsize=256)
def _program(
    key: Key, places: tuple[Place | None, ...], specs: tuple[Spec, ...], floats: int, ints: int, streams: int
) -> XlaProgram:
    numbers = [node.first for node in nodes(key.code) if node.is_parameter]
    with private_api.x64():
        return build(key, numbers, specs, (floats, ints), streams, pjrt.platform(), places)


@contextlib.contextmanager
def observed(keep: Callable[[Buffer, bool], Any]) -> Iterator[list[Run]]:
    """Context manager: the programs that run inside, each as a `Run`.

    Args:
        keep: ``keep(parameter, held)``, called before a program runs, which may take the memory of the parameter.
    """
    runs: list[Run] = []

    def begins(parameters: list[Buffer], held: list[bool]) -> None:
        runs.append(Run.now(keep, held))
        runs[-1].where = events.user_location()

    def ends(program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
        runs[-1].ended(program, targets)

    with execute.flush_begins.subscribed(begins), execute.flush_ends.subscribed(ends):
        yield runs
