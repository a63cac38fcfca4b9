"""Read what a captured step names: plain values to compare, tensors by slot, and the objects of its state.

One flat pass over closure cells and globals that the step's own code names, one attribute deep (``settings.ALPHA``),
its bound object, defaults and arguments.  Of functions in ``state=[...]``, it follows attributes to any depth.  What
other code and objects hold is a constant of the capture.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import inspect
import itertools
import math
import types
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_amp.lazy.capture import bytecode
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import tensor_io
from xla_amp.torch_common.trees import tree_leaves

_MOST: Final = 1000
"""Items of a container or an array on the host that is compared; a larger one is a constant."""
PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
STATE: Final = (torch.nn.Module, Optimizer, torch.amp.GradScaler)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque)
FUNCTIONS: Final = (types.FunctionType, types.MethodType)
_NAMED: Final = (enum.Enum, *FUNCTIONS, types.BuiltinFunctionType, type)
"""Compared by ``==``, which is identity for functions and classes."""
_WITH_ATTRIBUTES: Final = (torch.Tensor, types.CellType)
_TAKEN: Final[tuple[Any, ...]] = (*STATE, *PLAIN, *_CONTAINERS, *_NAMED, np.ndarray, np.generic, torch.Tensor)
"""What `Reading.add` takes."""

Entry: TypeAlias = tuple[str, Any]
"""What a value is called in messages, and what it is compared by."""


class NotReplayableError(Exception):
    """A step cannot be replayed; the text is the reason for the user."""


class Slot(NamedTuple):
    """Where a value is bound: in a dict, list, cell or parameter; or in a tuple, of which the holder is the slot."""

    holder: Any
    key: Any

    def value(self) -> Any:
        """What is there."""
        holder = self.holder.value() if isinstance(self.holder, Slot) else self.holder
        return getattr(holder, self.key) if isinstance(holder, _WITH_ATTRIBUTES) else holder[self.key]

    def put(self, value: Any) -> None:
        """Binds `value` there, or a new tuple with it."""
        holder, key = self
        if isinstance(holder, Slot):
            old = holder.value()
            items = (*old[:key], value, *old[key + 1 :])
            holder.put(type(old)(*items) if hasattr(old, "_fields") else items)
        elif isinstance(holder, _WITH_ATTRIBUTES):
            setattr(holder, key, value)
        else:
            holder[key] = value


NOWHERE: Final = Slot(None, None)
Named: TypeAlias = tuple[Any, str, Slot]
"""What a name is bound to, the name, and where."""


class Tensor(NamedTuple):
    """A tensor on the device, and where it is."""

    tensor: torch.Tensor
    label: str
    slot: Slot


def plain(value: Any) -> tuple[type, str]:
    """What a plain value is compared by; 0.0 and -0.0 differ, as do 2, 2.0 and True."""
    return type(value), repr(value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; such as a dataclass of tensors cannot tell."""
    try:
        return bool(one == other)
    except Exception:
        return False


def difference(old: Sequence[list[Entry]], new: Sequence[list[Entry]]) -> tuple[str, str] | None:
    """The label of the first entry that differs, and what has changed in it; None if none does."""
    return next((each[:2] for each in differences(old, new)), None)


def differences(old: Sequence[list[Entry]], new: Sequence[list[Entry]]) -> Iterator[tuple[str, str, Any, Any]]:
    """The label of each entry that differs, what has changed in it, and what both are compared by."""
    for (before, one), (label, other) in zip(itertools.chain(*old), itertools.chain(*new), strict=False):
        if before != label:
            yield label, "", None, None
        elif not same(one, other):
            how = f" from {_text(one)} to {_text(other)}"
            yield label, how if len(how) < 200 else "", one, other
    if sum(map(len, old)) != sum(map(len, new)):
        yield "what it names", "", None, None


def _text(value: Any) -> str:
    is_plain = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type)
    return str(value[1] if is_plain else value).replace("torch.", "")


