"""The arguments of a step: flattened for a call, kept in a folder when the step is bad, and replayed from there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.errors import FileError
from xla_amp.jax import compat
from xla_amp.jax.modules import nnx_state
from xla_amp.recorder import bad_step
from xla_amp.recorder.bad_step import BadStep
from xla_amp.recorder.history import History

_ARRAYS: Final = "batch.npz"


_KEPT: Final = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class Call:
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


def keep(directory: Path, bad: BadStep, history: History, leaves: Mapping[int, Any]) -> Path:
    """Writes the folder of a bad step and returns its path; leaves that are no arrays or numbers are not kept."""
    path = bad_step.folder(directory, bad.step, bad.rank)
    path.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    kept: Mapping[int, Any] = {index: leaf for index, leaf in leaves.items() if isinstance(leaf, _KEPT)}
    for index, leaf in kept.items():
        if compat.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kinds[str(index)] = f"key<{jax.random.key_impl(leaf)}>"
            arrays[str(index)] = np.asarray(jax.random.key_data(leaf))
            continue
        array = np.asarray(leaf)
        kinds[str(index)] = type(leaf).__name__ if isinstance(leaf, bool | int | float | complex) else str(array.dtype)
        # NumPy's files do not store bfloat16 and float8.
        arrays[str(index)] = array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array
    np.savez(path / _ARRAYS, **arrays)
    bad = dataclasses.replace(bad, options={**bad.options, "leaves": kinds})
    bad_step.write(path, bad, history)
    return path


def load(path: Path) -> tuple[BadStep, dict[int, Any]]:
    """A bad step and the leaves that were kept.

    Raises:
        FileError: the folder is missing, malformed, or of another front.
    """
    bad = bad_step.read(path)
    if bad.front != "jax":
        raise FileError(f"{path}: a bad step of the {bad.front} front; `xla-amp replay` runs it")
    try:
        with np.load(path / _ARRAYS, allow_pickle=False) as archive:
            kinds: Mapping[str, str] = bad.options["leaves"]
            return bad, {int(name): _restored(archive[name], kind) for name, kind in kinds.items()}
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise FileError(f"{path / _ARRAYS}: {error}") from error


def _restored(array: Any, kind: str) -> Any:
    if kind.startswith("key<"):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind[4:-1])
    if kind in ("bool", "int", "float", "complex") and not array.ndim:
        return {"bool": bool, "int": int, "float": float, "complex": complex}[kind](array)
    dtype = jnp.dtype(kind)
    return jnp.asarray(array.view(dtype) if array.dtype != dtype else array)
