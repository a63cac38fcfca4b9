"""Run a training step and restore the state from before it.

Tensors: a dispatch mode copies each existing tensor before an operation writes to it.  Python objects: attributes of
modules, optimizers, schedulers and scalers, options of parameter groups, `.grad`, and random generator states.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xla_amp.backends import base

STATEFUL = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)


def reachable(step: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Modules, optimizers, schedulers and scalers that `step` reaches: arguments, closure, globals, its bound object.

    Objects that hold them (a trainer) are searched one attribute level deep.
    """
    plain = inspect.unwrap(step)
    while hasattr(plain, "func"):  # functools.partial
        arguments = [*arguments, *plain.args, *plain.keywords.values()]
        plain = plain.func
    values = [*tree_leaves(list(arguments))]
    owner = getattr(plain, "__self__", None)
    if owner is None and not inspect.isfunction(plain):
        owner = plain  # a callable object
    function = getattr(plain, "__func__", plain)
    if not inspect.isfunction(function):
        function = vars(type(plain)).get("__call__")
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        values += [*variables.nonlocals.values(), *variables.globals.values()]
    if owner is not None:
        values.append(owner)
    found: dict[int, Any] = {}
    for value in values:
        inner = vars(value).values() if hasattr(value, "__dict__") and not inspect.isroutine(value) else ()
        if inspect.ismodule(value) or isinstance(value, type):
            inner = ()
        for candidate in (value, *tree_leaves(list(inner))):
            if isinstance(candidate, STATEFUL):
                found[id(candidate)] = candidate
    return list(found.values())


UNDECLARED = frozenset({"running_mean", "running_var"})
"""Arguments that batch normalization updates in place although its schema does not declare it."""


class _BackupMode(TorchDispatchMode):
    """Copies tensors before operations write to them, except tensors that the step created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._created: dict[int, Any] = {}
        self.saved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            key = _storage(tensor)
            if key not in self._created:
                # Keep a detached alias: `copy_` into a parameter itself is an error.
                view = (key, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
                if view not in self.saved:
                    self.saved[view] = tensor.detach(), tensor.detach().clone()
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_sparse}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and _storage(tensor) not in known:
                # A weak reference prevents reuse of the address without keeping the memory.
                self._created[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result

    def restore(self) -> None:
        # In reverse order: an earlier copy may overlap a later one and has the older values.
        for tensor, value in reversed(self.saved.values()):
            tensor.copy_(value)


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The dense tensors that an ATen operation writes to, by its schema and by `UNDECLARED`."""
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if not declared and argument.name not in UNDECLARED:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse:
                yield tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def restoring(objects: Iterable[Any]) -> Iterator[None]:
    """On exit, restores tensors, `objects` and random generators to their state on entry."""
    undo: list[Callable[[], None]] = [_random_state()]
    modules: dict[int, torch.nn.Module] = {}
    for value in objects:
        if isinstance(value, torch.nn.Module):
            modules.update((id(part), part) for part in value.modules())
        else:
            undo.append(_attributes(value, deep=not isinstance(value, torch.optim.lr_scheduler.LRScheduler)))
        if isinstance(value, torch.optim.Optimizer):
            undo.append(_groups(value))
            undo += [_gradient(p) for group in value.param_groups for p in group["params"]]
    for part in modules.values():
        undo.append(_attributes(part, deep=True))
        undo += [_gradient(parameter) for parameter in part.parameters(recurse=False)]
    backup = _BackupMode()
    try:
        with backup:
            yield
    finally:
        for restore in reversed(undo):
            restore()
        with torch.no_grad():
            backup.restore()


def _attributes(value: Any, deep: bool) -> Callable[[], None]:
    """Restores attributes; with `deep` also the entries of dicts and lists among them, and of dicts in those dicts."""
    attributes = dict(vars(value))
    inside = [(item, _copied(item)) for item in attributes.values() if deep and isinstance(item, dict | list)]

    def restore() -> None:
        vars(value).clear()
        vars(value).update(attributes)
        for item, entries in inside:
            _refill(item, entries)

    return restore


def _copied(item: Any) -> Any:
    if isinstance(item, dict):
        return [(k, v, dict(v) if isinstance(v, dict) else None) for k, v in item.items()]
    return list(item)


def _refill(item: Any, entries: Any) -> None:
    item.clear()
    if isinstance(item, list):
        item.extend(entries)
        return
    for key, value, inner in entries:
        item[key] = value
        if inner is not None:
            value.clear()
            value.update(inner)


def _groups(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    groups = [(group, dict(group)) for group in optimizer.param_groups]

    def restore() -> None:
        for group, options in groups:
            group.clear()
            group.update(options)

    return restore


def _gradient(parameter: torch.Tensor) -> Callable[[], None]:
    gradient = parameter.grad

    def restore() -> None:
        parameter.grad = gradient

    return restore


def _random_state() -> Callable[[], None]:
    engine: Any = base.select()
    engine = engine if engine.is_started() else None
    states = random.getstate(), torch.get_rng_state(), engine.get_rng_state() if engine else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if engine is not None:
            engine.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore
