"""The state of a captured step: entries to compare, and tensors by position.

A replay finds each tensor by its position, whatever object holds it now, so checkpoints may be loaded and parameters
replaced between calls.  A large model has hundreds of modules: modules, optimizers and scalers are read again only if
something in them was replaced, which is seen by identity, all at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from xla_amp.lazy import private_api
from xla_amp.lazy.capture.values import CONTAINERS, NOWHERE, Entry, Keys, Reading, StepNames, Tensor, plain
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SILENT: Final = frozenset({*vars(torch.nn.Module()), "_until_check"} - {"training"})
"""Attributes of modules and scalers that are read otherwise, or that no step depends on."""


class GroupNumber(NamedTuple):
    """A number of an optimizer that is an input of the program."""

    group: dict[str, Any]
    name: str
    at: int | None
    """In a tuple, such as ``betas``."""
    label: str
    owner: Optimizer


def number_of(option: GroupNumber) -> Any:
    """The present value of an option."""
    value = option.group[option.name]
    return value if option.at is None else value[option.at]


class _Objects:
    """Modules, optimizers and scalers, read in one pass.

    Args:
        owners: by id, each with its label.
    """

    def __init__(self, owners: dict[int, tuple[str, Any]]) -> None:
        self._given = list(owners)
        self.reading, self.inside = Reading(), Reading()
        """What was found, and, read at each call, what may change in place: containers and tensors on the host."""
        self._open: list[tuple[Any, str, Keys]] = []
        self.options: list[GroupNumber] = []
        self.owners: list[Any] = []
        """All of them, and the modules below."""
        self._tables: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        """Whose items are compared by identity, as are keys and values of `_tables`."""
        self._groups: list[tuple[dict[str, Any], list[str]]] = []
        """Of optimizers, each with the names of its options that are inputs."""
        waiting, self._known = dict(owners), set[int]()
        while waiting:
            key = next(iter(waiting))
            label, owner = waiting.pop(key)
            self._known.add(key)
            read = self._optimizer if isinstance(owner, Optimizer) else self._attributes
            (self._modules if isinstance(owner, torch.nn.Module) else read)(owner, label)
            self._look_inside()
            more = {**self.reading.objects, **self.inside.objects}
            waiting |= {each: item for each, item in more.items() if each not in self._known}
        self.buffers = buffers_of(self.reading.tensors)
        found = [each.tensor for each in self.reading.tensors if _may_have_gradient(each.tensor)]
        self.parameters: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in found}
        self._seen = self._now()

    def is_current(self, owners: dict[int, tuple[str, Any]]) -> bool:
        """Whether reading `owners` now would find the same."""
        now = self._now() if self._given == list(owners) else []
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return False
        self._look_inside()
        same = all(map(is_, buffers_of(self.reading.tensors), self.buffers))
        return same and self.inside.objects.keys() <= self._known

    def _look_inside(self) -> None:
        self.inside = Reading()
        for value, label, place in self._open:
            self.inside.add(value, label, place)

    def _now(self) -> list[Any]:
        """The objects whose identity says that nothing was replaced."""
        options = [value for group, inputs in self._groups for name, value in group.items() if name not in inputs]
        values = itertools.chain(*self._lists, *self._tables, *map(dict.values, self._tables))
        return [*map(type, self.owners), *values, *options, *map(type, map(number_of, self.options))]

    def _add(self, value: Any, label: str, place: Keys) -> None:
        on_host = isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE
        if on_host or (isinstance(value, CONTAINERS) and not isinstance(value, tuple)):
            self._open.append((value, label, place))
        else:
            self.reading.add(value, label, place)

    def _table(self, table: dict[Any, Any], label: str, silent: frozenset[str] = frozenset()) -> None:
        self._tables.append(table)
        for name, value in list(table.items()):
            if name not in silent:
                self._add(value, f"{label}.{name}", (table, (name,)))

    def _attributes(self, owner: Any, label: str, hooks: Iterable[dict[Any, Any]] = ()) -> None:
        space = vars(owner)
        self.owners.append(owner)
        self.reading.entries.append((f"the class of {label}", type(owner)))
        for table in hooks:
            self._tables.append(table)
            self.reading.entries += [(f"a hook of {label}", hook) for hook in table.values()]
        self._table(space, label, _SILENT | space.keys() if isinstance(owner, Optimizer) else _SILENT)

    def _modules(self, owner: torch.nn.Module, label: str) -> None:
        for path, module in owner.named_modules():
            name = f"{label}.{path}" if path else label
            self._attributes(module, name, map(vars(module).__getitem__, _HOOKS))
            for members in (module._parameters, module._buffers):
                self._table(members, name)
            self._tables.append(vars(module)["_modules"])

    def _optimizer(self, owner: Optimizer, label: str) -> None:
        """Options, hooks, parameters, and the state in the order of the parameters."""
        self._attributes(owner, label, (owner._optimizer_step_pre_hooks, owner._optimizer_step_post_hooks))
        self._tables.append(owner.state)
        self._lists.append(owner.param_groups)
        known = {id(each.tensor): at for at, each in enumerate(self.reading.tensors)}
        for number, group in enumerate(owner.param_groups):
            inputs = [name for name, value in group.items() if _are_inputs(owner, value)]
            self._groups.append((group, inputs))
            self._lists.append(group["params"])
            for name, value in group.items():
                of_option = f"{label}.param_groups[{number}][{name!r}]"
                if name in inputs:
                    indices = range(len(value)) if isinstance(value, tuple) else (None,)
                    self.options += [GroupNumber(group, name, index, of_option, owner) for index in indices]
                elif name not in ("params", "param_names"):
                    self._add(value, of_option + _remedy(owner, value), (group, (name,)))
            for index, parameter in enumerate(group["params"]):
                name = f"{label}.param_groups[{number}]['params'][{index}]"
                if id(parameter) in known:
                    self.reading.entries.append((name, known[id(parameter)]))
                else:
                    self._add(parameter, name, (group["params"], (index,)))
                state = owner.state.get(parameter, {})
                self._tables.append(state)
                for key, value in state.items():
                    self._add(value, f"the {key!r} of {name}{_remedy(owner, value)}", (state, (key,)))


def _are_inputs(optimizer: Optimizer, value: Any) -> bool:
    """Whether an option is given as numbers that an optimizer takes as inputs of the program."""
    numbers = value if isinstance(value, tuple) else (value,)
    return getattr(optimizer, "numbers_are_inputs", False) and all(type(number) is float for number in numbers)


def _remedy(optimizer: Optimizer, value: Any) -> str:
    """What to type where an option or the state of an optimizer is a value on the host and changes."""
    on_host = type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE)
    if not on_host or getattr(optimizer, "numbers_are_inputs", False):
        return ""
    name = type(optimizer).__name__
    tensor = f"{name}(..., lr=torch.tensor(..., device={DEVICE_TYPE!r}), capturable=True)"
    return f" (on the host; use {f'xla_amp.syncfree.{name}' if name in ('SGD', 'Adam', 'AdamW') else tensor})"


class Snapshot:
    """The state at one call, and its arguments: what is compared, and the tensors by position."""

    entries: list[Entry]
    """What calls of one capture have in common; those of objects that have not changed are the same tuples."""
    schedules: list[Entry]
    tensors: list[Tensor]
    """Arguments first."""
    parameters: list[torch.Tensor]
    """The tensors that may have a gradient."""
    gradients: list[torch.Tensor | None]
    buffers: list[Buffer | None]
    """By position: of `tensors`, then of `gradients`."""
    options: list[GroupNumber]
    numbers: list[float]
    """The values of `options`."""

    def tensor(self, at: int) -> torch.Tensor | None:
        """The tensor at a position."""
        count = len(self.tensors)
        return self.tensors[at].tensor if at < count else self.gradients[at - count]

    def place(self, at: int) -> Keys:
        """Where a tensor is bound."""
        count = len(self.tensors)
        return self.tensors[at].place if at < count else (self.parameters[at - count], ("grad",))

    def label(self, at: int) -> str:
        """What a position is called."""
        return self.tensors[at].label if at < len(self.tensors) else "a gradient"

    def unchanged(self) -> list[Entry]:
        """What a call may not change: a gradient may go or come."""
        numbers = zip(self.options, self.numbers, strict=True)
        return [*self.entries[:-1], *((option.label, plain(number)) for option, number in numbers), *self.schedules]

    def release(self) -> None:
        """Keeps no tensor alive."""
        self.tensors, self.parameters, self.gradients, self.buffers = [], [], [], []


class State:
    """What a step computes with: declared, named by its code, or seen in a recorded call.

    Args:
        step: the step.
        declared: models, optimizers, scalers, tensors, objects that hold them, or containers of these.
    """

    def __init__(self, step: Callable[..., Any], declared: Iterable[Any]) -> None:
        self._scope, self._declared = StepNames(step), list(declared)
        self.objects: _Objects | None = None
        """As they were last read; None keeps none alive that a recorded call may replace."""
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models and optimizers."""
        self._used: list[weakref.ref[Any]] = []
        """Those that a recorded call has used, and that nothing else names."""

    def saw(self, owner: Any) -> None:
        """Adds a model that a recorded call has called, or an optimizer that has stepped."""
        if owner not in self._known:
            self._known.update(owner.modules() if isinstance(owner, torch.nn.Module) else [owner])
            self._used.append(weakref.ref(owner))

    def snapshot(self, entries: list[Entry], arguments: list[tuple[str, Any]]) -> Snapshot:
        """Reads the state and the arguments.

        Args:
            entries: what else is compared, first.
            arguments: in order, with their labels.
        """
        given, reading = Reading(), Reading()
        for label, value in arguments:
            if not given.look(value, label, NOWHERE, ()):
                given.entries.append((label, (type(value), value)))
        for index, each in enumerate(self._declared):
            reading.look(each, f"state[{index}]", (self._declared, (index,)), tuple(getattr(each, "__dict__", ())))
        for value, label, place in self._scope.bound():
            reading.look(value, label, place, self._scope.names)
        for reference in self._used:
            owner = reference()
            reading.add(owner, f"the {type(owner).__name__} that it calls", NOWHERE)
        objects, owners = self.objects, {**given.objects, **reading.objects}
        if objects is None or not objects.is_current(owners):
            objects = self.objects = _Objects(owners)
            self._known.update(objects.owners)
        readings = (given, reading, objects.inside)
        fresh = [each for found in readings for each in found.tensors]
        now = Snapshot()
        now.tensors = [*fresh, *objects.reading.tensors]
        loose = {id(each.tensor): each.tensor for each in fresh if _may_have_gradient(each.tensor)}
        now.parameters = list({**objects.parameters, **loose}.values())
        now.gradients = [parameter.grad for parameter in now.parameters]
        of_tensors = [*buffers_of(fresh), *objects.buffers]
        of_gradients = [None if each is None or each.is_sparse else tensor_io.buffer_of(each) for each in now.gradients]
        now.buffers, firsts = [*of_tensors, *of_gradients], dict[Buffer | None, int]()
        now.options, now.numbers = objects.options, list(map(number_of, objects.options))
        now.schedules = [entry for found in readings for entry in found.schedules]
        hooks = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in now.parameters]
        now.entries = [
            *entries,
            *(entry for found in readings for entry in found.entries),
            *objects.reading.entries,
            ("which tensors share memory", _shared(of_tensors, firsts)),
            ("which parameters require a gradient", list(map(_requires_grad, now.parameters))),
            ("hooks of its parameters", [[*each.values()] for pair in hooks for each in pair if each]),
            ("hooks of all modules", [hook for hook in private_api.hooks_of_all_modules() if not _is_ours(hook)]),
            ("which gradients share memory", _shared(of_gradients, firsts, len(of_tensors))),
        ]
        return now


_storage = attrgetter("_xla_amp")
_tensor = attrgetter("tensor")
_requires_grad = attrgetter("requires_grad")


def buffers_of(tensors: list[Tensor]) -> list[Buffer]:
    """The buffers of tensors on the device."""
    return list(map(_storage, map(torch.Tensor.untyped_storage, map(_tensor, tensors))))


def _shared(
    buffers: Sequence[Buffer | None], firsts: dict[Buffer | None, int], start: int = 0
) -> list[tuple[int, int]]:
    """The positions, from `start` on, of buffers that are at an earlier one too, each with that; `firsts` learns."""
    before, found = len(firsts), list(map(firsts.setdefault, buffers, itertools.count(start)))
    if len(firsts) == before + len(buffers):
        return []
    return [(at, first) for at, first in enumerate(found, start) if at != first and buffers[at - start] is not None]


def _is_ours(hook: Any) -> bool:
    """Whether a hook is this package's: those come and go with each step."""
    return str(getattr(hook, "__module__", "")).startswith("xla_amp.")


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
