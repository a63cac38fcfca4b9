"""A module with its submodules, as a captured step compares them: by identity first, all at once.

A large model has hundreds of modules with thousands of attributes.  While each has the class, attributes, parameters,
submodules, names of buffers and hooks that it had when it was read, only values that change in place are walked again.
"""

from __future__ import annotations

import weakref
from collections.abc import Set
from itertools import chain
from operator import is_
from typing import Any, Final

import torch

LEAVES: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
"""Types of values that never change."""
_MEMBERS: Final = ("_parameters", "_modules")
"""Tables of a module whose items are compared by identity; a buffer may be replaced."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES: Final = frozenset(
    {
        *_MEMBERS, *_HOOKS, "_buffers", "_non_persistent_buffers_set", "_is_full_backward_hook",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    }
)  # fmt: skip


class ModuleTree:
    """A module and all below it.  `update` reads what the other attributes say.

    Args:
        root: the module.
        label: its name for messages.
    """

    def __init__(self, root: torch.nn.Module, label: str) -> None:
        self.root, self._label = root, label
        self.modules: list[torch.nn.Module] = []
        self.kinds: dict[type, str] = {}
        """Each class of a module -> what it is for messages."""
        self.members: list[tuple[str, Any]] = []
        """(which object, entry) of parameters and modules."""
        self.values: list[tuple[str, Any]] = []
        """(name, type and value) of what changes only when an attribute gets another object."""
        self.open: list[tuple[str, Any]] = []
        """(name, value) of what may change in place: attributes that the code names, and hooks."""
        self.hooked: list[tuple[str, torch.Tensor]] = []
        """Parameters with hooks; `guards` compares how many each one has."""
        self._compared: list[dict[str, Any]] = []
        """Dictionaries of the modules whose values are compared by identity."""
        self._tables: list[dict[str, Any]] = []
        """Those, and the buffers, of which only the names are compared."""
        self._sizes: list[int] = []
        self._objects: list[Any] = []

    def update(self, names: Set[str]) -> None:
        """Reads the modules if one of them has another object than before.

        Args:
            names: attributes that the code names.
        """
        sizes, objects = self._now()
        if not objects or sizes != self._sizes or not all(map(is_, objects, self._objects)):
            self._read(names)
            self._sizes, self._objects = self._now()

    def forget(self) -> None:
        """Keeps no object of the modules alive, which a recorded call may replace."""
        self._sizes, self._objects, self.open, self.hooked = [], [], [], []

    def _now(self) -> tuple[list[int], list[Any]]:
        keys, values = chain.from_iterable(self._tables), chain.from_iterable(map(dict.values, self._compared))
        return list(map(len, self._tables)), [*map(type, self.modules), *map(vars, self.modules), *keys, *values]

    def _read(self, names: Set[str]) -> None:
        self.modules, self.kinds, self.open, self.hooked = [], {}, [], []
        members: list[tuple[str, Any]] = []
        values: list[tuple[str, Any]] = []
        for path, module in self.root.named_modules():
            label, space = f"{self._label}.{path}" if path else self._label, vars(module)
            self.modules.append(module)
            self.kinds.setdefault(type(module), f"type({label})")
            members.append((f"which object {label} is", identity(module)))
            values.append((f"the class of {label}", (type(module), None)))
            values.append((f"the number of attributes of {label}", (int, len(space))))
            for name, value in space.items():
                if is_frozen(value):
                    values.append((f"{label}.{name}", plain(value)))
                elif name in names and name not in _TABLES:
                    self.open.append((f"{label}.{name}", value))
            for name in _MEMBERS:
                members.extend(
                    (f"which object {key} of {label} is", identity(item)) for key, item in space[name].items()
                )
            for name in ("_buffers", *_HOOKS):
                words = name.strip("_").replace("_", " ")
                values.append((f"the {words} of {label}", (dict, tuple(space[name]))))
            self.open.extend((f"a hook of {label}", hook) for name in _HOOKS for hook in space[name].values())
            parameters = [each for each in space["_parameters"].values() if each is not None]
            self.hooked.extend((f"a parameter of {label}", each) for each in parameters if hooks_of(each))
        self.values = values
        if members != self.members:  # the same list is compared faster
            self.members = members
        spaces = list(map(vars, self.modules))
        self._compared = [*spaces, *(space[name] for space in spaces for name in (*_MEMBERS, *_HOOKS))]
        self._tables = [*self._compared, *(space["_buffers"] for space in spaces)]


def identity(value: Any) -> tuple[Any, Any]:
    """An entry that is equal only to that of the same object, and keeps no object alive."""
    return (type(value), id(value)), None if value is None else weakref.ref(value)


def plain(value: Any) -> tuple[Any, Any]:
    """An entry of a value that `is_frozen`; 0.0 and -0.0 differ, as do ``(2,)`` and ``(2.0,)``."""
    kind = type(value)
    return kind, repr(value) if not value or kind is tuple or kind is complex else value


def is_frozen(value: Any) -> bool:
    """Whether a value is a plain one, or a tuple of plain ones: it changes only when its name gets another."""
    return type(value) in LEAVES or (type(value) is tuple and all(type(item) in LEAVES for item in value))


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """What a backward pass calls for a tensor's gradient, and after a leaf has it."""
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]
