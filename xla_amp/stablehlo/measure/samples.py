"""Sample arguments of a module: random, or from an ``.npz`` file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_amp.errors import FileError, ModuleError
from xla_amp.stablehlo import ir


def random_inputs(module: ir.MlirModule, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Random arguments: normal floats, integers 0 and 1 (valid as any index), random booleans.

    Floats of two or more dimensions have the standard deviation of initial weights, 1 / sqrt(shape[-2]), so that values
    stay of order one through several layers.  Other floats have standard deviation 1.

    Raises:
        ModuleError: an argument has no fixed shape, or more bytes than there is memory.
    """
    generator = np.random.default_rng(seed % 2**64)
    inputs, first = ir.signature(module).inputs, _platforms(module)
    try:
        given = [_random(generator, kind, index) for index, kind in enumerate(inputs[len(first) :], len(first))]
        return [*first, *given]
    except MemoryError:
        kinds = ", ".join(map(str, inputs))
        raise ModuleError(f"arguments {kinds}: this machine has too little memory for them") from None


def _random(generator: np.random.Generator, kind: ir.TensorType | None, index: int) -> np.ndarray[Any, Any]:
    if kind is None or -1 in kind.shape:
        raise ModuleError(f"argument {index} has no fixed shape: random values need one, give an .npz of samples")
    shape, dtype = kind.shape, ir.numpy_dtype(kind.element)
    if kind.element.startswith("complex"):
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(dtype)
    if kind.element.lstrip("u").startswith("i"):
        return generator.integers(0, 2, shape).astype(dtype)
    deviation = 1 / max(1, shape[-2]) ** 0.5 if len(shape) > 1 else 1.0
    return (generator.standard_normal(shape) * deviation).astype(dtype)


def read_samples(path: str | os.PathLike[str]) -> list[np.ndarray[Any, Any]]:
    """The arrays of an ``.npz`` file in the order in which they were saved; names are ignored.

    Raises:
        FileError: the file cannot be read.
        ModuleError: not an ``.npz`` file.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ModuleError(f"reading {os.fspath(path)}: one array; expected an .npz, one array per argument")
        with archive:
            return [archive[name] for name in archive.files]
    except OSError as error:
        raise FileError(f"reading {os.fspath(path)}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise ModuleError(f"reading {os.fspath(path)}: not an .npz file of plain arrays ({error})") from None


def fitted(arrays: Sequence[Any], module: ir.MlirModule, name: str = "module") -> list[np.ndarray[Any, Any]]:
    """`arrays` cast to the dtypes of the module's arguments, within floats, integers, booleans or complex numbers.

    Raises:
        ModuleError: the number, a shape or a kind of dtype differs.
    """
    inputs, first = ir.signature(module).inputs, _platforms(module)
    arrays = [*first, *arrays] if len(arrays) == len(inputs) - len(first) else arrays
    if len(arrays) != len(inputs):
        takes = ", ".join(map(str, inputs))
        why = "; jax.jit leaves out arguments that nothing reads, without keep_unused=True"
        raise ModuleError(
            f"{name}: it takes {len(inputs)} arguments ({takes}), the samples are {len(arrays)} arrays"
            f"{why if len(arrays) > len(inputs) else ''}"
        )
    return [_fitted(np.asarray(array), kind, f"{name}, argument {i}")
            for i, (array, kind) in enumerate(zip(arrays, inputs, strict=True))]  # fmt: skip


def _platforms(module: ir.MlirModule) -> list[np.ndarray[Any, Any]]:
    """For a program that ``jax.export`` made for several platforms the number of the first, which is its argument 0."""
    given = ir.attribute(ir.entry(module), "arg_attrs") or ()
    return [np.zeros((), np.int32) for each in given if "jax.global_constant" in each]


def _fitted(array: np.ndarray[Any, Any], kind: ir.TensorType | None, name: str) -> np.ndarray[Any, Any]:
    if kind is None:
        raise ModuleError(f"{name}: not a tensor")
    dtype = ir.numpy_dtype(kind.element)
    if array.dtype.kind == "V":  # NumPy files do not store the name of bfloat16 and of 8-bit dtypes
        saved = ir.numpy_dtype("bf16") if array.dtype.itemsize == 2 else dtype
        if array.dtype.itemsize != saved.itemsize:
            raise ModuleError(
                f"{name}: expected {kind}, the sample is of a dtype that .npz files do not name ({array.dtype}); "
                "save it as float32"
            )
        array = array.view(saved)
    fits = len(array.shape) == len(kind.shape) and all(
        size in (-1, given) for size, given in zip(kind.shape, array.shape, strict=True)
    )
    if not fits or _kind(array.dtype) != _kind(dtype):
        raise ModuleError(f"{name}: expected {kind}, the sample is {array.dtype}{list(array.shape)}")
    return array.astype(dtype)


def _kind(dtype: np.dtype[Any]) -> str:
    return {"u": "integer", "i": "integer", "b": "bool", "c": "complex"}.get(dtype.kind, "float")
