"""Guards of a captured step: what must be unchanged for a replay, when it is compared, and what happens then.

1. Each call compares its arguments (shape, dtype, strides, aliasing, mesh layout; the value of what is no tensor) and
   the modes of the thread (grad mode, default dtype, autocast region and policy), as the cache key (`compiled_step`),
   and the Python values that the step can see and which parameters have no gradient (`Guards`, below).  If they differ
   from those of all cache entries, another entry is made, at most `limit`.
2. A replay compares the options of optimizers and the growth parameters of scalers (`cache_entry`), and whether each
   tensor of the state is still alive, written, and in its mesh layout (`replay`).  If they differ, the entry drops its
   capture and captures again.
3. A replay reads the float hyperparameters of optimizers, and the numbers computed from them go into the program
   (`symbolic_scalars`).  If a comparison of them in Python has another outcome now, the entry captures again.
4. Two recorded calls in a row are compared: operations, numbers, values from the host, random draws, returned Python
   values (`cache_entry`, `replay`).  If they agree, the entry captures.  After 4 calls that did not, one warning gives
   the reason and the step stays recorded.
5. After 8, 64, 512, ... replays a call is recorded and compared with the capture.  If it differs: `CaptureError`.

A recorded call also fails its capture if the step itself changes one of the Python values, since a replay would not.

`Guards` compares what `reach.Reach` lists, with types: every Python value that the step's code can reach by a name.  A
step that can see a value that cannot be compared (an iterator, an open file), or too many values, is not captured.  A
large model has hundreds of modules: their plain attributes, which parameters and submodules each has, and its hooks are
read again only when one of their dicts has a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import call, itemgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_amp.lazy.capture.reach import Reach, Values, is_frozen
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

try:
    from torch._C._dynamo.guards import dict_version
except ImportError:  # a private name
    dict_version = None  # type: ignore[assignment]

PLAIN = (bool, int, float, str, type(None))
"""Types of values that are compared."""
_MEMBERS = ("_parameters", "_modules")
"""Tables of a module whose items are compared by identity; a buffer may be replaced."""
_TABLES = (*_MEMBERS, "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Guards:
    """What of the state of Python `function` can see: modules, parameters, optimizers, scalers, values.

    Raises:
        NotReplayableError: it can see a value that cannot be compared, or too many.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._reach = Reach(function)
        self.optimizers, self.scalers = self._reach.optimizers, self._reach.scalers
        spaces = [(label, module.__dict__) for label, module in self._reach.modules]
        modules = [module for _, module in self._reach.modules]
        self.parameters = list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
        # Parallel lists, so that one C call reads all namespaces.
        named = [(label, *_frozen_names(space), space) for label, space in spaces]
        named = [row for row in named if row[1]]
        self._fields = [(label, names) for label, names, _, _ in named]
        self._readers = [read for _, _, read, _ in named]
        self._spaces = [space for *_, space in named]
        self._tables = [space[name] for _, space in spaces for name in _TABLES]
        self._hooks = [space[name] for _, space in spaces for name in _HOOKS]
        self._sizes = [space for _, space in spaces]
        versioned = [*self._sizes, *self._tables, *filter(None, self._hooks)]
        self._versioned = sorted(versioned, key=id)  # in memory order: fewer cache misses
        self._versions_read: tuple[int, int] | None = None
        self._module_values: list[Any] = []
        members = [(space[table], name) for _, space in spaces for table in _MEMBERS for name in space[table]]
        self._members = [table for table, _ in members]
        self._member_names = [name for _, name in members]
        self._on_device = [parameter for parameter in self.parameters if parameter.device.type == DEVICE_TYPE]
        self._structure = [
            *((f"the number of {name.strip('_')} of {label}", ()) for label, _ in spaces for name in _TABLES),
            *((f"the number of attributes of {label}", ()) for label, _ in spaces),
            *((f"the {name.strip('_').replace('_', ' ')} of {label}", ()) for label, _ in spaces for name in _HOOKS),
            *((f"which object {name} of a module is", ()) for name in self._member_names),
        ]

    # -- comparing -----------------------------------------------------------------------------------------------

    def values(self) -> tuple[Values, list[Any]]:
        """The current values, to compare with earlier ones by ``==``; the second item lists those of modules.

        Raises:
            NotReplayableError: a value cannot be compared, or there are too many.
        """
        found = self._reach.values()
        versions = self._versions()
        if versions is None or versions != self._versions_read:
            self._module_values = self._read_modules()
            self._versions_read = versions
        return found, self._module_values

    def _versions(self) -> tuple[int, int] | None:
        """A pair that changes when a module's dict or hooks change; None if torch does not provide versions.

        A changed dict gets a version above all other dicts' versions.  Hooks are added through handles, which are
        counted, so empty dicts of hooks need no look.
        """
        if dict_version is None:
            return None
        return max(map(dict_version, self._versioned), default=0), RemovableHandle.next_id

    def _read_modules(self) -> list[Any]:
        rows = map(call, self._readers, self._spaces)
        values: list[Any] = [tuple((type(each), each if each else repr(each)) for each in row) for row in rows]
        values += map(len, self._tables)
        values += map(len, self._sizes)
        values += map(tuple, self._hooks)
        values += map(id, map(dict.get, self._members, self._member_names))
        return values

    def storages(self, values: tuple[Values, list[Any]]) -> list[int]:
        """Which storages the tensors of the state have: those in `values`, of parameters and of optimizers.

        A replay needs those that the captured call left.
        """
        state = [
            tensor
            for optimizer in self.optimizers
            for slots in optimizer.state.values()
            for tensor in slots.values()
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE_TYPE
        ]
        return [*values[0].storages, *(id(tensor_io.buffer_of(tensor)) for tensor in (*self._on_device, *state))]

    def missing_gradients(self) -> list[bool]:
        """Which parameters have no gradient now."""
        return [parameter.grad is None for parameter in self.parameters]

    def difference(self, before: tuple[Values, list[Any]], after: tuple[Values, list[Any]]) -> str | None:
        """A description of the first value that differs between two results of `values`."""
        if before[0] != after[0]:
            return self._reached_difference(before[0].found, after[0].found)
        if len(before[1]) != len(after[1]):
            return "its modules' submodules, parameters or attributes"
        for (label, names), old, new in zip(self._labels(), before[1], after[1], strict=True):
            if old != new:
                if not names:
                    return f"{label} from {old!r} to {new!r}"
                if not len(names) == len(old) == len(new):
                    return f"the attributes of {label}"
                fields = zip(names, old, new, strict=True)
                return next(f"{label}.{name} from {a[1]!r} to {b[1]!r}" for name, a, b in fields if a != b)
        return None

    def _reached_difference(self, before: list[Any], after: list[Any]) -> str:
        labels = self._reach.labels()
        for label, (old_kind, old), (new_kind, new) in zip(labels, before, after, strict=False):
            if (old_kind, old) == (new_kind, new):
                continue
            if old_kind is new_kind and issubclass(old_kind, list | tuple | dict | set | frozenset):
                return f"{label} (a {old_kind.__name__}) from {old} to {new} items"
            if old_kind in PLAIN and new_kind in PLAIN:
                return f"{label} from {old!r} to {new!r}"
            return f"{label}"
        return "which values it can see"

    def _labels(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from self._fields
        yield from self._structure


def _frozen_names(
    namespace: dict[str, Any],
) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Names of the plain values in a namespace, and a function that reads all of them."""
    names = tuple(name for name, value in namespace.items() if is_frozen(value))
    if not names:
        return (), lambda namespace: ()
    getter = itemgetter(*names)
    return names, getter if len(names) > 1 else lambda namespace: (getter(namespace),)
