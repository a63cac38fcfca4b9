"""Running a compiled program without JAX's look at each of its arguments.

In each call `jax.jit` looks at every array's type, place and order in memory, to find the executable for them.  For the
hundreds of arrays of a training step that is a quarter of the call.  In a loop they are the program's own results of
the turn before, about which nothing can have changed, so there the executable can be called by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import jax

from xla_amp.lazy import private_api
from xla_amp.lazy.runtime.compile import Program


@dataclasses.dataclass(frozen=True)
class Direct:
    """The executable behind the `call` of a program."""

    _execute: Callable[[Sequence[jax.Array]], list[jax.Array]]
    _pick: Callable[[Sequence[Any]], Sequence[Any]] | None
    """Picks what the executable reads from all arguments; None where it reads all."""
    _formats: list[Any]
    """Place and order in memory of each array; without a place for one that is not read."""

    def takes(self, inputs: Iterable[tuple[int, jax.Array]]) -> bool:
        """Whether these arrays lie as the executable reads them; each comes with its number among donated and kept."""
        return all(self.reads(place, array.format) for place, array in inputs)

    def reads(self, place: int, given: Any) -> bool:
        """Whether an input of that number may lie so (`jax.experimental.layout.Format`)."""
        wanted = self._formats[place]
        return wanted.sharding is None or given == wanted

    def __call__(self, donated: Sequence[Any], kept: Sequence[Any], floats: jax.Array, ints: jax.Array) -> list[Any]:
        """What ``program.call`` would give; the arrays must have the program's shapes and be such as it `takes`."""
        inputs = [*donated, *kept, floats, ints]
        return self._execute(inputs if self._pick is None else self._pick(inputs))


def of(program: Program, arguments: tuple[Any, ...], following: Mapping[int, int]) -> Direct | None:
    """`Direct` for a loop in which input i becomes output ``following[i]``; None where it needs JAX's own way.

    Args:
        program: one that has run with such arguments, so that nothing is compiled here.
        arguments: of its `call`.
        following: inputs are counted through the arrays handed over and those that are kept.
    """
    with private_api.x64():
        compiled = program.call.lower(*arguments).compile()
    loaded = private_api.loaded(compiled)
    if loaded is None or len(loaded.used) < 2:  # `itemgetter` of one gives no tuple
        return None
    given = sum(map(len, arguments[:2])) + 2
    (donated, kept, _, _), _ = compiled.input_formats
    pick = None if len(loaded.used) == given else itemgetter(*loaded.used)
    direct = Direct(loaded.execute, pick, [*donated, *kept])
    outputs = compiled.output_formats
    return direct if all(direct.reads(place, outputs[output]) for place, output in following.items()) else None


def is_allowed() -> bool:
    """Whether nobody asked for what only JAX's own way of calling gives: its checks for NaN and infinity."""
    return not (jax.config.jax_debug_nans or jax.config.jax_debug_infs)