class Reading:
    """What one pass has found."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.tensors: list[Tensor] = []
        self.objects: dict[int, tuple[str, Any]] = {}
        """Modules, optimizers and scalers by id, each with its label."""
        self._arrays: list[tuple[str, Any]] = []
        """On the host, where they may change in place."""
        self.repeated: dict[str, tuple[Any, str]] = {}
        """Schedules and other objects on the host, with the method that a replay calls as a recorded call did."""
        self.counts: dict[str, Slot | torch.Tensor] = {}
        """Integers on the host, which may be counters."""
        self.owners: dict[str, Any] = {}
        """Objects by label."""
        self.steps: list[Entry] = []
        """What this method may change, and a call depends on."""
        self.watched: list[Iterable[Any]] = []
        """The identity of these items tells whether reading them again would find the same."""
        self.sized: list[Sized] = []
        """The containers of which the length tells whether there are more; the others are seen by their items."""

    def entries(self) -> list[Entry]:
        """What is compared; the same list again where nothing may change in place."""
        arrays = [(label, _content(value)) for label, value in self._arrays]
        return [*self._entries, *arrays] if arrays else self._entries

    def compare(self, label: str, by: Any) -> None:
        """Adds what a value is compared by."""
        self._entries.append((label, by))

    def add(self, value: Any, label: str, slot: Slot) -> bool:
        """Adds a value as what it is; returns whether it is compared."""
        if type(value) in PLAIN:
            self.compare(label, plain(value))
            if type(value) is int and slot is not NOWHERE:
                self.counts[label] = slot
        elif isinstance(value, STATE):
            self.objects.setdefault(id(value), (label, value))
        elif isinstance(value, torch.Tensor) and is_dense(value):
            self.tensors.append(Tensor(value, label, slot))
            buffer = tensor_io.buffer_of(value)
            self.compare(label, (*view(value), buffer.spec, mesh.active and mesh.sharding_of(buffer)))
        elif isinstance(value, _CONTAINERS) and len(value) <= _MOST:
            self._container(value, label, slot)
        elif isinstance(value, _NAMED):
            self.compare(label, value)
        elif isinstance(value, np.ndarray | np.generic | torch.Tensor):
            self._arrays.append((label, value))
            if isinstance(value, torch.Tensor) and not value.shape and value.dtype is torch.int64:
                self.counts[label] = value
        else:
            return self._repeated(value, label)
        return True

    def _repeated(self, value: Any, label: str) -> bool:
        kind = type(value)
        if isinstance(value, LRScheduler) or (hasattr(kind, "get_last_lr") and hasattr(kind, "step")):
            self.repeated[label] = value, "step"
            self.compare(f"the class of {label}", kind)
        elif hasattr(kind, "accumulate") and hasattr(value, "gradient_state"):  # Accelerate's
            self.repeated[label] = value, "accumulate"
            now = value.gradient_state
            ends = now.sync_with_dataloader and now.end_of_dataloader
            steps = ends or (value.step + 1) % now.num_steps == 0
            self.steps.append((f"whether {label} synchronizes gradients", (now.num_steps, now.sync_gradients, steps)))
            return True
        return False

    def _container(self, value: Any, label: str, slot: Slot) -> None:
        self.watch(value)
        if isinstance(value, set | frozenset):
            self.compare(label, (type(value), {plain(item) for item in value if type(item) in PLAIN}))
            return
        holder, keys = slot if isinstance(value, tuple) else value, []
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            keys.append(repr(key) if type(key) in PLAIN else type(key).__name__)
            self.add(item, f"{label}[{keys[-1]}]", NOWHERE if holder is NOWHERE else Slot(holder, key))
        self.compare(label, (type(value), keys))

    def watch(self, container: Any) -> None:
        """Adds a container to those that are watched."""
        if container:
            self.watched += [container, container.values()] if isinstance(container, dict) else [container]
        else:
            self.sized.append(container)

    def look(self, value: Any, label: str, slot: Slot, names: tuple[str, ...]) -> bool:
        """`add`, and of another object its attributes in `names`, and its tensors and objects of any name."""
        compared = self.add(value, label, slot)
        if not compared or isinstance(value, type):
            self.owners[label] = value
            for name, item, place in _attributes(value, names, True):
                self.add(item, f"{label}.{name}", place)
        return compared

    def follow(self, value: Any, label: str, slot: Slot, names: tuple[str, ...], seen: dict[int, Any]) -> None:
        """`add`, and of an object that it has not `seen` its attributes in `names`, and theirs, and so on."""
        if id(value) in seen or (self.add(value, label, slot) and not isinstance(value, (type, torch.nn.Module))):
            return
        seen[id(value)] = self.owners[label] = value
        own = vars(value) if isinstance(value, torch.nn.Module) else None
        for name, item, place in _attributes(value, names, False):
            if isinstance(value, types.ModuleType):
                self.add(item, f"{label}.{name}", place)
            elif own is None or place.holder is not own or not isinstance(item, _TAKEN):  # the state has those
                self.follow(item, f"{label}.{name}", place, names, seen)


def _attributes(value: Any, names: tuple[str, ...], objects: bool) -> Iterator[tuple[str, Any, Slot]]:
    """Attributes in `names`, properties included, and with `objects` those of any name that are tensors or state."""
    own = getattr(value, "__dict__", {})
    spaces = [own, *map(vars, (value if isinstance(value, type) else type(value)).__mro__[:-1])]
    others = own if objects and not isinstance(value, types.ModuleType) else ()
    for name in dict.fromkeys((*names, *others)):
        space = next((each for each in spaces if name in each), None)
        if space is not None and (name in names or isinstance(space[name], (*STATE, torch.Tensor, LRScheduler))):
            item = space[name]
            if isinstance(item, property) and not isinstance(value, type):
                item = _computed(value, name)
            yield name, item, Slot(space, name) if isinstance(space, dict) else NOWHERE


def _computed(value: Any, name: str) -> Any:
    """What a property gives; None for tensors: they are data, which a program reads."""
    item = None
    with contextlib.suppress(Exception):
        item = getattr(value, name)
    return None if any(isinstance(each, torch.Tensor) for each in tree_leaves(item)) else item


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the lazy device and has strides."""
    return tensor.device.type == tensor_io.DEVICE_TYPE and tensor.layout is torch.strided


