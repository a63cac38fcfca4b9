"""Observe the programs that run inside a block, and read what was recorded as a function of arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xla_amp.common.events import Place
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Spec
from xla_amp.lazy.programs import execute, pjrt, recompile_reasons
from xla_amp.lazy.programs.compile import Key, XlaProgram, build
from xla_amp.lazy.programs.execute import Run


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


def function_of(run: Run, arguments: Sequence[Buffer], places: tuple[Place | None, ...] = ()) -> Function:
    """The values that a run wants, from arrays for `arguments`; its other parameters are constants.

    Args:
        run: with `inputs`.
        arguments: buffers; those that are no parameters are not read.
        places: of the operations in the user's program (`build`).
    """
    index = {id(buffer): at for at, buffer in enumerate(arguments)}
    free = [at for at, buffer in enumerate(run.parameters) if id(buffer) not in index]
    index.update((id(run.parameters[at]), ~constant) for constant, at in enumerate(free))
    specs = tuple(buffer.spec for buffer in run.parameters)
    key = run.key._replace(spent=())
    return Function(
        program=_program(key, places, specs, len(run.floats), len(run.ints), len(run.streams)),
        arguments=tuple(index[id(buffer)] for buffer in run.parameters),
        constants=tuple(run.inputs[at] for at in free),
        floats=np.array(run.floats, np.float64),
        ints=np.array(run.ints, np.int64),
        streams=np.array(run.streams, np.int64),
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
    """Context manager: the programs that run inside, each as its `Run`.

    Args:
        keep: ``keep(parameter, held)``, called before a program runs, which may take the memory of the parameter.
    """
    runs: list[Run] = []

    def begins(run: Run) -> None:
        run.inputs = list(map(keep, run.parameters, run.held or ()))
        run.made = [buffer.array is None for buffer in run.targets]
        run.where = recompile_reasons.place()
        runs.append(run)

    with execute.flush_begins.subscribed(begins):
        yield runs
