"""Walk the Python values that a step can reach by the names in its code.

A walk starts at the step's function.  It follows closures, globals, defaults and bound arguments of functions of the
user; attributes of objects, classes and modules whose name occurs in that code; and the items of containers.  It gives
a flat list with an entry for each value: type and value of numbers, texts and the like, type and length of containers,
identity of what has no value to compare.  Two equal lists mean that the code finds the same values.

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
from collections.abc import Callable, Iterator, Mapping
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
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_BASES: Final = (bool, int, float, complex, str, bytes)
_OPAQUE: Final = frozenset({"torch", "jax", "jaxlib", "numpy", "xla_amp", "logging", "optax", "flax"})
"""Packages whose objects are compared by identity."""
_ALWAYS: Final = frozenset({"forward", "backward", "setup_context"})
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


class Reach:
    """What a function can reach, and how to list it again.

    Args:
        function: the step.

    Raises:
        NotReplayableError: it reaches a value that cannot be compared, or too many.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        names = _ALWAYS
        while True:
            walk = _Walk(names, {}, learned := set(names), [])
            self._start(walk)
            if learned == names:
                break
            names = frozenset(learned)
        self._names = names
        self.trees = walk.trees
        """The modules that it reaches, with those below each."""
        self._known = {id(tree.root): tree for tree in walk.trees}
        self.optimizers = walk.optimizers
        self.scalers = walk.scalers
        self.leaves = walk.leaves
        """Tensors that get gradients, besides those of modules and optimizers."""

    def values(self) -> Values:
        """What the function finds now.

        Raises:
            NotReplayableError: a value cannot be compared, or there are too many.
        """
        return self._walk().result()

    def difference(self, before: Values, after: Values) -> str:
        """A description of the first value that differs between two results of `values`, the later one of now."""
        labels: list[str] = []
        walk = self._walk(labels)
        for label, old, new in zip(labels[: len(walk.found)], before.found, after.found, strict=False):
            if old != new:
                return changed(label, old, new)
        return "which values it can see"

    def _start(self, walk: _Walk) -> None:
        walk.value(self._function, "the step")
        walk.modules_by_name()
        for hook in private_api.hooks_of_all_modules():
            if not str(getattr(hook, "__module__", "")).startswith("xla_amp."):  # ours come and go with each step
                walk.value(hook, "a hook of all modules")

    def forget(self) -> None:
        """Keeps no object of modules alive, which a recorded call may replace."""
        for tree in self._known.values():
            tree.forget()

    def _walk(self, labels: list[str] | None = None) -> _Walk:
        walk = _Walk(self._names, self._known, None, labels)
        try:
            self._start(walk)
        except NotReplayableError:
            if labels is None:
                return self._walk([])  # raises with the names of values
            raise
        return walk


class Values:
    """The entries of one walk; equal to those of another if the code finds the same.

    Args:
        found: the entries.
        modules: for each tree of modules, (name, type and value) of what changes only when an object is replaced.
        objects: which optimizers, scalers and leaves were found; compared by `Guards.hold`.
        storages: the storages of the device's tensors.  They are no part of the comparison, since a step may bind a new
            tensor: a replay must find those that the captured call left.
        kept: objects that are compared by identity.
    """

    __slots__ = ("_kept", "found", "modules", "objects", "storages")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        found: list[Any],
        modules: list[list[tuple[str, Any]]],
        objects: list[int],
        storages: list[int],
        kept: list[Any],
    ) -> None:
        self.found, self.modules, self.objects, self.storages = found, modules, objects, storages
        self._kept = kept  # so that no other object gets the id of one that is compared by it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and self.found == other.found and self.modules == other.modules


