"""Digests of programs by their content, which are the same in every process: names of stored executables.

A trace consists of numbers of instructions, which differ between processes.  Here an instruction is what its ``emit``
function consists of: the code, and everything that the code closes over, described value by value.  A value that has no
description (a function of the user's, a jaxpr, an open file) makes the program one that is not stored.

Functions of this package and of JAX are described by their place in the source, because the digest includes the source
of the package (`_sources`) and the versions of the libraries.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import platform
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import torch
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from xla_amp import hardware
from xla_amp.common import config
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Instruction, Spec
from xla_amp.lazy.programs import compile_options, mesh, pjrt
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lowering import forms

_DEEPEST: Final = 24
"""Levels of nested values; deeper ones are taken for a cycle."""
_PACKAGE: Final = Path(__file__).parents[2]
_ROOTS: Final = {_PACKAGE: "xla_amp", Path(jax.__path__[0]): "jax", Path(np.__path__[0]): "numpy"}
"""Folder -> package whose functions are described by their place in it."""
_PACKAGES: Final = ("xla_amp", "jax", "jaxlib", "numpy", "ml_dtypes", "torch", "builtins", "math", "operator")
"""Packages whose classes and built-in functions are described by name."""
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_NAMED: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, range, PartitionSpec)
"""Classes whose `repr` says all."""
_NOT_OF_PROGRAMS: Final = re.compile("cache|log|dump|guard|traceback|source|proxy|pprint|preemption|platform")
"""Words in the names of JAX's options that do not change a program; its platform is known by its device."""
_PERMANENT: Final = ("Lowering", "SchemaArgument")
"""Classes of this package whose objects last as long as the process: rows of its table, and arguments of operators."""
_texts: dict[int, tuple[Any, str]] = {}
"""id of such an object -> the object, and its description."""
_SHAPES: Final = (".py", ".toml")
_digests: weakref.WeakKeyDictionary[Instruction, bytes] = weakref.WeakKeyDictionary()


class NoDescriptionError(Exception):
    """A program contains a value that other processes cannot recognize."""


def digest(program: XlaProgram, arguments: Sequence[Any]) -> str:
    """The name of a program's executable: equal for equal programs on equal machines with equal libraries.

    Args:
        program: that is going to be compiled.
        arguments: of its call, which have shardings and memory layouts.

    Raises:
        NoDescriptionError: it contains a value that has no description.
    """
    memory = program.key.spent, program.donated, program.kept, list(map(_argument, jax.tree.leaves(arguments)))
    return hashlib.sha256(_environment() + meaning(program) + repr(memory).encode()).hexdigest()


def meaning(program: XlaProgram) -> bytes:
    """Digest of what a program computes, whichever inputs it may overwrite; processes that run it together have one.

    Raises:
        NoDescriptionError: as `digest`.
    """
    key = program.key
    parts = hashlib.sha256(_sources().encode())
    for node in nodes(key.code):
        parts.update(_of_instruction(node.instruction))
        parts.update(repr((tuple(node.draw), tuple(node.inputs))).encode())
    layouts = [*key.shardings.parameters, *key.shardings.wanted]
    places = layouts and list(map(_sharding, layouts)), key.shardings.in_product_dtype
    parts.update(repr((key.wanted, program.context, places)).encode())
    return parts.digest()


def _environment() -> bytes:
    """What shapes every program of this process, now."""
    options = {name: repr(value) for name, value in jax.config.values.items() if not _NOT_OF_PROGRAMS.search(name)}
    found = (
        _machine(),
        sorted(options.items()),
        sorted(config.xla_environment().items()),
        sorted(compile_options.for_platform(pjrt.platform()).items()),
        sorted(forms.refused),
        mesh.active and _mesh(mesh.active),
        mesh.replicas,
    )
    return repr(found).encode()


