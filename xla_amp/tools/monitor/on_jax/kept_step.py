"""The arguments of a step: flattened for a call, kept in a folder when the step is bad, and replayed from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.errors import FileError
from xla_amp.jax import compat
from xla_amp.jax.modules import nnx_state
from xla_amp.tools.monitor import bad_step
from xla_amp.tools.monitor.bad_step import BadStep

_ARRAYS: Final = "batch.npz"


_KEPT: Final = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class PureCall:
    """A call of a step as a pure function of the leaves of its arguments.

    Args:
        step: the function.
        args: its positional arguments; objects of `flax.nnx` among them are split.
        kwargs: its named arguments.
    """

    def __init__(self, step: Any, args: Any, kwargs: Any) -> None:
        lifted = nnx_state.functionalize(step, args, kwargs)
        self._step = step
        self.finish: Callable[[Any], Any] = lambda out: out
        graph = None
        if lifted is not None:
            self._step, args, self.finish = lifted
            kwargs = {}
            graph = self._step.graph
        self.leaves, self._tree = jax.tree.flatten((args, kwargs))
        others = tuple(
            type(leaf) if isinstance(leaf, bool | int | float | complex) else leaf
            for leaf in self.leaves
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic)
        )
        arrays = tuple((leaf.shape, leaf.dtype) for leaf in self.leaves if hasattr(leaf, "dtype"))
        self.key = (self._tree, graph, others, arrays)
        """Equal for calls that differ in the values of arrays and numbers only."""

    def run(self, leaves: Sequence[Any]) -> Any:
        """The call with other leaves; `finish` makes the step's result of what it returns."""
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return self._step(*args, **kwargs)


def write(folder: Path, leaves: Mapping[int, Any]) -> dict[str, Any]:
    """Writes the arrays and numbers among `leaves`, and returns what `load` needs to know about them."""
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    kept: Mapping[int, Any] = {index: leaf for index, leaf in leaves.items() if isinstance(leaf, _KEPT)}
    parts: dict[str, Any] = {}
    for index, leaf in kept.items():
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            kinds[str(index)] = str(leaf.dtype)
            places = {_place(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
            parts[str(index)] = {"shape": list(leaf.shape), "places": list(places)}
            for number, data in enumerate(places.values()):
                arrays[f"{index}.{number}"] = _storable(np.asarray(data))
            continue
        if compat.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kinds[str(index)] = f"key<{jax.random.key_impl(leaf)}>"
            arrays[str(index)] = np.asarray(jax.random.key_data(leaf))
            continue
        array = np.asarray(leaf)
        kinds[str(index)] = type(leaf).__name__ if isinstance(leaf, bool | int | float | complex) else str(array.dtype)
        arrays[str(index)] = _storable(array)
    np.savez(folder / _ARRAYS, **arrays)
    return {"leaves": kinds, "parts": parts}


def _storable(array: Any) -> Any:
    # NumPy's files do not store bfloat16 and float8.
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


_Place: TypeAlias = tuple[tuple[int, int], ...]
"""Of a part of an array: start and stop on each axis."""


def _place(index: tuple[slice, ...], shape: Sequence[int]) -> _Place:
    return tuple(each.indices(length)[:2] for each, length in zip(index, shape, strict=True))


def load(path: Path) -> tuple[BadStep, dict[int, Any]]:
    """A bad step and the leaves that were kept; those that the processes had in parts are joined.

    Raises:
        FileError: the folder is missing, malformed, or of another front.
    """
    bad = bad_step.read(path)
    if bad.front != "jax":
        raise FileError(f"{path}: a bad step of the {bad.front} front; `xla-amp monitor replay` runs it")
    try:
        kinds: Mapping[str, str] = bad.options["leaves"]
        with np.load(path / _ARRAYS, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in kinds if name in archive}
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise FileError(f"{path / _ARRAYS}: {error}") from error
    for name, part in bad.options.get("parts", {}).items():
        arrays[name] = _joined(path, name, tuple(part["shape"]))
    return bad, {int(name): _restored(array, kinds[name]) for name, array in arrays.items()}


def _parts(path: Path, name: str) -> Iterator[tuple[int, _Place, Any]]:
    """(rank, place, values) of each part of a leaf, from the folders of all processes."""
    for folder in bad_step.ranks(path.parent):
        bad = bad_step.read(folder)
        with np.load(folder / _ARRAYS, allow_pickle=False) as archive:
            for number, place in enumerate(bad.options.get("parts", {})[name]["places"]):
                yield bad.rank, tuple((start, stop) for start, stop in place), archive[f"{name}.{number}"]


def _joined(path: Path, name: str, shape: tuple[int, ...]) -> Any:
    whole, known = None, np.zeros(shape, bool)
    for _, place, values in _parts(path, name):
        whole = np.empty(shape, values.dtype) if whole is None else whole
        at = tuple(slice(*each) for each in place)
        whole[at], known[at] = values, True
    if whole is None or not known.all():
        raise FileError(f"{path.parent}: argument {name} has a part in no folder; do all processes write to one?")
    return whole


def rank_of(path: Path, bad: BadStep, row: int, rows: int) -> int | None:
    """The process that had row `row` of an argument of `rows` rows; None if no single one had it."""
    for name, part in bad.options.get("parts", {}).items():
        if part["shape"][:1] == [rows]:
            found = {rank for rank, place, _ in _parts(path, name) if place[0][0] <= row < place[0][1]}
            if len(found) == 1:
                return found.pop()
    return None


def _restored(array: Any, kind: str) -> Any:
    if kind.startswith("key<"):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind[4:-1])
    if kind in ("bool", "int", "float", "complex") and not array.ndim:
        return {"bool": bool, "int": int, "float": float, "complex": complex}[kind](array)
    dtype = jnp.dtype(kind)
    return jnp.asarray(array.view(dtype) if array.dtype != dtype else array)