class _Walk:
    """One walk.

    Args:
        names: attributes that are followed.
        trees: the trees of modules that were read before, by the id of their first module; gets those that are found.
        learned: gets the names in the code that is found; None to learn nothing.
        labels: gets what each entry is; None for no labels.
    """

    def __init__(
        self,
        names: frozenset[str],
        trees: dict[int, ModuleTree],
        learned: set[str] | None,
        labels: list[str] | None = None,
    ) -> None:
        self.names, self._trees, self._learned, self._labels = names, trees, learned, labels
        self._computed = not names.isdisjoint(_COMPUTED)
        self.found: list[Any] = []
        self._kept: list[Any] = []
        self._storages: list[int] = []
        self._largest = 0, "the attributes of objects"
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        """What was seen, whose ids no new object may get during the walk."""
        self.trees: list[ModuleTree] = []
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.leaves: list[torch.Tensor] = []

    def result(self) -> Values:
        """What the walk has found."""
        modules = [part for tree in self.trees for part in (tree.members, tree.values)]
        objects = list(map(id, (*self.optimizers, *self.scalers, *self.leaves)))
        return Values(
            self.found,
            modules,
            objects,
            self._storages,
            self._kept,
        )

    def _add(self, kind: Any, what: Any, label: str) -> None:
        self.found.append((kind, what))
        if self._labels is not None:
            self._labels.append(label)
        if len(self.found) > MOST:
            raise NotReplayableError(
                f"it can see more than {MOST:,} Python values, most of them in {self._largest[1]}; keep that in a "
                "tensor on the device, or where the step's code does not name it"
            )

    def _container(self, value: Any, label: str) -> None:
        self._add(type(value), len(value), label)
        if len(value) > self._largest[0]:
            self._largest = len(value), f"{label or 'a container'}, a {type(value).__name__} ({len(value):,} items)"

    def _same(self, value: Any, label: str) -> None:
        """Compares a value by identity."""
        self._add(type(value), id(value), label)
        self._kept.append(value)

    def value(self, value: Any, label: str) -> None:
        """Adds a value, and what it contains."""
        kind: Any = type(value)
        if kind in LEAVES:
            self._add(*plain(value), label)
            return
        if issubclass(kind, torch.Tensor):
            self._tensor(value, label)
            return
        if (number := self._seen.get(id(value))) is not None:
            self._add("again", number, label)
            return
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        for kinds, add in _NODES:
            if issubclass(kind, kinds):
                add(self, value, label)
                return
        if hasattr(kind, "__next__"):
            self._refuse(label, value, "give the step its items as arguments")
        self._instance(value, label)

    def _refuse(self, label: str, value: Any, remedy: str) -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise NotReplayableError(f"it can see {label or 'a value'}, a {kind}, which cannot be compared; {remedy}")

    # -- containers and values ---------------------------------------------------------------------------------------

    def _mapping(self, value: Mapping[Any, Any], label: str) -> None:
        self._container(value, label)
        for key, item in list(value.items()):
            self.value(key, f"a key of {label}")
            self.value(item, f"{label}[{key!r}]" if self._labels is not None else label)

    def _sequence(self, value: Any, label: str) -> None:
        self._container(value, label)
        for index, item in enumerate(tuple(value)):
            self.value(item, f"{label}[{index}]" if self._labels is not None else label)
        if type(value) not in (list, tuple) and hasattr(value, "__dict__"):
            self._attributes(value, label)

    def _set(self, value: Any, label: str) -> None:
        self._container(value, label)
        leaves = frozenset((type(each), repr(each) if type(each) in LEAVES else id(each)) for each in value)
        self._add("items", leaves, label)
        self._kept.extend(value)

    def _names_in_c(self, value: Any, label: str) -> None:
        self._same(value, label)
        if self._learned is not None:  # `operator.attrgetter("a.b")`
            self._learned.update(part for name in value.__reduce__()[1] for part in str(name).split("."))

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
            self._storages.append(id(tensor_io.buffer_of(value)))
            if value.requires_grad and value.is_leaf:
                self.leaves.append(value)
        elif value.device.type == "cpu" and value.layout is torch.strided:
            if value.nbytes > LARGEST_ARRAY:
                self._refuse(label, value, f"its {value.nbytes:,} bytes are too many; move it to the device")
            memory = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            self._add((value.dtype, value.shape), memory.numpy().tobytes(), label)
        for hook in hooks_of(value):
            self.value(hook, f"a hook of {label}")

    def _bytes(self, value: Any, label: str) -> None:
        self._add(type(value), bytes(value), label)

    def _context_variable(self, value: contextvars.ContextVar[Any], label: str) -> None:
        self.value(value.get(None), label)

    def _reference(self, value: Any, label: str) -> None:
        self.value(value(), label)

    def _file(self, value: Any, label: str) -> None:
        self._refuse(label, value, "read it outside of the step, and pass what was read")

    def _collect(self, value: Any, label: str) -> None:
        # What they compute with is compared by `cache_entry`.
        (self.optimizers if isinstance(value, Optimizer) else self.scalers).append(value)
        self._add(*identity(value), label)
        if isinstance(value, Optimizer) and "param_groups" in self.names:  # the code reads them itself
            for number, group in enumerate(value.param_groups):
                options = {name: item for name, item in group.items() if name != "params"}
                self._alive.append(options)
                self.value(options, f"{label}.param_groups[{number}]")

    # -- functions ---------------------------------------------------------------------------------------------------

    def _function(self, value: types.FunctionType, label: str) -> None:
        code = value.__code__
        if _is_library(code.co_filename):
            self._same(value, label)
            self._wrapped(value, label)
            return
        self._same(code, label)
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            self.value(_content(cell), name)
        scope = value.__globals__
        for name in _names(code):
            if name in _WHOLE_SCOPE and name not in scope:
                raise NotReplayableError(
                    f"{label} calls {name}(), which can see every global; name what it reads, or pass it as an argument"
                )
            if name in scope:
                self.value(scope[name], name)
            elif isinstance(module := sys.modules.get(name), types.ModuleType):
                self.value(module, name)  # imported inside
        for text in _texts(code):
            self._module_of_name(text, not _FINDS_MODULES.isdisjoint(_names(code)))
        for item in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self.value(item, f"a default of {label}")
        for name, item in value.__dict__.items():
            self.value(item, f"{label}.{name}")
        if self._learned is not None:
            self._learned.update(_names(code), _texts(code))

    def _method(self, value: types.MethodType, label: str) -> None:
        self.value(value.__self__, "self")
        self.value(value.__func__, label)

    def _partial(self, value: functools.partial[Any], label: str) -> None:
        self.value(value.func, label)
        self.value(value.args, f"an argument of {label}")
        self.value(value.keywords, f"an argument of {label}")

    def _property(self, value: property, label: str) -> None:
        self.value(value.fget, label)

    def _static(self, value: Any, label: str) -> None:
        self.value(value.__func__, label)

    def _builtin(self, value: Any, label: str) -> None:
        self._same(value, label)
        owner: Any = getattr(value, "__self__", None)
        kind: Any = type(owner)
        if owner is not None and not isinstance(owner, types.ModuleType | type) and not _is_opaque(kind):
            self.value(owner, label)

    def _scheduler(self, value: Any, label: str) -> None:
        self._add(*identity(value), label)
        if not self.names.isdisjoint(("get_last_lr", "_last_lr", "get_lr")):
            self.value(value._last_lr, f"{label}.get_last_lr()")

    def _wrapped(self, value: Any, label: str) -> None:
        inner = getattr(value, "__wrapped__", None)
        if inner is not None:
            self.value(inner, label)

    # -- modules, classes, objects -----------------------------------------------------------------------------------

    def modules_by_name(self) -> None:
        """Adds the modules whose names are values that were found, if the code finds modules by name."""
        if not self.names.isdisjoint(_FINDS_MODULES):
            for kind, text in self.found:  # it grows meanwhile
                if kind is str:
                    self._module_of_name(text, False)

    def _module_of_name(self, name: str, libraries: bool) -> None:
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType) and (libraries or not _is_library_module(module)):
            self.value(module, f"sys.modules[{name!r}]")

    def _python_module(self, value: types.ModuleType, label: str) -> None:
        self._same(value, label)
        library = _is_library_module(value)
        if value.__name__ in _CHANGING and (called := self.names.intersection(vars(value))):
            name = f"{value.__name__}.{min(called)}"
            self._refuse(name, getattr(value, min(called)), _CHANGING[value.__name__])
        if value is os:
            self.value(os.environ, "os.environ")
            return
        space = vars(value)
        for name in sorted(filter(space.__contains__, self.names)):
            if not library or _is_plain(space[name]):
                self.value(space[name], f"{label}.{name}")
        if self._computed and not library:
            for name, item in list(space.items()):
                if _is_plain(item) and name not in self.names and not name.startswith("__"):
                    self.value(item, f"{label}.{name}")

    def _class(self, value: type, label: str) -> None:
        self._body(value, label, _SILENT)

    def _kind(self, value: type, label: str) -> None:
        """Adds the class of an object, whose constructor has run."""
        number = self._seen.setdefault(~id(value), len(self._seen))
        if number == len(self._seen) - 1:
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
                if (special or name in self.names) and name not in without:
                    self.value(item, f"{label}.{name}")
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
            if whole or name in self.names or (self._computed and type(item) in LEAVES):
                self.value(item, f"{label}.{name}" if self._labels is not None else label)
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name in ("__dict__", "__weakref__") or not (whole or name in self.names):
                    continue
                try:
                    item = object.__getattribute__(value, name)
                except AttributeError:
                    continue
                self.value(item, f"{label}.{name}")

    def _nn_module(self, value: torch.nn.Module, label: str) -> None:
        self._add(*identity(value), label)
        tree = self._trees.get(id(value))
        if tree is None:
            tree = self._trees[id(value)] = ModuleTree(value, label)
        tree.update(self.names)
        self.trees.append(tree)
        for module in tree.modules:
            self._seen.setdefault(id(module), len(self._seen))
        for kind, name in tree.kinds.items():
            if self._learned is not None:
                self._learned.update(_names_of_class(kind))
            self._kind(kind, name)
        for name, item in tree.open:
            self.value(item, name)
        for name, parameter in tree.hooked:
            self._tensor(parameter, name)


