"""Walk the Python values that a step can reach by the names in its code.

A walk starts at the step's arguments and its function.  It follows closures, globals, defaults and bound arguments of
functions of the user; attributes of objects, classes and modules whose name occurs in that code; and the items of
containers.  It gives a flat list with an entry for each value: type and value of numbers, texts and the like, type and
length of containers, identity of what has no value to compare.  Two equal lists mean that the code finds the same
values.

Code of libraries (the standard library and installed packages) is not followed.  Objects of other packages than torch,
JAX and NumPy are, as the configuration of a model of transformers is.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import io
import operator
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, Final

import numpy as np
import torch
from torch.optim import Optimizer

from xla_amp.lazy import private_api
from xla_amp.lazy.capture.module_tree import LEAVES, ModuleTree, hooks_of, identity, plain
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

MOST: Final = 4000
"""Values that a walk may find: one takes about a microsecond, and each call walks."""
LARGEST_ARRAY: Final = 64 * 1024
"""Bytes of an array or tensor on the host that a walk compares."""

_PLAIN: Final = (bool, int, float, str, type(None))
_CONTAINERS: Final = (list, tuple, collections.deque, Mapping, set, frozenset)
_BASES: Final = (bool, int, float, complex, str, bytes)
_OPAQUE: Final = frozenset({"torch", "jax", "jaxlib", "numpy", "xla_amp", "logging", "optax", "flax"})
"""Packages whose objects are compared by identity."""
ALWAYS: Final = frozenset({"forward", "backward", "setup_context"})
"""Names of functions that torch calls."""
_CONSTRUCTORS: Final = frozenset({"__init__", "__new__", "__post_init__"})
_SILENT: Final = frozenset({"__init_subclass__", "__repr__", "__str__", "__reduce__", "__del__"})
"""Methods of classes that are not followed."""
_COMPUTED: Final = frozenset({"getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple"})
"""Names by which code reads attributes that it does not name: then plain values of all names are compared."""
_WHOLE_SCOPE: Final = frozenset({"globals", "eval", "exec"})
_FINDS_MODULES: Final = frozenset({"modules", "import_module", "__import__"})
"""Names by which code finds a module by a text."""
_CHANGING: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "time": "pass the time as an argument",
        "random": "draw on the device with torch, or pass what was drawn as an argument",
        "numpy.random": "draw on the device with torch, or pass what was drawn as an argument",
    }
)
"""Modules whose functions give another value at each call -> what to do instead."""
_DATA: Final = ("types", "argparse")
"""Packages of the standard library whose objects hold values of the user."""
_FOLDERS: Final = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class NotReplayableError(Exception):
    """A step cannot be replayed; the text is the reason for the user."""


@dataclasses.dataclass(eq=False)
class Values:
    """What a walk has found; equal to what another has if the code finds the same.

    A step may bind a new tensor, so `storages` are no part of the comparison: a replay must find those that the
    captured call left.
    """

    found: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    """(type, value) of each; of a tree of modules a list of (label, entry), shared while no object is replaced."""
    labels: list[str] = dataclasses.field(default_factory=list)
    """What each is called in messages."""
    storages: list[int] = dataclasses.field(default_factory=list)
    """The storages of the device's tensors."""
    objects: list[Any] = dataclasses.field(default_factory=list)
    """Which modules, optimizers, scalers and leaves were found; compared by `Guards.hold`."""
    kept: list[Any] = dataclasses.field(default_factory=list)
    """What is compared by identity, so that no other object gets its id."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and self.found == other.found

    def difference(self, after: Values) -> str | None:
        """A description of the first value that differs from a later one; None if none does."""
        if self == after:
            return None
        for (before, old), (label, new) in zip(self._entries(), after._entries(), strict=False):
            if old != new:
                return changed(label, old, new) if before == label else label
        return "which values it can see"

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for label, (kind, what) in zip(self.labels, self.found, strict=True):
            if kind is ModuleTree:
                yield from what
            else:
                yield label, (kind, what)


class Walk:
    """One walk, and what it has found: `values`, and the objects in them that a step computes with.

    Args:
        roots: where it starts: arguments and the step, with their names for messages.
        names: attributes that are followed; gets the names in the code that is found.
        trees: the trees of modules that were read before, by the id of their first module; gets those that are found.

    Raises:
        NotReplayableError: it reaches a value that cannot be compared, or too many.
    """

    def __init__(self, roots: Mapping[str, Any], names: set[str], trees: dict[int, ModuleTree]) -> None:
        self._names, self._known = names, trees
        self._computed = not names.isdisjoint(_COMPUTED)
        self._seen: dict[int, tuple[int, Any]] = {}
        """`id` of each object -> its number, and the object: no new one may get its id during the walk."""
        self.values = Values()
        self.trees: list[ModuleTree] = []
        """The modules, with those below each."""
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.leaves: list[torch.Tensor] = []
        """Tensors that get gradients, besides those of modules and optimizers."""
        for label, root in roots.items():
            self._value(root, label)
        self._modules_by_name()
        for hook in private_api.hooks_of_all_modules():
            if not str(getattr(hook, "__module__", "")).startswith("xla_amp."):  # ours come and go with each step
                self._value(hook, "a hook of all modules")
        self.values.objects += [tree.members for tree in self.trees]
        self.values.objects += map(id, (*self.optimizers, *self.scalers, *self.leaves))

    def _add(self, kind: Any, what: Any, label: str) -> None:
        self.values.found.append((kind, what))
        self.values.labels.append(label)
        if len(self.values.found) > MOST:
            raise NotReplayableError(
                f"it can see more than {MOST:,} Python values, most of them in {self._largest()}; keep that in a "
                "tensor on the device, or where the step's code does not name it"
            )

    def _largest(self) -> str:
        containers = [
            (size, f"{label or 'a container'}, a {kind.__name__} ({size:,} items)")
            for label, (kind, size) in zip(self.values.labels, self.values.found, strict=True)
            if isinstance(kind, type) and issubclass(kind, _CONTAINERS) and type(size) is int
        ]
        return max(containers, default=(0, "the attributes of objects"))[1]

    def _same(self, value: Any, label: str) -> None:
        """Compares a value by identity."""
        self._add(type(value), id(value), label)
        self.values.kept.append(value)

    def _value(self, value: Any, label: str) -> None:
        """Adds a value, and what it contains."""
        kind: Any = type(value)
        if kind in LEAVES:
            self._add(*plain(value), label)
        elif issubclass(kind, torch.Tensor):
            self._tensor(value, label)
        elif (seen := self._seen.get(id(value))) is not None:
            self._add("again", seen[0], label)
        else:
            self._seen[id(value)] = len(self._seen), value
            if (children := _children(kind)) is not None:
                for name, child in children(value, label):
                    self._value(child, name)
            else:
                _handler(kind)(self, value, label)

    def _refuse(self, label: str, value: Any, remedy: str) -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise NotReplayableError(f"it can see {label or 'a value'}, a {kind}, which cannot be compared; {remedy}")

    # -- containers and values ---------------------------------------------------------------------------------------

    def _mapping(self, value: Mapping[Any, Any], label: str) -> None:
        self._add(type(value), len(value), label)
        for key, item in list(value.items()):
            self._value(key, f"a key of {label}")
            self._value(item, f"{label}[{key!r}]" if type(key) in LEAVES else f"an item of {label}")

    def _sequence(self, value: Any, label: str) -> None:
        self._add(type(value), len(value), label)
        for index, item in enumerate(tuple(value)):
            self._value(item, f"{label}[{index}]")
        if type(value) not in (list, tuple) and hasattr(value, "__dict__"):
            self._attributes(value, label)

    def _set(self, value: Any, label: str) -> None:
        self._add(type(value), len(value), label)
        leaves = frozenset((type(each), repr(each) if type(each) in LEAVES else id(each)) for each in value)
        self._add("items", leaves, label)
        self.values.kept.extend(value)

    def _names_in_c(self, value: Any, label: str) -> None:
        self._same(value, label)
        self._names.update(part for name in value.__reduce__()[1] for part in str(name).split("."))  # "a.b"

    def _array(self, value: Any, label: str) -> None:
        if value.dtype.hasobject:
            self._refuse(label, value, "use an array of numbers")
        if value.nbytes > LARGEST_ARRAY:
            self._refuse(label, value, f"its {value.nbytes:,} bytes on the host are too many; move them to the device")
        self._add((type(value), value.dtype.str, value.shape), value.tobytes(), label)

    def _tensor(self, value: torch.Tensor, label: str) -> None:
        if value.device.type == DEVICE_TYPE and value.layout is torch.strided:
            self._add(
                torch.Tensor,
                (value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad),
                label,
            )
            self.values.storages.append(id(tensor_io.buffer_of(value)))
            if value.requires_grad and value.is_leaf:
                self.leaves.append(value)
        elif value.device.type == "cpu" and value.layout is torch.strided:
            if value.nbytes > LARGEST_ARRAY:
                self._refuse(label, value, f"its {value.nbytes:,} bytes are too many; move it to the device")
            memory = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            self._add((value.dtype, value.shape), memory.numpy().tobytes(), label)
        for hook in hooks_of(value):
            self._value(hook, f"a hook of {label}")

    def _bytes(self, value: Any, label: str) -> None:
        self._add(type(value), bytes(value), label)

    def _stream(self, value: Any, label: str) -> None:
        self._refuse(label, value, "read it outside of the step, and pass what was read")

    def _collect(self, value: Any, label: str) -> None:
        # What they compute with is compared by `cache_entry`.
        (self.optimizers if isinstance(value, Optimizer) else self.scalers).append(value)
        self._add(*identity(value), label)
        if isinstance(value, Optimizer) and "param_groups" in self._names:  # the code reads them itself
            for number, group in enumerate(value.param_groups):
                options = {name: item for name, item in group.items() if name != "params"}
                self._value(options, f"{label}.param_groups[{number}]")

    # -- functions ---------------------------------------------------------------------------------------------------

    def _function(self, value: types.FunctionType, label: str) -> None:
        code = value.__code__
        if _is_library(code.co_filename):
            self._same(value, label)
            self._wrapped(value, label)
            return
        self._same(code, label)
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            self._value(_content(cell), name)
        scope = value.__globals__
        for name in _names(code):
            if name in _WHOLE_SCOPE and name not in scope:
                raise NotReplayableError(
                    f"{label} calls {name}(), which can see every global; name what it reads, or pass it as an argument"
                )
            if name in scope:
                self._value(scope[name], name)
            elif isinstance(module := sys.modules.get(name), types.ModuleType):
                self._value(module, name)  # imported inside
        for text in _texts(code):
            self._module_of_name(text, not _FINDS_MODULES.isdisjoint(_names(code)))
        for item in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self._value(item, f"a default of {label}")
        for name, item in value.__dict__.items():
            self._value(item, f"{label}.{name}")
        self._names.update(_names(code), _texts(code))

    def _builtin(self, value: Any, label: str) -> None:
        self._same(value, label)
        owner: Any = getattr(value, "__self__", None)
        kind: Any = type(owner)
        if owner is not None and not isinstance(owner, types.ModuleType | type) and not _is_opaque(kind):
            self._value(owner, label)

    def _scheduler(self, value: Any, label: str) -> None:
        self._add(*identity(value), label)
        if not self._names.isdisjoint(("get_last_lr", "_last_lr", "get_lr")):
            self._value(value.get_last_lr(), f"{label}.get_last_lr()")

    def _wrapped(self, value: Any, label: str) -> None:
        inner = getattr(value, "__wrapped__", None)
        if inner is not None:
            self._value(inner, label)

    # -- modules, classes, objects -----------------------------------------------------------------------------------

    def _modules_by_name(self) -> None:
        """Adds the modules whose names are values that were found, if the code finds modules by name."""
        if not self._names.isdisjoint(_FINDS_MODULES):
            for kind, text in self.values.found:  # it grows meanwhile
                if kind is str:
                    self._module_of_name(text, False)

    def _module_of_name(self, name: str, libraries: bool) -> None:
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType) and (libraries or not _is_library_module(module)):
            self._value(module, f"sys.modules[{name!r}]")

    def _python_module(self, value: types.ModuleType, label: str) -> None:
        self._same(value, label)
        library = _is_library_module(value)
        if value.__name__ in _CHANGING and (called := self._names.intersection(vars(value))):
            name = f"{value.__name__}.{min(called)}"
            self._refuse(name, getattr(value, min(called)), _CHANGING[value.__name__])
        if value is os:
            self._value(os.environ, "os.environ")
            return
        space = vars(value)
        for name in sorted(self._names.intersection(space)):
            if not library or _is_plain(space[name]):
                self._value(space[name], f"{label}.{name}")
        if self._computed and not library:
            for name, item in list(space.items()):
                if _is_plain(item) and name not in self._names and not name.startswith("__"):
                    self._value(item, f"{label}.{name}")

    def _class(self, value: type, label: str) -> None:
        self._body(value, label, _SILENT)

    def _kind(self, value: type, label: str) -> None:
        """Adds the class of an object, whose constructor has run."""
        if ~id(value) not in self._seen:  # which `value` has not
            self._seen[~id(value)] = len(self._seen), value
            self._body(value, label, _SILENT | _CONSTRUCTORS)

    def _body(self, value: type, label: str, without: frozenset[str]) -> None:
        self._same(value, label)
        if _is_opaque(value) or _is_library(getattr(sys.modules.get(value.__module__), "__file__", None)):
            return
        for base in value.__mro__:
            if _is_opaque(base) or base is object:
                continue
            for name, item in list(base.__dict__.items()):
                special = name.startswith("__") and isinstance(item, types.FunctionType)
                if (special or name in self._names) and name not in without:
                    self._value(item, f"{label}.{name}")
        if type(value) is not type:
            self._kind(type(value), f"type({label})")

    def _instance(self, value: Any, label: str) -> None:
        kind: Any = type(value)
        base = next((base for base in _BASES if issubclass(kind, base)), None)
        if base is not None:  # a number or text of a subclass
            self._add(kind, repr(base(value)), label)
        if _is_opaque(kind):
            self._same(value, label)
            self._wrapped(value, label)
            return
        self._kind(kind, f"type({label})")
        self._attributes(value, label)

    def _attributes(self, value: Any, label: str) -> None:
        kind: Any = type(value)
        hidden = isinstance(getattr(kind, "__getattribute__", None), types.FunctionType)
        try:
            space = object.__getattribute__(value, "__dict__") if hidden else value.__dict__
        except AttributeError:
            space = {}
        whole = (
            hidden
            or isinstance(getattr(kind, "__getattr__", None), types.FunctionType)
            or dataclasses.is_dataclass(kind)
            or kind.__module__ in _DATA
        )
        for name, item in list(space.items()):
            if whole or name in self._names or (self._computed and type(item) in LEAVES):
                self._value(item, f"{label}.{name}")
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name in ("__dict__", "__weakref__") or not (whole or name in self._names):
                    continue
                try:
                    item = object.__getattribute__(value, name)
                except AttributeError:
                    continue
                self._value(item, f"{label}.{name}")

    def _nn_module(self, value: torch.nn.Module, label: str) -> None:
        tree = self._known.setdefault(id(value), ModuleTree(value, label))
        known = bool(tree.modules)
        tree.update(self._names)
        self.trees.append(tree)
        self._add(ModuleTree, tree.members, label)
        self._add(ModuleTree, tree.values, label)
        for module in tree.modules:
            self._seen.setdefault(id(module), (len(self._seen), module))
        for kind, name in tree.kinds.items():
            if not known:
                self._names.update(_names_of_class(kind))
            self._kind(kind, name)
        for name, item in tree.open:
            self._value(item, name)
        for name, parameter in tree.hooked:
            self._tensor(parameter, name)


_CHILDREN: Final[tuple[tuple[Any, Callable[[Any, str], Iterable[tuple[str, Any]]]], ...]] = (
    (types.MethodType, lambda value, label: (("self", value.__self__), (label, value.__func__))),
    (functools.partial, lambda value, label: zip(repeat(label), (value.func, value.args, value.keywords))),
    (property, lambda value, label: ((label, value.fget),)),
    ((staticmethod, classmethod), lambda value, label: ((label, value.__func__),)),
    (type(functools.lru_cache(len)), lambda value, label: ((label, value.__wrapped__),)),
    (contextvars.ContextVar, lambda value, label: ((label, value.get(None)),)),
    (weakref.ref, lambda value, label: ((label, value()),)),
)
"""Kinds of values that are compared only by what is behind them -> that, with labels."""
_HANDLERS: Final[tuple[tuple[Any, Callable[[Walk, Any, str], None]], ...]] = (
    ((list, tuple, collections.deque), Walk._sequence),
    ((dict, Mapping), Walk._mapping),
    ((set, frozenset), Walk._set),
    (torch.nn.Module, Walk._nn_module),
    (types.FunctionType, Walk._function),
    ((types.BuiltinFunctionType, np.ufunc), Walk._builtin),
    (types.ModuleType, Walk._python_module),
    (enum.Enum, Walk._same),
    ((operator.attrgetter, operator.methodcaller), Walk._names_in_c),
    (torch.optim.lr_scheduler.LRScheduler, Walk._scheduler),
    (type, Walk._class),
    ((np.ndarray, np.generic), Walk._array),
    ((bytearray, array.array), Walk._bytes),
    ((Optimizer, torch.amp.GradScaler), Walk._collect),
    ((io.IOBase, types.GeneratorType), Walk._stream),
)
"""Other kinds of values -> how a walk adds them, the first that fits."""


@functools.lru_cache(maxsize=4096)
def _children(kind: Any) -> Callable[[Any, str], Iterable[tuple[str, Any]]] | None:
    return next((children for kinds, children in _CHILDREN if issubclass(kind, kinds)), None)


@functools.lru_cache(maxsize=4096)
def _handler(kind: Any) -> Callable[[Walk, Any, str], None]:
    other = Walk._stream if hasattr(kind, "__next__") else Walk._instance
    return next((handler for kinds, handler in _HANDLERS if issubclass(kind, kinds)), other)


def changed(label: str, old: tuple[Any, Any], new: tuple[Any, Any]) -> str:
    """A description of a change: name, type and value before, type and value now."""
    (old_kind, before), (new_kind, now) = old, new
    container = old_kind is new_kind and isinstance(old_kind, type) and issubclass(old_kind, _CONTAINERS)
    if container and isinstance(now, int):
        return f"{label} (a {old_kind.__name__}) from {before} to {now} items"
    if old_kind in _PLAIN and new_kind in _PLAIN:
        return f"{label} from {before!r} to {now!r}"
    return label


def _is_plain(value: Any) -> bool:
    return type(value) in LEAVES or isinstance(value, np.generic)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those inside of it use."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


@functools.lru_cache(maxsize=4096)
def _texts(code: types.CodeType) -> tuple[str, ...]:
    """Constants of a function that could be names, for ``getattr`` and ``sys.modules``."""
    found: list[str] = []
    constants = list(code.co_consts)
    for each in constants:  # it grows meanwhile
        if isinstance(each, tuple | frozenset):
            constants.extend(each)
        elif isinstance(each, types.CodeType):
            found.extend(_texts(each))
        elif isinstance(each, str) and each.replace(".", "").isidentifier():
            found.append(each)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _names_of_class(kind: Any) -> frozenset[str]:
    """Names in the code of a module's class, of libraries too, up to `torch.nn.Module`."""
    return frozenset(name for function in _functions(kind) for name in _names(function.__code__))


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if base is torch.nn.Module:
            return
        for name, item in base.__dict__.items():
            if name in _CONSTRUCTORS:
                continue
            function: Any = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, types.FunctionType):
                yield function


@functools.lru_cache(maxsize=4096)
def _is_library(file: str | None) -> bool:
    """Whether code of the file belongs to the standard library or an installed package."""
    return file is not None and (file.startswith(("<frozen", *_FOLDERS)) or "site-packages" in file)


def _is_library_module(module: types.ModuleType) -> bool:
    package = module.__name__.partition(".")[0]
    known = package in _OPAQUE or package in sys.stdlib_module_names  # this package may be outside of `_FOLDERS`
    return known or _is_library(getattr(module, "__file__", None))


@functools.lru_cache(maxsize=4096)
def _is_opaque(kind: Any) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in _OPAQUE or (
        package in sys.stdlib_module_names and package not in (*_DATA, "_thread", "collections", "functools")
    )
