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

`Guards` finds the Python values through the function's code: closures, globals, defaults, ``self``, and the attributes
of the objects there, three levels deep.  Compared are values of plain types, which parameters and submodules each
module has, and its hooks.  A large model has hundreds of modules, so their attributes are read again only when one of
their dicts has a new version.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from operator import call, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

try:
    from torch._C._dynamo.guards import dict_version
except ImportError:  # a private name
    dict_version = None  # type: ignore[assignment]

PLAIN = (bool, int, float, str, type(None))
"""Types of values that are compared."""
_CONTAINERS = (list, dict, set)
_MEMBERS = ("_parameters", "_modules")
"""Tables of a module whose items are compared by identity; a buffer may be replaced."""
_TABLES = (*_MEMBERS, "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 3
"""Levels of attributes that are searched: a trainer's attribute's attribute."""


class Guards:
    """Modules, parameters, optimizers, scalers and plain values that `function` can see."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._seen: set[int] = set()
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self._namespaces: list[tuple[str, dict[str, Any]]] = []
        """(name for messages, attributes) of the modules and objects."""
        self._cells: list[tuple[str, types.CellType]] = []
        self._globals: list[tuple[dict[str, Any], str]] = []
        self._containers: list[tuple[str, Any]] = []
        self._visit_function(function, 0)
        self.parameters = list(dict.fromkeys(p for module in self.modules for p in module.parameters(recurse=False)))
        # Parallel lists, so that one C call reads all namespaces.  Objects that are not modules come first.
        named = sorted(
            ((label, *_plain_names(space), space) for label, space in self._namespaces),
            key=lambda row: _is_module(row[3]),
        )
        named = [row for row in named if row[1]]
        self._objects = sum(not _is_module(space) for *_, space in named)
        self._fields = [(label, names) for label, names, _, _ in named]
        self._readers = [read for _, _, read, _ in named]
        self._spaces = [space for *_, space in named]
        spaces = [(label, space) for label, space in self._namespaces if _is_module(space)]
        self._tables = [space[name] for _, space in spaces for name in _TABLES]
        self._hooks = [space[name] for _, space in spaces for name in _HOOKS]
        versioned = [*(space for _, space in spaces), *self._tables, *filter(None, self._hooks)]
        self._versioned = sorted(versioned, key=id)  # in memory order: fewer cache misses
        self._versions_read: tuple[int, int] | None = None
        self._module_values: list[Any] = []
        members = [(space[table], name) for _, space in spaces for table in _MEMBERS for name in space[table]]
        self._members = [table for table, _ in members]
        self._member_names = [name for _, name in members]
        self._structure = [
            *((f"the number of {name.strip('_')} of {label}", ()) for label, _ in spaces for name in _TABLES),
            *((f"the {name.strip('_').replace('_', ' ')} of {label}", ()) for label, _ in spaces for name in _HOOKS),
            *((f"which object {name} of a module is", ()) for name in self._member_names),
        ]

    # -- finding -------------------------------------------------------------------------------------------------

    def _visit_function(self, function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self._visit("a partial's argument", value, depth)
            return
        if inspect.ismethod(function):
            self._visit("self", function.__self__, depth)
            function = function.__func__
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None:
            if not isinstance(function, type):
                self._visit(type(function).__name__, function, depth)
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cells.append((name, cell))
            self._visit(name, _content(cell), depth)
        for name in _global_names(code):
            if name in function.__globals__:
                self._globals.append((function.__globals__, name))
                self._visit(name, function.__globals__[name], depth)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit("a default", value, depth)

    def _visit(self, label: str, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN, types.ModuleType, type, torch.Tensor)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, torch.amp.GradScaler):
            self.scalers.append(value)
        elif isinstance(value, torch.nn.Module):
            for path, module in value.named_modules():
                self._seen.add(id(module))
                self.modules.append(module)
                self._namespaces.append((f"{label}.{path}" if path else label, module.__dict__))
        elif isinstance(value, _CONTAINERS):
            self._containers.append((label, value))
            for item in value.values() if isinstance(value, dict) else value:
                self._visit_below(label, item, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if depth < _DEPTH and not str(getattr(value, "__module__", "")).startswith(("torch", "xla_amp.")):
                self._visit_function(value, depth + 1)
        elif hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "xla_amp")):
            self._namespaces.append((label, vars(value)))
            for name, item in list(vars(value).items()):
                self._visit_below(f"{label}.{name}", item, depth)

    def _visit_below(self, label: str, value: Any, depth: int) -> None:
        if depth < _DEPTH:
            self._visit(label, value, depth + 1)

    # -- comparing -----------------------------------------------------------------------------------------------

    def values(self) -> list[Any]:
        """The current plain values, to compare with an earlier list by ``==``; the last item lists those of modules."""
        values: list[Any] = [_plain(_content(cell)) for _, cell in self._cells]
        values += [_plain(space.get(name)) for space, name in self._globals]
        values += map(call, self._readers[: self._objects], self._spaces)
        versions = self._versions()
        if versions is None or versions != self._versions_read:
            self._module_values = self._read_modules()
            self._versions_read = versions
        values.append(self._module_values)
        return values

    def _versions(self) -> tuple[int, int] | None:
        """A pair that changes when a module's dict or hooks change; None if torch does not provide versions.

        A changed dict gets a version above all other dicts' versions.  Hooks are added through handles, which are
        counted, so empty dicts of hooks need no look.
        """
        if dict_version is None:
            return None
        return max(map(dict_version, self._versioned), default=0), RemovableHandle.next_id

    def _read_modules(self) -> list[Any]:
        values: list[Any] = list(map(call, self._readers[self._objects :], self._spaces[self._objects :]))
        values += map(len, self._tables)
        values += map(tuple, self._hooks)
        values += map(id, map(dict.get, self._members, self._member_names))
        return values

    def missing_gradients(self) -> list[bool]:
        """Which parameters have no gradient now."""
        return [parameter.grad is None for parameter in self.parameters]

    def container_sizes(self) -> list[int]:
        """Lengths of the containers now."""
        return [len(container) for _, container in self._containers]

    def difference(self, before: list[Any], after: list[Any]) -> str | None:
        """A description of the first value that differs between two lists of `values`."""
        before, after = ([*values[:-1], *values[-1]] for values in (before, after))
        if len(before) != len(after):
            return "its modules' submodules, parameters or attributes"
        for (label, names), old, new in zip(self._labels(), before, after, strict=True):
            if old != new:
                if not names:
                    return f"{label} from {old!r} to {new!r}"
                if not len(names) == len(old) == len(new):
                    return f"the attributes of {label}"
                fields = zip(names, old, new, strict=True)
                return next(f"{label}.{name} from {a!r} to {b!r}" for name, a, b in fields if a != b)
        return None

    def size_difference(self, before: list[int], after: list[int]) -> str | None:
        """A description of the first container whose length differs."""
        for (label, container), old, new in zip(self._containers, before, after, strict=True):
            if old != new:
                return f"{label} (a {type(container).__name__}) from {old} to {new} items"
        return None

    def _labels(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from ((name, ()) for name, _ in self._cells)
        yield from ((name, ()) for _, name in self._globals)
        yield from self._fields
        yield from self._structure


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _plain(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else None


def _is_module(namespace: dict[str, Any]) -> bool:
    return "_forward_hooks" in namespace


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _plain_names(
    namespace: dict[str, Any],
) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Names of the plain values in a namespace, and a function that reads all of them."""
    names = tuple(name for name, value in namespace.items() if isinstance(value, PLAIN))
    if not names:
        return (), lambda namespace: ()
    getter = itemgetter(*names)
    return names, getter if len(names) > 1 else lambda namespace: (getter(namespace),)
