"""Compare what a captured step names: plain values, tensors by slot, and the objects of its state.

One flat pass over what the step's own code names (`reader.bound`), one attribute deep (``settings.ALPHA``), and its
arguments.  Of functions in ``state=[...]``, it follows attributes to any depth.  What other code and objects hold is a
constant of the capture.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from operator import attrgetter, call, is_, itemgetter
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import tensor_io
from xla_amp.training.reader import CONTAINERS, FUNCTIONS, NOWHERE, Bound, Named, Slot, called, named_attributes

_MOST: Final = 1000
"""Items of a container or an array on the host that is compared; a larger one is a constant."""
PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
STATE: Final = (torch.nn.Module, Optimizer, torch.amp.GradScaler)
_NAMED: Final = (enum.Enum, *FUNCTIONS, types.BuiltinFunctionType, type)
"""Compared by ``==``, which is identity for functions and classes."""
_TAKEN: Final[tuple[Any, ...]] = (*STATE, *PLAIN, *CONTAINERS, *_NAMED, np.ndarray, np.generic, torch.Tensor)
"""What `Reading.add` takes."""
_NONE: Final = object()
"""Where nothing is."""

Entry: TypeAlias = tuple[str, Any]
"""What a value is called in messages, and what it is compared by."""


class NotReplayableError(Exception):
    """A step cannot be replayed; the text is the reason for the user."""


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
    """What one pass has found; `is_current` tells whether another one would find the same.

    All that the pass has looked at is looked up again at once and compared by identity, without Python code for each
    value.  A value that is equal but another object, as a number that was computed again, takes another pass.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.tensors: list[Named] = []
        """Those on the device."""
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
        self.looked: list[tuple[Callable[..., Any], Any]] = []
        """Where a value was or might have been: what gives it or a default, and its name there."""
        self._watched: list[Iterable[Any]] = []
        """The items of these are compared by identity, and their number by `_sized`."""
        self._sized: list[Sized] = []
        self._typed: list[Any] = []
        """Of these the class is compared, and of the items of `_kinds`."""
        self._kinds: list[Iterable[Any]] = []
        self._labels: dict[int, str] = {}
        """Of containers by id; one that is found again is compared by its first label."""

    def end(self) -> None:
        """Ends the pass."""
        self._plain = [*map(itemgetter(0), self.tensors)]
        self.buffers: list[Buffer] = [*map(_buffer, map(_storage, self._plain))]
        found = [*filter(_may_have_gradient, self._plain)]
        self.parameters = dict(zip(map(id, found), found, strict=True))

    def keep(self) -> None:
        """Remembers what is there, for `is_current`."""
        self._gets, self._names = [get for get, _ in self.looked], [name for _, name in self.looked]
        self._equal, self._same = self._sizes(), [*self._now()]
        self._views, self._has_same_views = [*map(view, self._plain)], private_api.same_views(self._plain)

    def is_current(self) -> bool:
        """Whether another pass would find the same."""
        try:
            if self._equal != self._sizes() or not all(map(is_, self._now(), self._same)):
                return False
        except (KeyError, TypeError, ValueError):  # what was there has gone, or is another thing
            return False
        if not self._has_same_views():
            if self._views != [*map(view, self._plain)]:
                return False
            self._has_same_views = private_api.same_views(self._plain)  # in the modes that this thread has now
        return True

    def _now(self) -> Iterator[Any]:
        """All that is compared by identity."""
        looked_up = map(call, self._gets, self._names, itertools.repeat(_NONE))
        kinds = map(type, itertools.chain(self._typed, *self._kinds))
        items = itertools.chain.from_iterable(self._watched)
        buffers = map(_buffer, map(_storage, self._plain))
        return itertools.chain(looked_up, kinds, (_NONE,), items, (_NONE,), buffers)

    def _sizes(self) -> list[Any]:
        """All that is compared by equality: lengths, and where in its memory a tensor begins."""
        return [*map(len, self._sized), *map(_offset, self._plain)]

    def entries(self) -> list[Entry]:
        """What is compared; the same list again where nothing may change in place."""
        if not self._arrays:
            return self._entries
        return [*self._entries, *((label, _content(value)) for label, value in self._arrays)]

    def compare(self, label: str, by: Any) -> None:
        """Adds what a value is compared by."""
        self._entries.append((label, by))

    def add(self, value: Any, label: str, slot: Slot, most: int = _MOST) -> bool:
        """Adds a value as what it is; returns whether it is compared.  A container has at most `most` items."""
        if type(value) in PLAIN:
            self._entries.append((label, plain(value)))
            if type(value) is int and slot is not NOWHERE:
                self.counts[label] = slot
        elif isinstance(value, STATE):
            self.objects.setdefault(id(value), (label, value))
        elif isinstance(value, torch.Tensor) and is_dense(value):
            self.tensors.append(Named(value, label, slot))
            buffer = tensor_io.buffer_of(value)
            self._entries.append((label, (*view(value), buffer.spec, mesh.active and mesh.sharding_of(buffer))))
        elif isinstance(value, CONTAINERS):
            return self._container(value, label, slot, most)
        elif isinstance(value, _NAMED):
            self._entries.append((label, value))
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
            self._typed.append(value)
            self.compare(f"the class of {label}", kind)
        elif hasattr(kind, "accumulate") and hasattr(value, "gradient_state"):  # Accelerate's
            self.repeated[label] = value, "accumulate"
            return True
        return False

    def _container(self, value: Any, label: str, slot: Slot, most: int) -> bool:
        if len(value) > most:
            self._sized.append(value)
            return False
        if not isinstance(value, tuple) and id(value) in self._labels:
            self.compare(label, self._labels[id(value)])
            return True
        self.watch(value, label)
        if isinstance(value, set | frozenset):
            self.compare(label, (type(value), {plain(item) for item in value if type(item) in PLAIN}))
            return True
        holder, keys = slot if isinstance(value, tuple) else value, []
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            keys.append(repr(key) if type(key) in PLAIN else type(key).__name__)
            self.add(item, f"{label}[{keys[-1]}]", NOWHERE if holder is NOWHERE else Slot(holder, key), most)
        self.compare(label, (type(value), keys))
        return True

    def watch(self, container: Any, label: str = "") -> None:
        """Adds a container to those that are watched; `add` of it afterwards adds the label."""
        self._labels[id(container)] = label
        self._sized.append(container)
        if container:
            self._watched += [container, container.values()] if isinstance(container, dict) else [container]

    def add_bound(self, found: Bound) -> None:
        """Watches what the code of a step may name; `look` adds the values."""
        for function in found.functions:
            get = functools.partial(getattr, function)
            self.looked += [(get, name) for name in ("__code__", "__defaults__", "__kwdefaults__")]
            self.looked += [(functools.partial(getattr, each), "cell_contents") for each in function.__closure__ or ()]
            self.watch(function.__kwdefaults__ or ())
        for space in {id(each.__globals__): each.__globals__ for each in found.functions}.values():
            self.looked += [(space.get, name) for name in found.names]

    def look(self, value: Any, label: str, slot: Slot, names: tuple[str, ...], step: Any, variable: str | None) -> bool:
        """`add`, and of another object its attributes in `names`, and its tensors and objects of any name.

        Args:
            value: as of `add`, as are `label` and `slot`.
            names: in the code of the step.
            step: of which the methods that it calls of the object name more; None for no step.
            variable: what it calls the object, None for its first argument.
        """
        compared = self.add(value, label, slot)
        if not compared or isinstance(value, type):
            self.owners[label] = value
            self._typed.append(value)
            if (own := getattr(value, "__dict__", None)) and not isinstance(value, types.ModuleType):
                self._sized.append(own)
                self._kinds.append(own.values())
            for item, name, place in named_attributes(value, names + called(step, value, variable), True, self.looked):
                self.add(item, f"{label}.{name}", place)
        return compared

    def follow(self, value: Any, label: str, slot: Slot, names: tuple[str, ...], seen: dict[int, Any]) -> None:
        """`add`, and of an object that it has not `seen` its attributes in `names`, and theirs, and so on."""
        if id(value) in seen or (self.add(value, label, slot) and not isinstance(value, (type, torch.nn.Module))):
            return
        seen[id(value)] = self.owners[label] = value
        own = vars(value) if isinstance(value, torch.nn.Module) else None
        self._typed.append(value)
        for item, name, place in named_attributes(value, names, False, self.looked):
            if isinstance(value, types.ModuleType):
                self.add(item, f"{label}.{name}", place)
            elif own is None or place.holder is not own or not isinstance(item, _TAKEN):  # the state has those
                self.follow(item, f"{label}.{name}", place, names, seen)


_buffer, _storage, _offset = attrgetter("_xla_amp"), torch.Tensor.untyped_storage, torch.Tensor.storage_offset


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def accumulates(label: str, accelerator: Any) -> Entry:
    """Where Accelerate's `accumulate` is, which that method changes, and a call depends on."""
    now = accelerator.gradient_state
    ends = now.sync_with_dataloader and now.end_of_dataloader
    steps = ends or (accelerator.step + 1) % now.num_steps == 0
    return f"whether {label} synchronizes gradients", (now.num_steps, now.sync_gradients, steps)


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
