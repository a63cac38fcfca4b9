"""Save the state of a training step, and restore it.

`StepState` saves Python objects: attributes of modules, optimizers, schedulers and scalers, `.grad`, and the states of
random generators; `OptimizerState` is its part for one optimizer.  Values of tensors need a copy before each write.
There are two ways to it:

* `restored` copies before each operation that writes, on any device (`xla_amp.find_overflow`, `xla_amp.search`);
* a step that a scaler skips selects between old and new values on the device (`xla_amp.backends.skip_step`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.backends import base, devices
from xla_amp.backends.trees import tree_leaves, tree_map

Path = tuple[Any, ...]
"""Where a value of an optimizer is: (parameter or number of the group, name), and an index if it is in a container."""

STATEFUL = (torch.nn.Module, Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)


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


class StepState:
    """What a training step changes in Python, as it is now.

    Args:
        objects: modules, optimizers, schedulers and scalers.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects: dict[int, Any] = {}
        gradients: list[torch.Tensor] = []
        for value in objects:
            if isinstance(value, torch.nn.Module):
                self._objects.update((id(part), part) for part in value.modules())
                gradients += value.parameters()
            else:
                self._objects[id(value)] = value
            if isinstance(value, Optimizer):
                gradients += [parameter for group in value.param_groups for parameter in group["params"]]
        self._attributes = [_Attributes(value) for value in self._objects.values()]
        optimizers = [value for value in self._objects.values() if isinstance(value, Optimizer)]
        self._optimizers = [OptimizerState(optimizer) for optimizer in optimizers]
        self._gradients = [(parameter, parameter.grad) for parameter in gradients]
        self._random_state = random_state()

    def restore(self) -> None:
        """Restores all of it."""
        for attributes in self._attributes:
            attributes.restore()
        for state in self._optimizers:
            state.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        set_random_state(self._random_state)


class _Attributes:
    """Attributes of an object, and the entries of dicts and lists among them."""

    def __init__(self, value: Any) -> None:
        self._value, self._saved = value, dict(vars(value))
        self._inside: list[tuple[Any, list[Any]]] = []
        if isinstance(value, torch.amp.GradScaler):
            # Its own dicts would keep what the step puts into them, so that it would be a result of a program.
            self._saved = {name: _copied(item) for name, item in self._saved.items()}
        elif not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            elsewhere = value.state if isinstance(value, Optimizer) else None  # `OptimizerState` has it
            inside = (item for item in self._saved.values() if isinstance(item, dict | list) and item is not elsewhere)
            self._inside = [(item, _entries(item)) for item in inside]

    def restore(self) -> None:
        """Restores them, without replacing a dict or a list."""
        vars(self._value).clear()
        vars(self._value).update(self._saved)
        for item, entries in self._inside:
            item.clear()
            if isinstance(item, list):
                item.extend(entries)
                continue
            for key, value, inner in entries:
                item[key] = value
                if inner is not None:
                    _refill(value, inner)


def _entries(item: Any) -> list[Any]:
    """Copied entries of a list, or of a dict and of the dicts in it."""
    if isinstance(item, list):
        return list(item)
    return [(key, value, dict(value) if isinstance(value, dict) else None) for key, value in item.items()]


def _copied(value: Any) -> Any:
    """A copy of a dict and of the dicts in it; another value itself."""
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)
    copied.update((key, dict(inner)) for key, inner in value.items() if isinstance(inner, dict))
    return copied


def _refill(target: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    target.clear()
    target.update(content)


class OptimizerState:
    """An optimizer's state for some parameters, and its groups' options, as they are now.

    Args:
        optimizer: any optimizer.
        parameters: whose state is saved; all state by default.
    """

    tensors: dict[Path, torch.Tensor]
    """State of parameters on the XLA device that is there too.  These are the tensors themselves, not their values."""
    host: dict[Path, Any]
    """The other state of such parameters, and options that are no such tensors; tensors are copies."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor] | None = None) -> None:
        self._state: dict[Any, Any] = optimizer.state
        self._only = parameters
        keys = self._state if parameters is None else [each for each in parameters if each in self._state]
        self._states = {key: (self._state[key], _entries_of(self._state[key])) for key in keys}
        self._groups = [(group, _entries_of(group)) for group in optimizer.param_groups]
        self.tensors, self.host = {}, {}
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, (_, entries) in self._states.items():
            if isinstance(key, torch.Tensor) and devices.is_xla(key.device.type):
                for name, value in entries.items():
                    self._add((key, name), value)
        for number, (_, options) in enumerate(self._groups):
            for name, value in options.items():
                self._add((number, name), value)

    def _add(self, path: Path, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if devices.is_xla(value.device.type):
                self.tensors[path] = value
            else:
                self.host[path] = kept = value.detach().clone()
                self._copied.append((value, kept))
        elif isinstance(value, list | tuple | dict):
            for index, leaf in enumerate(tree_leaves(value)):
                self._add((*path, index), leaf)
        else:
            self.host[path] = value

    def same_host(self, other: OptimizerState) -> bool:
        """Whether the values of `host` are those of `other`."""
        if self.host.keys() != other.host.keys():
            return False
        return all(_equal(value, other.host[path]) for path, value in self.host.items())

    @torch.no_grad()
    def restore(self) -> None:
        """Restores all but the values of `tensors`."""
        for key in list(self._state) if self._only is None else self._only:
            if key not in self._states:
                self._state.pop(key, None)
        for key, (state, entries) in self._states.items():
            self._state[key] = state
            if isinstance(state, dict):
                _refill(state, entries)
        for group, options in self._groups:
            _refill(group, {"params": group["params"], **options})
        for tensor, value in self._copied:
            tensor.copy_(value)


def _entries_of(owner: Any) -> dict[str, Any]:
    """The entries of a parameter's state or of a group, with copies of the containers among them."""
    if not isinstance(owner, dict):
        return {}
    return {
        name: tree_map(lambda leaf: leaf, value) if isinstance(value, list | tuple | dict) else value
        for name, value in owner.items()
        if name != "params"
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one is other or bool(one == other)


def random_state() -> dict[str, Any]:
    """States of the random generators of Python, of torch's CPU, and of the devices in use."""
    engine: Any = base.select()
    found: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if engine.is_started():
        found["xla"] = engine.get_rng_state()
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state` returned; states of devices that are not in use are left out."""
    engine: Any = base.select()
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "xla" in state and engine.is_started():
        engine.set_rng_state(state["xla"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def restored(objects: Iterable[Any]) -> Iterator[None]:
    """On exit, restores the values of tensors, `objects` (as for `StepState`) and random generators."""
    state, written = StepState(objects), _Written()
    try:
        with written:
            yield
    finally:
        state.restore()
        written.restore()


class _Written(TorchDispatchMode):
    """Copies tensors before operations write to them, except tensors that the step created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._created: dict[int, Any] = {}
        self._saved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            key = _storage(tensor)
            if key not in self._created:
                # Keep a detached alias: `copy_` into a parameter itself is an error.
                view = (key, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
                if view not in self._saved:
                    self._saved[view] = tensor.detach(), tensor.detach().clone()
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_sparse}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and _storage(tensor) not in known:
                # A weak reference prevents reuse of the address without keeping the memory.
                self._created[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result

    @torch.no_grad()
    def restore(self) -> None:
        """Writes the copies back."""
        # In reverse order: an earlier copy may overlap a later one and has the older values.
        for tensor, value in reversed(self._saved.values()):
            tensor.copy_(value)


UNDECLARED = frozenset({"running_mean", "running_var"})
"""Arguments that batch normalization updates in place although its schema does not declare it."""


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
