"""Read what a captured step names: plain values to compare, tensors by place, and the objects of its state.

One flat pass: closure cells and globals that the step's own code names, one attribute deep (``settings.ALPHA``), its
bound object, its defaults and its arguments.  Compared are numbers, texts, bools, None, enums, functions and classes,
small arrays on the host, and containers of these.  No other code is read, and no other object is searched: what they
hold is a constant of the capture.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.optim import Optimizer

from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

MOST: Final = 1000
"""Items of a container that is compared; a larger one is a constant."""
LARGEST: Final = 64 * 1024
"""Bytes of an array on the host that is compared; a larger one is a constant."""
PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
STATE: Final = (torch.nn.Module, Optimizer, torch.amp.GradScaler)
_NAMED: Final = (enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""Compared by ``==``, which is identity for functions and classes."""
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque)
_LIBRARIES: Final = frozenset({"torch", "jax", "jaxlib", "numpy", "xla_amp"})
"""Packages whose modules hold no value of the user."""

Keys: TypeAlias = tuple[Any, tuple[Any, ...]]
"""Where a value is: a dict, list or cell, and the keys that lead to it from there."""


class NotReplayableError(Exception):
    """A step cannot be replayed; the text is the reason for the user."""


class Tensor(NamedTuple):
    """A tensor on the device, and where it is."""

    tensor: torch.Tensor
    label: str
    place: Keys


def plain(value: Any) -> Any:
    """What a plain value is compared by; 0.0 and -0.0 differ, as do 2, 2.0 and True."""
    return type(value), value if value and value == value else repr(value)


class Reading:
    """What one pass has found."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.labels: list[str] = []
        """What each value is called in messages."""
        self.tensors: list[Tensor] = []
        self.objects: dict[int, tuple[str, Any]] = {}
        """Modules, optimizers and scalers by id, each with its label."""
        self.schedules: list[tuple[str, Any]] = []
        """Learning-rate schedules, with their labels."""

    def compare(self, value: Any, label: str) -> None:
        """Adds a value to compare."""
        self.values.append(value)
        self.labels.append(label)

    def add(self, value: Any, label: str, place: Keys, named: bool = True) -> None:
        """Adds a value as what it is; unless `named`, its tensors and objects only."""
        kind = type(value)
        if kind in PLAIN:
            if named:
                self.compare(plain(value), label)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, label, place, named)
        elif isinstance(value, STATE):
            self.objects.setdefault(id(value), (label, value))
        elif isinstance(value, _CONTAINERS):
            self._container(value, label, place, named)
        elif named and isinstance(value, _NAMED):
            self.compare(value, label)
        elif named and isinstance(value, np.ndarray | np.generic) and value.nbytes <= LARGEST:
            self.compare((value.dtype, value.shape, value.tobytes()), label)

    def _tensor(self, value: torch.Tensor, label: str, place: Keys, named: bool) -> None:
        if value.layout is not torch.strided:
            return
        if value.device.type == DEVICE_TYPE:
            self.compare(geometry(value), label)
            self.tensors.append(Tensor(value, label, place))
        elif named and value.device.type == "cpu" and value.nbytes <= LARGEST:
            memory = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            self.compare((value.dtype, value.shape, memory.numpy().tobytes()), label)

    def _container(self, value: Any, label: str, place: Keys, named: bool) -> None:
        kind = type(value)
        if len(value) > MOST:
            return
        if isinstance(value, set | frozenset):
            if named:
                self.compare((kind, frozenset(plain(item) for item in value if type(item) in PLAIN)), label)
            return
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        if named:
            self.compare((kind, tuple([plain(key) if type(key) in PLAIN else type(key) for key, _ in pairs])), label)
        holder, path = place
        for key, item in pairs:
            self.add(item, f"{label}[{key!r}]" if named else label, (holder, (*path, key)), named)

    def look(self, value: Any, label: str, place: Keys, names: tuple[str, ...]) -> None:
        """Adds what a name is bound to; of another object its attributes: values by `names`, state by any name."""
        self.add(value, label, place)
        if type(value) in PLAIN or isinstance(value, (*STATE, *_CONTAINERS, torch.Tensor, *_NAMED[:-1])):
            return
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self.schedules.append((label, value))
        space = getattr(value, "__dict__", {})
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] in _LIBRARIES:
                return
            found: Iterable[str] = [name for name in names if name in space]
        else:
            found = space if isinstance(space, dict) else ()  # of a class it is a view
        for name in list(found):
            self.add(space[name], f"{label}.{name}", (space, (name,)), name in names)
        kind = value if isinstance(value, type) else type(value)
        for name in () if isinstance(value, types.ModuleType) else _of_class(kind, names):
            if name not in found:
                item = getattr(value, name, None)
                self.add(item, f"{label}.{name}", (None, ()), type(item) in PLAIN or isinstance(item, _CONTAINERS))


@functools.lru_cache(maxsize=1024)
def _of_class(kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are plain values, containers or slots of a class; reading another could run code."""
    held: Any = (*PLAIN, *_CONTAINERS, types.MemberDescriptorType)
    spaces = [vars(base) for base in kind.__mro__ if base is not object]
    return tuple(n for n in names if isinstance(next((s[n] for s in spaces if n in s), _of_class), held))


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor shapes a program."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def put(place: Keys, value: Any) -> None:
    """Binds `value` where a tensor is."""
    holder, path = place
    if isinstance(holder, types.CellType):
        holder.cell_contents = _with(holder.cell_contents, path[1:], value)
    else:
        _with(holder, path, value)


def _with(holder: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`holder` with `value` at `path`: itself, or a new tuple."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if not isinstance(holder, tuple):
        holder[key] = _with(holder[key], rest, value) if rest else value
        return holder
    items = list(holder)
    items[key] = _with(items[key], rest, value)
    return type(holder)(*items) if hasattr(holder, "_fields") else tuple(items)


class StepNames:
    """The names of a step's own code, and what they are bound to now.

    Args:
        step: a function, method, module, partial or callable object.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self._owners: list[tuple[str, Any]] = []
        self._function: types.FunctionType | None = None
        self.names: tuple[str, ...] = ()
        while self._function is None:
            step = inspect.unwrap(step)
            if isinstance(step, functools.partial):
                self._owners += [("an argument of the step", each) for each in (*step.args, *step.keywords.values())]
                step = step.func
            elif isinstance(step, types.MethodType):
                self._owners.append(("self", step.__self__))
                step = step.__func__
            elif isinstance(step, types.FunctionType):
                self._function, self.names = step, _names(step.__code__)
            else:
                self._owners.append(("the step", step))
                call = getattr(type(step), "__call__", None)  # noqa: B004  (the function, not whether there is one)
                if isinstance(step, torch.nn.Module) or not isinstance(call, types.FunctionType):
                    return
                step = call

    def read(self, reading: Reading) -> None:
        """Adds what the names are bound to."""
        for label, value, place in self._bound():
            reading.look(value, label, place, self.names)

    def _bound(self) -> Iterator[tuple[str, Any, Keys]]:
        for label, owner in self._owners:
            yield label, owner, (None, ())
        function = self._function
        if function is None:
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents, (cell, (None,))
            except ValueError:  # assigned later
                continue
        space = function.__globals__
        for name in self.names:
            if name in space:
                yield name, space[name], (space, (name,))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield "a default of the step", value, (None, ())


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those inside of it use."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))