def view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides and offset."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _content(value: Any) -> Any:
    """What an array on the host is compared by; None for a large one, and for a tensor on another device."""
    on_host = not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and value.layout is torch.strided)
    return (value.dtype, value.shape, repr(value.tolist())) if on_host and math.prod(value.shape) <= _MOST else None


def bound(step: Any) -> tuple[list[Named], tuple[str, ...]]:
    """What the names of a step's own code are bound to now, each with its label and slot; and the names."""
    step = step if isinstance(step, types.MethodType) else inspect.unwrap(step)
    if isinstance(step, types.FunctionType):
        names = _names(step.__code__)
        return list(_of_function(step, names)), names
    if isinstance(step, functools.partial):
        label, owners, inner = "an argument of the step", (*step.args, *step.keywords.values()), step.func
    elif isinstance(step, types.MethodType):
        label, owners, inner = "self", (step.__self__,), step.__func__
    else:
        label, owners, inner = "the step", (step,), type(step).__call__
    has_code = isinstance(inner, types.FunctionType) and not isinstance(step, torch.nn.Module)
    found, names = bound(inner) if has_code or isinstance(step, functools.partial) else ([], ())
    kind: Any = type(owners[0]) if owners else None
    for each in bytecode.methods(inspect.unwrap(inner), kind, None, False)[1:] if has_code else ():  # that it calls
        more = tuple(name for name in _names(each.__code__) if name not in names)
        found += _of_function(each, more)
        names += more
    return [*((owner, label, NOWHERE) for owner in owners), *found], names


def _of_function(function: types.FunctionType, names: tuple[str, ...]) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # assigned later
            yield cell.cell_contents, name, Slot(cell, "cell_contents")
    space = function.__globals__
    yield from ((space[name], name, Slot(space, name)) for name in names if name in space)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value, "a default of the step", NOWHERE


def called(step: Any, value: Any, variable: str | None) -> tuple[str, ...]:
    """The names in the methods that a step calls of the value of a variable, by default its first argument."""
    kind: Any = type(value)
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not isinstance(function, types.FunctionType) or kind in PLAIN:
        return ()
    return tuple(itertools.chain(*(_names(each.__code__) for each in bytecode.methods(function, kind, variable)[1:])))


def functions(roots: Iterable[Any], owner: Any) -> list[types.FunctionType]:
    """Functions, and what they reach by name: others, methods of their objects, methods and properties of `owner`."""
    kind: Any = type(owner)
    todo, found = [*roots], dict[types.FunctionType, None]()
    if isinstance(owner, torch.nn.Module):
        todo.append(types.MethodType(kind.forward, owner))
    while todo:
        value = todo.pop()
        inner = getattr(value, "__func__", None) or getattr(value, "func", value)
        function, holder = inspect.unwrap(inner), getattr(value, "__self__", None)
        if isinstance(function, types.FunctionType) and function not in found:
            found[function] = None
            names = _names(function.__code__)
            todo += [each for each, *_ in _of_function(function, names) if callable(each)]
            if holder is not None:
                its: Any = type(holder)
                todo += [types.MethodType(each, holder) for each in bytecode.methods(function, its)]
            if holder is not owner:
                methods = (bytecode.method(kind, name) for name in names)
                todo += [types.MethodType(each, owner) for each in methods if each is not None]
        elif inner is not value:
            todo.append(inner)
    return list(found)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those inside of it use."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))
