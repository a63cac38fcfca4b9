"""The device's random generator: a (seed, offset) pair on the host, like the state of CUDA's Philox generator.

Each thread that records has a pair.  It is an input of the executable, and each random operation adds its index.  So a
seed gives the same numbers wherever the trace is flushed, and a new seed never recompiles.  Setting the state in the
middle of a trace, as activation checkpointing does, starts a second stream in the same executable.  A `Generator` that
the user made has its own stream, which is an input of the executable too.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from typing import Any

import numpy as np
import torch

from xla_amp.engines import base
from xla_amp.lazy.graph.trace import Generation, trace

_seed = 0
"""The last one that a thread has set; one that has set none draws from it too, from another offset on."""
_threads = itertools.count(1)
_APART = 0x9E3779B1
"""Multiples of it are far from each other modulo 2**32, which offsets are taken by."""


def stream() -> tuple[int, int]:
    """(seed, offset) at the start of the current stream; the caller holds the trace's lock."""
    if trace.random is None:
        trace.random = _seed, _APART * next(_threads) % 2**32
    return trace.random


def advance(draws: int) -> None:
    """Moves the states past the random operations of the trace, `draws` of the device's generator."""
    seed, offset = stream()
    trace.random = seed, offset + draws
    for other in trace.generators:
        if isinstance(other, Generator):
            other.advance()


def state() -> tuple[int, int]:
    """(seed, offset) of the next random operation."""
    with trace.lock:
        seed, offset = stream()
        return seed, offset + trace.draws


def set_state(seed: int, offset: int) -> None:
    """Continues at `offset` of `seed`."""
    global _seed
    with trace.lock:
        if trace.draws or trace.streams:
            _own_stream()
            trace.stream = len(trace.streams)
            trace.streams.append((seed, offset))
        trace.draws = 0
        _seed, trace.random = seed, (seed, offset)


def _own_stream() -> None:
    if not trace.streams:  # the first stream is the device generator's
        trace.streams.append(stream())


def draw(other: torch.Generator | None = None) -> tuple[int, int]:
    """(stream, index) for the random operation that is being recorded, which draws from `other` if it is given."""
    if other is not None:
        return _draw_from(other)
    index = trace.draws
    trace.draws = index + 1
    return trace.stream, index


def _draw_from(other: torch.Generator) -> tuple[int, int]:
    _own_stream()
    ours = _generators.get(other._cdata)  # type: ignore[attr-defined]
    if ours is not None:
        return ours.draw()
    # A generator of the CPU (as `DataLoader(shuffle=True)` makes them) gives the seed of a stream for this operation.
    trace.generators.append(other)
    trace.streams.append((int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=other)), 0))
    return len(trace.streams) - 1, 0


def manual_seed(seed: int) -> None:
    """Seeds the device (any Python integer; taken modulo 2**64 as torch does)."""
    with trace.lock:
        trace.seedings += 1
    set_state(_word(seed), 0)


def _word(seed: int) -> int:
    """`seed` modulo 2**64, as a signed word."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def get_rng_state() -> torch.Tensor:
    """The generator's state: uint8[16], seed and offset as int64, like a CUDA generator's."""
    return _pack(*state())


def set_rng_state(state: torch.Tensor) -> None:
    """Restores what `get_rng_state` returned.

    Raises:
        TypeError: `state` is not a uint8 tensor.
        ValueError: it does not hold 16 bytes.
    """
    set_state(*_unpack(state))


def _pack(seed: int, offset: int) -> torch.Tensor:
    return torch.from_numpy(np.array((seed, offset), np.int64).view(np.uint8).copy())


def _unpack(state: torch.Tensor) -> tuple[int, int]:
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        got = f"a {state.dtype} tensor" if isinstance(state, torch.Tensor) else type(state).__name__
        raise TypeError(f"set_rng_state expects the uint8 tensor that get_rng_state() returned, got {got}")
    if state.numel() != 16:
        raise ValueError(f"set_rng_state expects 16 bytes (seed and offset of a 'jax' generator), got {state.numel()}")
    seed, offset = state.cpu().numpy().view(np.int64)
    return int(seed), int(offset)


_generators: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()
"""Address of the C++ generator -> the generator; kernels get another Python object for the same C++ one."""


class Generator(torch.Generator):
    """``torch.Generator(device="jax")``: a (seed, offset) pair apart from the device's own generator.

    torch's C++ part is a generator of the CPU with the same seed, which only operations on CPU tensors draw from.
    """

    _seed: int
    _offset: int
    _generation: Generation | None
    """The trace that has this generator's stream."""

    def __new__(cls) -> Generator:
        self: Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        self._draws = 0
        self._stream = 0
        self._generation = None
        self.manual_seed(67280421310721)  # torch's default seed
        _generators[self._cdata] = self  # type: ignore[attr-defined]
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The lazy device."""
        return torch.device(base.LAZY, 0)

    def _state(self) -> tuple[int, int]:
        """(seed, offset) of the next random operation."""
        open_ = self._generation is not None and self._generation.owner is not None
        return self._seed, self._offset + (self._draws if open_ else 0)

    def _set(self, seed: int, offset: int) -> Generator:
        with trace.lock:
            self._seed, self._offset = seed, offset
            self._draws, self._generation = 0, None
        super().manual_seed(seed)
        return self

    def draw(self) -> tuple[int, int]:
        """(stream, index) for the random operation that is being recorded."""
        if self._generation is not trace.generation:  # the first draw of this trace, or since the seed was set
            self._seed, self._offset = self._state()  # behind what another thread's trace draws
            self._generation, self._stream, self._draws = trace.generation, len(trace.streams), 0
            trace.streams.append((self._seed, self._offset))
            trace.generators.append(self)
        self._draws += 1
        return self._stream, self._draws - 1

    def advance(self) -> None:
        """Moves the state past the operations of the trace that ran."""
        if self._generation is trace.generation:
            self._seed, self._offset = self._state()
            self._draws = 0

    def manual_seed(self, seed: int) -> Generator:
        """Seeds the generator (any Python integer; taken modulo 2**64 as torch does)."""
        return self._set(_word(int(seed)), 0)

    def seed(self) -> int:
        """Seeds the generator with a random number, which it returns."""
        self.manual_seed(secrets.randbits(53))
        return self._seed

    def initial_seed(self) -> int:
        """The last seed."""
        return self._seed

    def get_offset(self) -> int:
        """Count of random operations since the seed was set."""
        return self._state()[1]

    def set_offset(self, offset: int) -> Generator:
        """Continues at the random operation `offset` of the seed."""
        return self._set(self._seed, int(offset))

    def get_state(self) -> torch.Tensor:
        """uint8[16]: seed and offset as int64."""
        return _pack(*self._state())

    def set_state(self, new_state: torch.Tensor) -> Generator:
        """Restores what `get_state` returned.

        Raises:
            TypeError: `new_state` is not a uint8 tensor.
            ValueError: it does not hold 16 bytes.
        """
        return self._set(*_unpack(new_state))

    def clone_state(self) -> Generator:
        """A generator of the same state."""
        return type(self)()._set(*self._state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Generator) -> Generator:  # type: ignore[override]
        """Takes the state of another generator."""
        return self._set(*state._state())

    def __reduce__(self) -> Any:
        return _restored, self._state()

    def __repr__(self) -> str:
        return f"<torch.Generator device={str(self.device)!r} seed={self._seed} offset={self.get_offset()}>"


def _restored(seed: int, offset: int) -> Generator:
    return Generator()._set(seed, offset)