@functools.cache
def _machine() -> tuple[Any, ...]:
    """The versions of the libraries, the device, and of the CPU what code is made for."""
    device = pjrt.jax_device()
    versions = (sys.version, *map(metadata.version, ("torch", "jax", "jaxlib", "numpy")))
    client: Any = device.client
    count = len(jax.devices(device.platform))
    processor = hardware.processor()
    # XLA:CPU's code uses the instructions that the CPU has, and splits work by the count of threads.
    cpu = (platform.machine(), processor.name, sorted(processor.flags), processor.cores)
    kind = device.platform, str(device.device_kind), client.platform_version
    return versions, kind, count, device.id, device.process_index, cpu


def source_files() -> list[Path]:
    """The files of this package that shape programs: source, and tables."""
    # Not `Path.rglob`, which leaves out links: a checkout has the lowerings behind one.
    folders = os.walk(_PACKAGE, followlinks=True)
    return sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_SHAPES))


@functools.cache
def _sources() -> str:
    """Digest of the source of this package."""
    files = source_files()
    if not files:
        raise NoDescriptionError("functions of this package, which is installed without its source")
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


@functools.cache
def command() -> str:
    """The name of a list of the programs that this command uses, here and with these libraries (`disk.Ahead`).

    Empty for a session without a script, whose programs nothing foretells.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not source_files():
        return ""
    parts = _machine(), _sources(), os.path.abspath(script), sys.argv[1:]
    return f"list-{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def _argument(value: Any) -> Any:
    """Shape, dtype, place and memory layout of an argument of a call."""
    if not isinstance(value, jax.Array):
        return value.shape, str(value.dtype)
    array: Any = value
    return array.shape, str(array.dtype), array.committed, _sharding(array.sharding), repr(array.format.layout)


def _sharding(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, SingleDeviceSharding):
        return sorted(map(_id_of, value.device_set)), value.memory_kind
    if isinstance(value, NamedSharding):
        return _mesh(value.mesh), repr(value.spec), value.memory_kind
    raise NoDescriptionError(f"a sharding {type(value).__name__}")


def _id_of(device: Any) -> int:
    return int(device.id)


def _mesh(value: Any) -> Any:
    devices = [] if isinstance(value, AbstractMesh) else [device.id for device in value.devices.flat]
    return tuple(value.shape.items()), repr(value.axis_types), devices


# -- instructions ---------------------------------------------------------------------------------------------------


def _of_instruction(instruction: Instruction) -> bytes:
    found = _digests.get(instruction)
    if found is None:
        parts = (
            instruction.name, instruction.emit, instruction.outs, instruction.inputs, instruction.floats,
            instruction.ints, instruction.random, instruction.takes, instruction.minor,
        )  # fmt: skip
        text = "\n".join(_describe(parts, 0))
        found = _digests[instruction] = hashlib.sha256(text.encode()).digest()
    return found


def _describe(value: Any, depth: int) -> Iterator[str]:
    """The parts of a value, in an order that does not depend on the process.

    Raises:
        NoDescriptionError: the value has none.
    """
    kind: Any = type(value)
    if depth > _DEEPEST:
        raise NoDescriptionError(f"a {kind.__qualname__} nested {_DEEPEST} levels deep")
    if kind in _PLAIN or issubclass(kind, _NAMED):
        yield f"{kind.__name__} {value!r}"
    elif (rule := _rule(kind)) is not None:
        yield f"{kind.__module__}.{kind.__qualname__}"
        for part in rule(value):
            yield from _describe(part, depth + 1)
        yield "end"
    elif kind.__name__ in _PERMANENT and _is_of(kind, ("xla_amp",)):
        if id(value) not in _texts:
            _texts[id(value)] = value, "\n".join(_described_attributes(value, depth))
        yield _texts[id(value)][1]
    elif _is_of(kind, ("xla_amp",)):
        yield from _described_attributes(value, depth)
    elif _is_of(kind, ("jax", "jaxlib")) and callable(value) and hasattr(value, "__wrapped__"):
        yield f"{kind.__qualname__}"
        yield from _describe(value.__wrapped__, depth + 1)
    elif _is_of(value, _PACKAGES) and hasattr(value, "__name__"):  # a built-in function, a ufunc, a scalar class of JAX
        yield f"{value.__module__}.{getattr(value, '__qualname__', value.__name__)}"
    else:
        raise NoDescriptionError(f"a {kind.__module__}.{kind.__qualname__}")


@functools.cache
def _rule(kind: Any) -> Callable[[Any], Iterator[Any]] | None:
    return next((rule for known, rule in _RULES if issubclass(kind, known)), None)


def _described_attributes(value: Any, depth: int) -> Iterator[str]:
    yield f"{type(value).__module__}.{type(value).__qualname__}"
    yield from _describe(dict(_attributes(value)), depth + 1)


def _is_of(value: Any, packages: Sequence[str]) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in packages


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return
    if not hasattr(value, "__dict__"):
        raise NoDescriptionError(f"a {type(value).__qualname__} without attributes")
    yield from vars(value).items()


def _numbers(value: Any) -> Iterator[Any]:
    if value.dtype.hasobject:
        raise NoDescriptionError("an array of objects")
    yield from (value.dtype, value.shape, value.tobytes())


def _function(function: types.FunctionType) -> Iterator[Any]:
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        raise NoDescriptionError(f"the function {function.__qualname__} closes over an unset variable") from None
    yield from (list(_code(function.__code__)), cells, function.__defaults__, function.__kwdefaults__)


@functools.lru_cache(maxsize=4096)
def _code(code: types.CodeType) -> tuple[Any, ...]:
    """Where a function is written; two of one line differ in their instructions or constants."""
    path = Path(code.co_filename)
    root = next((root for root in _ROOTS if path.is_relative_to(root)), None)
    if root is None:
        raise NoDescriptionError(f"the function {code.co_qualname} in {code.co_filename}")
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    place = (_ROOTS[root], path.relative_to(root).as_posix(), code.co_firstlineno, code.co_qualname)
    return (*place, code.co_code, code.co_names, constants)


def _class(value: type) -> Iterator[Any]:
    if not _is_of(value, _PACKAGES):
        raise NoDescriptionError(f"the class {value.__qualname__}")
    yield f"{value.__module__}.{value.__qualname__}"


def _mapping(value: Mapping[Any, Any]) -> Iterator[Any]:
    yield from ((key, value[key]) for key in value)


def _module(value: types.ModuleType) -> Iterator[Any]:
    if value.__name__.partition(".")[0] not in _PACKAGES:
        raise NoDescriptionError(f"the module {value.__name__}")
    yield value.__name__


_RULES: Final[tuple[tuple[Any, Callable[[Any], Iterator[Any]]], ...]] = (
    (enum.Enum, lambda value: iter((value.name,))),
    (Spec, lambda value: iter((value.shape, value.dtype))),
    (jax.ShapeDtypeStruct, lambda value: iter((value.shape, value.dtype, value.sharding))),
    ((Mesh, AbstractMesh), lambda value: iter((_mesh(value),))),
    (jax.sharding.Sharding, lambda value: iter((_sharding(value),))),
    ((np.ndarray, np.generic), _numbers),
    (slice, lambda value: iter((value.start, value.stop, value.step))),
    ((tuple, list), iter),
    ((set, frozenset), lambda value: iter(sorted("\n".join(_describe(each, 0)) for each in value))),
    ((dict, types.MappingProxyType), _mapping),
    (types.FunctionType, _function),
    (types.MethodType, lambda value: iter((value.__func__, value.__self__))),
    (functools.partial, lambda value: iter((value.func, value.args, value.keywords))),
    (jax.custom_jvp, lambda value: iter((value.fun, value.jvp, value.nondiff_argnums))),
    (jax.custom_vjp, lambda value: iter((value.fun, value.fwd, value.bwd, value.nondiff_argnums))),
    (types.ModuleType, _module),
    (type, _class),
)
"""Classes, and what a value of them consists of; the first row that fits counts."""
