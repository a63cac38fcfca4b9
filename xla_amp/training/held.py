"""What an optimizer, or another object of a training step, held in Python before a step.

`Saved` restores the containers that the `reader` finds, and `Held` tells what a step has changed in an optimizer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from xla_amp.engines import base, devices
from xla_amp.errors import StepError
from xla_amp.training import reader

_IMMUTABLE = (tuple, frozenset)


def storage_id(storage: Any) -> int:
    """The same for all objects that are one storage."""
    return int(storage._cdata)


def part(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same part of one storage, such as those of tied weights in a ``state_dict()``."""
    if tensor.device.type != base.LAZY or tensor.layout is not torch.strided:
        return id(tensor)
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class Saved:
    """The present contents of the containers that some objects reach.

    Args:
        owner: an object or a list of objects.
        attributes: as for `containers`.
    """

    def __init__(self, owner: Any, attributes: Callable[[Any], dict[str, Any] | None] = reader.attributes) -> None:
        self._owner = owner
        self._held = [held for _, held, _ in reader.containers(owner, None, attributes)]
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
    path: reader.Path | None
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
        old = {leaf.path: leaf.value for leaf in reader.leaves(self._owner, self._contents)}
        new = {leaf.path: leaf.value for leaf in reader.leaves(self._owner)}
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