_NODES: Final[tuple[tuple[Any, Callable[[_Walk, Any, str], None]], ...]] = (
    ((list, tuple, collections.deque), _Walk._sequence),
    ((dict, Mapping), _Walk._mapping),
    ((set, frozenset), _Walk._set),
    (torch.nn.Module, _Walk._nn_module),
    (types.FunctionType, _Walk._function),
    (types.MethodType, _Walk._method),
    (functools.partial, _Walk._partial),
    (property, _Walk._property),
    ((staticmethod, classmethod), _Walk._static),
    ((types.BuiltinFunctionType, np.ufunc), _Walk._builtin),
    (types.ModuleType, _Walk._python_module),
    (enum.Enum, _Walk._same),
    ((operator.attrgetter, operator.methodcaller), _Walk._names_in_c),
    (type(functools.lru_cache(len)), _Walk._wrapped),
    (torch.optim.lr_scheduler.LRScheduler, _Walk._scheduler),
    (type, _Walk._class),
    ((np.ndarray, np.generic), _Walk._array),
    ((bytearray, array.array), _Walk._bytes),
    (contextvars.ContextVar, _Walk._context_variable),
    (weakref.ref, _Walk._reference),
    ((Optimizer, torch.amp.GradScaler), _Walk._collect),
    ((io.IOBase, types.GeneratorType), _Walk._file),
)
"""Kinds of values -> how a walk adds them, the first that fits."""


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
