"""Values that the processes of one mesh hold alike: compared before a program runs, taken from the first process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from xla_amp.errors import EngineError
from xla_amp.lazy import processes
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph import generator
from xla_amp.lazy.programs import mesh

ComparedArray: TypeAlias = np.ndarray | jax.Array
"""An array on the mesh, or Python numbers of a program as an array on the host."""
_LISTED = 4
"""Shapes of differing values that an error names."""
_left = 8
"""New programs whose arrays are still compared; each time the host reads all of them."""


def compare_inputs(arguments: Sequence[ComparedArray]) -> None:
    """Before a new program over a mesh of several processes runs: `compare` of its numbers, at first of all inputs.

    A batch that each process uploaded by itself, and weights from other seeds, are found here.
    """
    global _left
    _left -= 1
    compare(arguments if _left >= 0 else [each for each in arguments if isinstance(each, np.ndarray)])


def compare(arrays: Sequence[ComparedArray]) -> None:
    """Compares arrays that several processes hold whole: XLA takes them to be equal, and does not check.

    Raises:
        EngineError: one is not the same in all processes.
    """
    whole = [each for each in arrays if isinstance(each, np.ndarray) or each.is_fully_replicated]
    mine = [hashlib.sha256(np.asarray(each).tobytes()).hexdigest() for each in whole]
    found = zip(*map(json.loads, processes.rendezvous("values", json.dumps(mine).encode())), strict=True)
    differing = [each for each, digests in zip(whole, found, strict=True) if len(set(digests)) > 1]
    if differing:
        named = ", ".join(map(_named, differing[:_LISTED]))
        more = f" and {len(differing) - _LISTED} more" if len(differing) > _LISTED else ""
        raise EngineError(
            f"the processes of one mesh have different values for {named}{more}, where each holds the same part: make "
            "batches of each process's own rows with xla_amp.global_batch(), and weights with the same seed or with "
            "xla_amp.shard(), which takes those of process 0"
        )


def _named(value: ComparedArray) -> str:
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    return "the Python numbers" if value.dtype == np.float64 else "the seed of random numbers or another Python integer"


def take_from_first(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, which every process has whole, with the values of process 0.  All processes call it."""
    from jax.experimental import multihost_utils

    with private_api.x64():
        bits = [np.atleast_1d(np.asarray(array)).view(np.uint8) for array in arrays]
        sent = multihost_utils.broadcast_one_to_all(bits) if bits else []
        pairs = zip(arrays, map(np.asarray, sent), strict=True)
        return [mesh.put(each.view(array.dtype).reshape(array.shape)) for array, each in pairs]


def one_stream() -> None:
    """Gives the device's random generator the state of process 0's.  All processes call it."""
    texts = processes.rendezvous("random", json.dumps(generator.state()).encode())
    generator.set_state(*json.loads(texts[0]))
