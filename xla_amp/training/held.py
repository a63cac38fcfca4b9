"""What an optimizer, or another object of a training step, holds in Python.

`containers` is the one reader of optimizers: state may be a parameter's or have a name, be in attributes, in the
options of groups, in an inner optimizer or in an object of a library.  `leaves` are the values in them.  `Saved`
restores containers, and `Held` tells what a step has changed in an optimizer.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from xla_amp.engines import base, devices
from xla_amp.errors import StepError

Path = tuple[Any, ...]
"""The attributes, keys and indices that lead to a value."""

STATEFUL = (torch.nn.Module, Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_IMMUTABLE = (tuple, frozenset)
_OPAQUE = frozenset({*sys.stdlib_module_names, "torch", "numpy", "jax", "jaxlib", "xla_amp"}) - {"__main__"}
"""Packages whose objects are not searched."""
_NOTES = frozenset(
    {
        "_opt_called",
        "_step_count",
        "_need_device_dtype_check_for_fused",
        "grad_scale",
        "found_inf",
    }
)
"""Attributes of an optimizer in which torch's schedules, checks and scalers note what they did."""


class Leaf(NamedTuple):
    """A value that is no container; ``holder[key]``, where the attributes of an object are a dict."""

    path: Path
    holder: Any
    key: Any
    value: Any


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an optimizer, or of an object of another library or of the program; None for other values."""
    if isinstance(value, Optimizer):
        return vars(value)
    if isinstance(value, torch.Tensor | torch.nn.Module | type) or type(value).__module__.partition(".")[0] in _OPAQUE:
        return None
    return getattr(value, "__dict__", None)


def containers(
    owner: Any,
    contents: Mapping[int, Any] | None = None,
    attributes: Callable[[Any], dict[str, Any] | None] = attributes,
) -> Iterator[tuple[Path, Any, Iterable[tuple[Any, Any]]]]:
    """The dicts, lists, tuples, sets and deques that `owner` reaches, each once, with its path and its items.

    Args:
        owner: an optimizer, or another object or container.
        contents: earlier contents of containers by ``id``.
        attributes: the dict of an object that is searched, None for one that is not.
    """
    seen = set[int]()
    todo: collections.deque[tuple[Path, Any]] = collections.deque([((), owner)])
    while todo:
        path, value = todo.popleft()
        held = value if isinstance(value, _CONTAINERS) else attributes(value)
        if held is None or id(held) in seen:
            continue
        seen.add(id(held))
        content = held if contents is None else contents.get(id(held), held)
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        items = [(each, each) for each in content] if isinstance(content, set | frozenset) else list(pairs)
        yield path, held, items
        todo.extend(((*path, key), inner) for key, inner in items if type(inner) not in _PLAIN)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, float, int, bool, str, type(None)))


def leaves(
    owner: Any,
    contents: Mapping[int, Any] | None = None,
    attributes: Callable[[Any], dict[str, Any] | None] = attributes,
) -> Iterator[Leaf]:
    """The values that `owner` holds: tensors, numbers, functions and objects that are not searched.

    Arguments are those of `containers`.
    """
    for path, held, items in containers(owner, contents, attributes):
        for key, value in items:
            plain = type(value) in _PLAIN
            if (plain or (not isinstance(value, _CONTAINERS) and attributes(value) is None)) and key not in _NOTES:
                yield Leaf((*path, key), held, key, value)


def device_tensors(owner: Any) -> Iterator[torch.Tensor]:
    """The dense tensors on an XLA device that `owner` holds, each once."""
    held = {id(leaf.value): leaf.value for leaf in leaves(owner) if isinstance(leaf.value, torch.Tensor)}
    return (each for each in held.values() if each.layout is torch.strided and devices.is_xla(each.device.type))


def storage_id(storage: Any) -> int:
    """The same for all objects that are one storage."""
    return int(storage._cdata)


def part(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same part of one storage, such as those of tied weights in a ``state_dict()``."""
    if tensor.device.type != base.LAZY or tensor.layout is not torch.strided:
        return id(tensor)
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def name(path: Path) -> str:
    """A path for people, such as ``state[Parameter(2, 3)].step``."""
    text = ""
    for key in path:
        if isinstance(key, str):
            text += f".{key}"
        else:
            text += f"[{type(key).__name__}{tuple(key.shape)}]" if isinstance(key, torch.Tensor) else f"[{key}]"
    return text.removeprefix(".")


def optimizers(owner: Optimizer) -> list[Optimizer]:
    """An optimizer and those that it holds."""
    found = {id(owner): owner}
    for _, _, items in containers(owner):
        found.update((id(value), value) for _, value in items if isinstance(value, Optimizer))
    return list(found.values())


