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
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

MOST: Final = 1000
"""Items of a container that is compared; a larger one is a constant."""
LARGEST: Final = 64 * 1024
"""Bytes of an array on the host that is compared; a larger one is a constant."""
PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
STATE: Final = (torch.nn.Module, Optimizer, torch.amp.GradScaler)
CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque)
_NAMED: Final = (enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""Compared by ``==``, which is identity for functions and classes."""
_WHOLE: Final = (*STATE, *CONTAINERS, torch.Tensor, *_NAMED[:-1])
"""What has no attributes that a step could name as values."""
_LIBRARIES: Final = frozenset({"torch", "jax", "jaxlib", "numpy", "xla_amp"})
"""Packages whose modules hold no value of the user."""

Entry: TypeAlias = tuple[str, Any]
"""What a value is called in messages, and what it is compared by."""
Keys: TypeAlias = tuple[Any, tuple[Any, ...]]
"""Where a value is: a dict, list, cell or (for its gradient) parameter, and the keys that lead to it from there."""
NOWHERE: Final[Keys] = (None, ())


class NotReplayableError(Exception):
    """A step cannot be replayed; the text is the reason for the user."""


class Tensor(NamedTuple):
    """A tensor on the device, and where it is."""

    tensor: torch.Tensor
    label: str
    place: Keys


def plain(value: Any) -> tuple[type, str]:
    """What a plain value is compared by; 0.0 and -0.0 differ, as do 2, 2.0 and True."""
    return type(value), repr(value)


def difference(old: list[Entry], new: list[Entry]) -> tuple[str, str] | None:
    """The label of the first entry that differs, and what has changed in it; None if none does."""
    for (before, one), (label, other) in zip(old, new, strict=False):
        if before != label:
            return label, ""
        if not same(one, other):
            how = f" from {_text(one)} to {_text(other)}"
            return label, how if len(how) < 200 else ""
    return None if len(old) == len(new) else ("what it names", "")


def _text(value: Any) -> str:
    is_plain = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type)
    return str(value[1] if is_plain else value).replace("torch.", "")


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; such as a dataclass of tensors cannot tell."""
    try:
        return bool(one == other)
    except Exception:
        return False


class Reading:
    """What one pass has found."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.tensors: list[Tensor] = []
        self.objects: dict[int, tuple[str, Any]] = {}
        """Modules, optimizers and scalers by id, each with its label."""
        self.schedules: list[Entry] = []
        """The counts of learning-rate schedules, which may change between calls and not in a call."""

    def add(self, value: Any, label: str, place: Keys) -> bool:
        """Adds a value as what it is; returns whether it is compared."""
        kind = type(value)
        compared: Any = None
        if kind in PLAIN:
            compared = plain(value)
        elif isinstance(value, STATE):
            self.objects.setdefault(id(value), (label, value))
            return True
        elif isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE and value.layout is torch.strided:
            self.tensors.append(Tensor(value, label, place))
            compared = geometry(value)
        elif isinstance(value, CONTAINERS) and len(value) <= MOST:
            compared = self._container(value, label, place)
        elif isinstance(value, _NAMED):
            compared = value
        elif isinstance(value, np.ndarray | np.generic | torch.Tensor):
            compared = _on_host(value)
        elif isinstance(value, LRScheduler):
            self.schedules.append((f"{label}.last_epoch", value.last_epoch))
        if compared is not None:
            self.entries.append((label, compared))
        return compared is not None

    def _container(self, value: Any, label: str, place: Keys) -> Any:
        if isinstance(value, set | frozenset):
            return type(value), frozenset(plain(item) for item in value if type(item) in PLAIN)
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        holder, path = place
        keys = [repr(key) if type(key) in PLAIN else type(key).__name__ for key, _ in pairs]
        for name, (key, item) in zip(keys, pairs, strict=True):
            self.add(item, f"{label}[{name}]", (holder, (*path, key)))
        return type(value), tuple(keys)

    def look(self, value: Any, label: str, place: Keys, names: tuple[str, ...]) -> bool:
        """`add`, and of another object its attributes in `names`, and its tensors and objects of any name."""
        compared = self.add(value, label, place)
        if type(value) in PLAIN or isinstance(value, _WHOLE):
            return compared
        space = getattr(value, "__dict__", {})
        found = list(space) if isinstance(space, dict) else []  # of a class it is a view
        if isinstance(value, types.ModuleType):
            library = value.__name__.partition(".")[0] in _LIBRARIES
            found = [] if library else [name for name in names if name in space]
        else:
            for name in _of_class(value if isinstance(value, type) else type(value), names):
                if name not in found:
                    self.add(getattr(value, name, None), f"{label}.{name}", NOWHERE)
        wanted = frozenset(names)
        for name in found:
            if name in wanted or isinstance(space[name], (*STATE, torch.Tensor, LRScheduler)):
                self.add(space[name], f"{label}.{name}", (space, (name,)))
        return compared


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor on the device shapes a program."""
    buffer = tensor_io.buffer_of(tensor)
    shards = mesh.active and mesh.sharding_of(buffer)
    return *view(tensor), buffer.spec, shards


def view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides and offset."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _on_host(value: Any) -> Any:
    on_cpu = not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and value.layout is torch.strided)
    if not on_cpu or value.nbytes > LARGEST:
        return None
    if not isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.tobytes()
    memory = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, value.shape, memory.numpy().tobytes()


@functools.lru_cache(maxsize=1024)
def _of_class(kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are plain values, containers or slots of a class; reading another could run code."""
    held: Any = (*PLAIN, *CONTAINERS, types.MemberDescriptorType)
    spaces = [vars(base) for base in kind.__mro__ if base is not object]
    return tuple(n for n in names if isinstance(next((s[n] for s in spaces if n in s), _of_class), held))


def put(place: Keys, value: torch.Tensor | None) -> None:
    """Binds `value` where a tensor is."""
    holder, path = place
    if isinstance(holder, torch.Tensor):
        holder.grad = value
    elif isinstance(holder, types.CellType):
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

    def bound(self) -> Iterator[tuple[Any, str, Keys]]:
        """What the names are bound to, each with its label and place."""
        yield from ((owner, label, NOWHERE) for label, owner in self._owners)
        function = self._function
        if function is None:
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, name, (cell, (None,))
            except ValueError:  # assigned later
                continue
        space = function.__globals__
        yield from ((space[name], name, (space, (name,))) for name in self.names if name in space)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield value, "a default of the step", NOWHERE


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those inside of it use."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))
