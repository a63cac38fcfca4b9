"""The one reader of a training step: what its code names, and what the objects that it reaches hold.

`bound` are the values that the code of a step names, each with its name and the `Slot` by which it is read and
replaced.  `attributes` are those of an object that code names; `containers` and `leaves` are what an object holds at
any depth.  Skipping a step (`held`), restoring one (`step_state`), `find_overflow`, captured steps and exports ask
here.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_amp.engines import devices
from xla_amp.torch_common.trees import tree_leaves
from xla_amp.training import bytecode

Path: TypeAlias = tuple[Any, ...]
"""The attributes, keys and indices that lead to a value."""

STATEFUL: Final = (torch.nn.Module, Optimizer, torch.amp.GradScaler, LRScheduler)
"""What a step changes besides tensors."""
CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque)
FUNCTIONS: Final = (types.FunctionType, types.MethodType)
_OPAQUE: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy", "jax", "jaxlib", "xla_amp"}) - {"__main__"}
"""Packages whose objects are not searched."""
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter, float, int, bool, str, type(None)))
NOTES: Final = frozenset(
    {
        "_opt_called",
        "_step_count",
        "_need_device_dtype_check_for_fused",
        "grad_scale",
        "found_inf",
    }
)
"""Attributes of an optimizer in which torch's schedules, checks and scalers note what they did."""
_WITH_ATTRIBUTES: Final = (torch.Tensor, types.CellType)


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


class Named(NamedTuple):
    """What a name is bound to, the name, and where."""

    value: Any
    name: str
    slot: Slot


# ---- what code names -------------------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """What `bound` finds."""

    values: list[Named]
    names: tuple[str, ...]
    """Names of globals and attributes in the code."""
    functions: tuple[types.FunctionType, ...]
    """Those whose code it is."""


def bound(step: Any) -> Bound:
    """What the names of a step's own code are bound to now, and of methods that it calls of its object."""
    step = step if isinstance(step, types.MethodType) else inspect.unwrap(step)
    if isinstance(step, types.FunctionType):
        names = names_in(step.__code__)
        return Bound([*_of_function(step, names)], names, (step,))
    if isinstance(step, functools.partial):
        label, owners, inner = "an argument of the step", (*step.args, *step.keywords.values()), step.func
    elif isinstance(step, types.MethodType):
        label, owners, inner = "self", (step.__self__,), step.__func__
    else:
        label, owners, inner = "the step", (step,), type(step).__call__
    has_code = isinstance(inner, types.FunctionType) and not isinstance(step, torch.nn.Module)
    found = bound(inner) if has_code or isinstance(step, functools.partial) else Bound([], (), ())
    values, names, functions = found
    kind: Any = type(owners[0]) if owners else None
    for each in bytecode.methods(inspect.unwrap(inner), kind, None, False)[1:] if has_code else ():  # that it calls
        more = tuple(name for name in names_in(each.__code__) if name not in names)
        values += _of_function(each, more)
        names, functions = (*names, *more), (*functions, each)
    return Bound([*(Named(owner, label, NOWHERE) for owner in owners), *values], names, functions)


def _of_function(function: types.FunctionType, names: Iterable[str]) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # assigned later
            yield Named(cell.cell_contents, name, Slot(cell, "cell_contents"))
    space = function.__globals__
    for name in names:
        if name in space:
            yield Named(space[name], name, Slot(space, name))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Named(value, "a default of the step", NOWHERE)


def called(step: Any, value: Any, variable: str | None) -> tuple[str, ...]:
    """The names in the methods that a step calls of the value of a variable, by default its first argument."""
    kind: Any = type(value)
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not isinstance(function, types.FunctionType) or kind in _PLAIN:
        return ()
    methods = bytecode.methods(function, kind, variable)[1:]
    return tuple(itertools.chain.from_iterable(names_in(each.__code__) for each in methods))


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
            names = names_in(function.__code__)
            todo += [each.value for each in _of_function(function, names) if callable(each.value)]
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
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those inside of it use."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *itertools.chain.from_iterable(inner))))


def reachable(step: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Modules, optimizers, schedulers and scalers that `step` reaches: arguments, and what its code names.

    Objects that hold them (a trainer) are searched one attribute level deep.
    """
    found: dict[int, Any] = {}
    for value in tree_leaves([*arguments, *(each.value for each in bound(step).values)]):
        searched = not inspect.isroutine(value) and not isinstance(value, types.ModuleType | type)
        inner = tree_leaves([*getattr(value, "__dict__", {}).values()]) if searched else ()
        found.update((id(each), each) for each in (value, *inner) if isinstance(each, STATEFUL))
    return list(found.values())


# ---- what objects hold -----------------------------------------------------------------------------------------------


def named_attributes(
    value: Any, names: Sequence[str], objects: bool, looked: list[tuple[Callable[..., Any], str]]
) -> Iterator[Named]:
    """Attributes of an object that its code names, properties included.

    Args:
        value: an object, a class or a module of Python.
        names: of the attributes.
        objects: also those of any name that are tensors or keep state.
        looked: gets, for each place where an attribute was or might have been, what reads it: ``get(name, default)``.
    """
    own = getattr(value, "__dict__", {})
    spaces = [own, *map(vars, (value if isinstance(value, type) else type(value)).__mro__[:-1])]
    others = own if objects and not isinstance(value, types.ModuleType) else ()
    for name in dict.fromkeys((*names, *others)):
        if name not in names and not isinstance(own[name], (*STATEFUL, torch.Tensor)):
            continue
        for space in spaces:
            looked.append((space.get, name))
            if name in space:
                item = space[name]
                if isinstance(item, property) and not isinstance(value, type):
                    looked.append((functools.partial(_computed, value), name))
                    item = _computed(value, name)
                yield Named(item, name, Slot(space, name) if isinstance(space, dict) else NOWHERE)
                break


def _computed(value: Any, name: str, _: Any = None) -> Any:
    """What a property gives; None for tensors: they are data, which a program reads."""
    item = None
    with contextlib.suppress(Exception):
        item = getattr(value, name)
    return None if any(isinstance(each, torch.Tensor) for each in tree_leaves(item)) else item


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
        held = value if isinstance(value, CONTAINERS) else attributes(value)
        if held is None or id(held) in seen:
            continue
        seen.add(id(held))
        content = held if contents is None else contents.get(id(held), held)
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        items = [(each, each) for each in content] if isinstance(content, set | frozenset) else list(pairs)
        yield path, held, items
        todo.extend(((*path, key), inner) for key, inner in items if type(inner) not in _PLAIN)


def leaves(owner: Any, contents: Mapping[int, Any] | None = None) -> Iterator[Leaf]:
    """The values that `owner` holds: tensors, numbers, functions and objects that are not searched.

    Arguments are those of `containers`.
    """
    for path, held, items in containers(owner, contents):
        for key, value in items:
            plain = type(value) in _PLAIN
            if (plain or (not isinstance(value, CONTAINERS) and attributes(value) is None)) and key not in NOTES:
                yield Leaf((*path, key), held, key, value)


def device_tensors(owner: Any) -> Iterator[torch.Tensor]:
    """The dense tensors on an XLA device that `owner` holds, each once."""
    held = {id(leaf.value): leaf.value for leaf in leaves(owner) if isinstance(leaf.value, torch.Tensor)}
    return (each for each in held.values() if each.layout is torch.strided and devices.is_xla(each.device.type))


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
