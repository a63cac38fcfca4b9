"""The device's random generator: a (seed, offset) pair on the host, like the state of CUDA's Philox generator.

The pair is an input of the executable, and each random operation adds its index.  So a seed gives the same numbers
wherever the trace is flushed, and a new seed never recompiles.  Setting the state in the middle of a trace, as
activation checkpointing does, starts a second stream in the same executable.
"""

from __future__ import annotations

import numpy as np
import torch

from xla_amp.lazy.graph.trace import trace

_seed = 0
_offset = 0
seedings = 0
"""How often `manual_seed` was called."""


def stream() -> tuple[int, int]:
    """(seed, offset) at the start of the current stream."""
    return _seed, _offset


def advance(draws: int) -> None:
    """Moves the state past `draws` random operations; called by `flush`."""
    global _offset
    _offset += draws


def state() -> tuple[int, int]:
    """(seed, offset) of the next random operation."""
    return _seed, _offset + trace.draws


def set_state(seed: int, offset: int) -> None:
    """Continues at `offset` of `seed`."""
    global _seed, _offset
    with trace.lock:
        if trace.draws or trace.streams:
            if not trace.streams:
                trace.streams.append(stream())
            trace.streams.append((seed, offset))
        trace.draws = 0
        _seed, _offset = seed, offset


def draw() -> tuple[int, int]:
    """(stream, index) for the random operation that is being recorded."""
    index = trace.draws
    trace.draws = index + 1
    return max(len(trace.streams) - 1, 0), index


def manual_seed(seed: int) -> None:
    """Seeds the device (any Python integer; taken modulo 2**64 as torch does)."""
    global seedings
    seedings += 1
    seed &= 2**64 - 1
    set_state(seed - 2**64 if seed >= 2**63 else seed, 0)


def get_rng_state() -> torch.Tensor:
    """The generator's state: uint8[16], seed and offset as int64, like a CUDA generator's."""
    return torch.from_numpy(np.array(state(), np.int64).view(np.uint8).copy())


def set_rng_state(state: torch.Tensor) -> None:
    """Restores what `get_rng_state` returned.

    Raises:
        TypeError: `state` is not a uint8 tensor.
        ValueError: it does not hold 16 bytes.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        got = f"a {state.dtype} tensor" if isinstance(state, torch.Tensor) else type(state).__name__
        raise TypeError(f"set_rng_state expects the uint8 tensor that get_rng_state() returned, got {got}")
    if state.numel() != 16:
        raise ValueError(f"set_rng_state expects 16 bytes (seed and offset of a 'jax' generator), got {state.numel()}")
    seed, offset = state.cpu().numpy().view(np.int64)
    set_state(int(seed), int(offset))