class Saved:
    """The present contents of the containers that some objects reach.

    Args:
        owner: an object or a list of objects.
        attributes: as for `containers`.
    """

    def __init__(self, owner: Any, attributes: Callable[[Any], dict[str, Any] | None] = attributes) -> None:
        self._owner = owner
        self._held = [held for _, held, _ in containers(owner, None, attributes)]
        self._contents: dict[int, Any] = {
            id(held): held if isinstance(held, _IMMUTABLE) else held.copy() for held in self._held
        }

    def restore(self) -> None:
        """Restores the contents; no container is replaced."""
        for held in self._held:
            content = self._contents[id(held)]
            if content is held:
                continue
            held.clear()
            if isinstance(held, list | collections.deque):
                held.extend(content)
            else:
                held.update(content)


class Change(NamedTuple):
    """What a step has changed."""

    replaced: list[tuple[torch.Tensor, torch.Tensor, Any]]
    """New tensors on the device, each with the one that it replaces and the storage that this had."""
    path: Path | None
    """The first value on the host that differs."""
    created: bool
    """Whether there are other values than before."""


class Held(Saved):
    """What an optimizer holds, to tell what a step changes, and to restore it.

    Values on an XLA device are not saved: the engine undoes writes to them.
    """

    def __init__(self, owner: Optimizer) -> None:
        super().__init__(owner)
        self._storages: dict[int, tuple[torch.Tensor, Any]] = {}
        """By ``id`` of a tensor on an XLA device: the tensor and, on the lazy device, its storage."""
        self._copies: dict[int, tuple[Any, Any]] = {}
        """By ``id`` of a tensor or an array on the host: it and a copy."""
        for held in self._held:
            content = self._contents[id(held)]
            for value in _values(content):
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    if devices.is_xla(value.device.type):
                        # Values of torch_xla's tensors are not in their storages.
                        has_storage = value.device.type == base.LAZY
                        self._storages[id(value)] = value, value.untyped_storage() if has_storage else None
                    else:
                        self._copies[id(value)] = value, value.detach().clone()
                elif isinstance(value, np.ndarray):
                    self._copies[id(value)] = value, value.copy()
        trained = (each for each, _ in self._storages.values() if each.requires_grad and each.is_leaf)
        self._gradients = [(each, each.grad) for each in trained]

    def change(self, made: Callable[[torch.Tensor], bool]) -> Change:
        """What differs now; `made` tells whether the memory of a tensor on an XLA device is newer than this."""
        replaced = [
            (now, old, old.untyped_storage())
            for each, old in self._gradients
            if (now := each.grad) is not old and old is not None and now is not None and _fits(now, old) and made(now)
        ]
        if self._is_unchanged():
            return Change(replaced, None, created=False)
        old = {leaf.path: leaf.value for leaf in leaves(self._owner, self._contents)}
        new = {leaf.path: leaf.value for leaf in leaves(self._owner)}
        first, known = None, set[int]()
        for path, before in old.items():
            if path not in new or self._is_same(before, after := new[path]):
                continue
            saved = self._storages.get(id(before))
            if saved and isinstance(after, torch.Tensor) and _fits(after, before) and made(after):
                if id(after) not in known:
                    replaced.append((after, *saved))
                known.add(id(after))
            else:
                first = first or path
        return Change(replaced, first, created=old.keys() != new.keys())

    def _is_unchanged(self) -> bool:
        for held in self._held:
            content = self._contents[id(held)]
            if len(held) != len(content) or not all(map(is_, _values(held), _values(content))):
                return False
        tensors = (each for each, _ in (*self._storages.values(), *self._copies.values()))
        return all(self._is_same(each, each) for each in tensors)

    def _is_same(self, before: Any, after: Any) -> bool:
        if before is not after:
            return type(before) is type(after) and not isinstance(before, torch.Tensor) and _equal(before, after)
        if (saved := self._storages.get(id(before))) is not None:
            return saved[1] is None or storage_id(before.untyped_storage()) == storage_id(saved[1])
        return id(before) not in self._copies or _equal(*self._copies[id(before)])

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the contents, the storages of tensors, and the values of tensors and arrays on the host.

        Raises:
            StepError: a tensor on an XLA device has another size.
        """
        super().restore()
        for tensor, storage in self._storages.values():
            now = tensor.untyped_storage()
            if storage is not None and storage_id(now) != storage_id(storage):
                if now.nbytes() != storage.nbytes():
                    raise StepError(
                        f"{type(self._owner).__name__}.step() has changed the size of a tensor, in a step that the "
                        f"scaler skips: it is {tuple(tensor.shape)} now. Make its tensors in their final size before"
                    )
                view = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *view)
        for value, copied in self._copies.values():
            value[...] = copied


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a tensor can have the value of another one."""
    if new.layout is not torch.strided or not devices.is_xla(new.device.type):
        return False
    return new.shape == old.shape and new.dtype is old.dtype


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:
        return False  # objects that are compared to neither
