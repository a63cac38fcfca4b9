"""The state of a captured step: its modules, optimizers and scalers, as values to compare and tensors by position.

A replay finds each tensor by its position in this list, whatever object holds it now, so checkpoints may be loaded and
parameters replaced between calls.  A large model has hundreds of modules: an object is read again only if something in
it was replaced, which is seen by identity, all at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

from xla_amp.lazy import private_api
from xla_amp.lazy.capture.values import Keys, Reading, StepNames, Tensor
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MEMBERS: Final = ("_parameters", "_modules", "_buffers")
_TABLES: Final = (*_MEMBERS, *_HOOKS)
_SILENT: Final = frozenset(
    {
        *_TABLES, "_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    }
)  # fmt: skip
"""Attributes of modules that are read otherwise, or that no step reads."""
_OF_SCALERS: Final = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval", "_min_scale", "_max_scale")


class GroupNumber(NamedTuple):
    """A float among the options of an optimizer."""

    group: dict[str, Any]
    name: str
    at: int | None
    """In a tuple, such as ``betas``."""
    label: str
    owner: Optimizer


def value_of(option: GroupNumber) -> Any:
    """The present value of an option."""
    value = option.group[option.name]
    return value if option.at is None else value[option.at]


class _StatePart:
    """What one object of the state is read as, again only after something in it was replaced.

    Args:
        owner: the object.
        label: its name for messages.
    """

    def __init__(self, owner: Any, label: str) -> None:
        self.owner, self.label = owner, label
        self.forget()

    def forget(self) -> None:
        """Keeps no object alive that a recorded call may replace."""
        self._seen: list[Any] = []
        self.buffers: list[Buffer] = []
        """Of the tensors in `reading`."""
        self.reading = Reading()
        self.parameters: list[tuple[torch.Tensor, str, Keys]] = []
        self.open: list[tuple[Any, str, Keys]] = []
        """Containers and tensors on the host, which may change in place: read at each call."""
        self.options: list[GroupNumber] = []

    def update(self) -> _StatePart:
        """Reads the object if it has changed."""
        seen = self._now()
        if self._seen and len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            buffers = buffers_of(self.reading.tensors)
            if all(map(is_, buffers, self.buffers)):
                return self
        self.forget()
        self._read()
        self._seen, self.buffers = self._now(), buffers_of(self.reading.tensors)
        return self

    def _now(self) -> list[Any]:
        """The objects whose identity says that nothing was replaced."""
        raise NotImplementedError

    def _read(self) -> None:
        raise NotImplementedError

    def _add(self, value: Any, label: str, place: Keys) -> None:
        on_host = isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE
        if on_host or isinstance(value, dict | list | set):
            self.open.append((value, label, place))
        else:
            self.reading.add(value, label, place)

    def _add_parameter(self, value: torch.Tensor | None, label: str, place: Keys) -> None:
        if value is not None and value.device.type == DEVICE_TYPE:
            self.parameters.append((value, label, place))
        else:
            self._add(value, label, place)


class _Module(_StatePart):
    """A module and all below it."""

    modules: tuple[torch.nn.Module, ...] = ()
    _spaces: tuple[dict[str, Any], ...] = ()

    def _now(self) -> list[Any]:
        tables: list[dict[Any, Any]] = [space[name] for space in self._spaces for name in _TABLES] + list(self._spaces)
        return [*map(type, self.modules), *itertools.chain(*tables, *map(dict.values, tables))]

    def _read(self) -> None:
        named = list(self.owner.named_modules())
        self.modules = tuple(module for _, module in named)
        self._spaces = tuple(map(vars, self.modules))
        for path, module in named:
            label, space = f"{self.label}.{path}" if path else self.label, vars(module)
            self.reading.compare(type(module), f"the class of {label}")
            self.reading.compare(tuple(map(tuple, map(space.__getitem__, _MEMBERS))), f"the members of {label}")
            for name, value in list(space.items()):
                if name not in _SILENT:
                    self._add(value, f"{label}.{name}", (space, (name,)))
            for name, value in space["_parameters"].items():
                self._add_parameter(value, f"{label}.{name}", (space["_parameters"], (name,)))
            for name, value in space["_buffers"].items():
                self._add(value, f"{label}.{name}", (space["_buffers"], (name,)))
            for name in _HOOKS:
                for hook in space[name].values():
                    self.reading.compare(hook, f"a hook of {label}")


class _Optimizer(_StatePart):
    """An optimizer: options, hooks, parameters, and its state in the order of the parameters."""

    owner: Optimizer

    def _now(self) -> list[Any]:
        groups, states = self.owner.param_groups, [each for each in self.owner.state.values() if isinstance(each, dict)]
        floats = {(id(group), name) for group, name, *_ in self.options}
        fixed = [v for group in groups for name, v in group.items() if (id(group), name) not in floats]
        numbers = map(type, map(value_of, self.options))
        hooks = self.owner._optimizer_step_pre_hooks, self.owner._optimizer_step_post_hooks
        tables = itertools.chain(*states, *(each.values() for each in (*states, *hooks)))
        return [*groups, *fixed, *numbers, *itertools.chain(*(group["params"] for group in groups)), *states, *tables]

    def _read(self) -> None:
        owner, label = self.owner, self.label
        self.reading.compare(type(owner), f"the class of {label}")
        for hook in (*owner._optimizer_step_pre_hooks.values(), *owner._optimizer_step_post_hooks.values()):
            self.reading.compare(hook, f"a hook of {label}")
        for number, group in enumerate(owner.param_groups):
            self.reading.compare(tuple(group), f"the options of {label}.param_groups[{number}]")
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    self._option(group, name, value, f"{label}.param_groups[{number}][{name!r}]")
            for index, parameter in enumerate(group["params"]):
                where = f"{label}.param_groups[{number}]['params'][{index}]"
                self._add_parameter(parameter, where, (group["params"], (index,)))
                state = owner.state.get(parameter, {})
                self.reading.compare(tuple(state), f"the state of {where}")
                for name, value in state.items():
                    self._add(value, f"the {name!r} of {where}", (state, (name,)))

    def _option(self, group: dict[str, Any], name: str, value: Any, label: str) -> None:
        items = list(enumerate(value)) if isinstance(value, tuple) else [(None, value)]
        if not all(type(item) is float for _, item in items):
            self._add(value, label, (group, (name,)))
            return
        self.reading.compare(len(items), label)
        self.options += [GroupNumber(group, name, index, label, self.owner) for index, _ in items]


class _Scaler(_StatePart):
    """A loss scaler."""

    def _now(self) -> list[Any]:
        space = vars(self.owner)
        stages = [state["stage"] for state in space["_per_optimizer_states"].values()]
        return [*map(space.get, (*_OF_SCALERS, "_scale", "_growth_tracker")), *(space.get("_counters") or ()), *stages]

    def _read(self) -> None:
        space = vars(self.owner)
        for name in _OF_SCALERS:
            self.reading.add(space.get(name), f"{self.label}.{name.strip('_')}", (space, (name,)))
        for name in ("_scale", "_growth_tracker", "_counters"):
            self.reading.add(space.get(name), f"{self.label}.{name.strip('_')}", (space, (name,)))
        stages = [state["stage"] for state in space["_per_optimizer_states"].values()]
        self.reading.compare(stages, f"the optimizers that {self.label} has unscaled or stepped since its update()")


_PARTS: Final = ((torch.nn.Module, _Module), (Optimizer, _Optimizer), (torch.amp.GradScaler, _Scaler))


class Snapshot:
    """The state at one call: what is compared, and the tensors by position."""

    def __init__(self) -> None:
        self.chunks: list[tuple[list[str], list[Any]]] = []
        """Labels and values; lists of objects that have not changed are the same ones."""
        self.tensors: list[Tensor] = []
        self.parameters: list[torch.Tensor] = []
        """The tensors that may have a gradient."""
        self.gradients: list[torch.Tensor | None] = []
        self.options: list[GroupNumber] = []
        self.numbers: list[float] = []
        """The values of `options`."""
        self.arguments: list[Buffer] = []
        """Buffers of the tensor arguments."""
        self.buffers: list[Buffer] = []
        """Those, then of `tensors`."""
        self.schedules: list[tuple[str, int]] = []

    def values(self) -> list[list[Any]]:
        """What two calls must have in common for one capture."""
        return [values for _, values in self.chunks]

    def start(self) -> tuple[list[bool], list[float]]:
        """What matters as far as the step reads it: which gradients there are, and the hyperparameters."""
        return [gradient is not None for gradient in self.gradients], self.numbers

    def release(self) -> None:
        """Keeps no tensor alive."""
        self.tensors, self.parameters, self.gradients, self.buffers, self.arguments = [], [], [], [], []

    def difference(self, after: Snapshot) -> str | None:
        """A description of the first value that differs from a later one; None if none does."""
        return difference(self.chunks, after.chunks)


Chunks: TypeAlias = list[tuple[list[str], list[Any]]]
"""Labels and values; lists of what has not changed are the same ones, so that comparing them is fast."""


def difference(old: Chunks, new: Chunks) -> str | None:
    """A description of the first value that differs; None if none does."""
    if [values for _, values in old] == [values for _, values in new]:
        return None
    pairs = ([(label, value) for chunk in chunks for label, value in zip(*chunk, strict=True)] for chunks in (old, new))
    for (before, one), (label, other) in zip(*pairs, strict=False):
        if before != label:
            return str(label)
        if one != other:
            return f"{label}{_change(one, other)}"
    return "which values it names"


def _change(old: Any, new: Any) -> str:
    both = (old, new)
    if all(type(each) is tuple and len(each) == 2 and isinstance(each[0], type) for each in both):
        (kind, before), (_, now) = both
        if isinstance(before, tuple) and isinstance(now, tuple):
            return f" (a {kind.__name__}) from {len(before)} to {len(now)} items" if len(before) != len(now) else ""
        return f" from {before!r} to {now!r}"
    return ""


class State:
    """What a step computes with: declared, named by its code, or seen in a recorded call.

    Args:
        step: the step.
        declared: models, optimizers, scalers, tensors, objects that hold them, or containers of these.
    """

    def __init__(self, step: Callable[..., Any], declared: Iterable[Any]) -> None:
        self._scope, self._declared = StepNames(step), list(declared)
        self._parts: dict[int, _StatePart] = {}
        self._seen: list[weakref.ref[Any]] = []
        self._joined: _Joined | None = None

    def saw(self, owner: Any) -> None:
        """Adds a model that a recorded call has called, or an optimizer that has stepped."""
        modules = [part.modules for part in self._parts.values() if isinstance(part, _Module)]
        known = [*(part.owner for part in self._parts.values()), *itertools.chain(*modules)]
        if not any(owner is each for each in (*known, *(reference() for reference in self._seen))):
            self._seen.append(weakref.ref(owner))

    def owners(self) -> list[Any]:
        """Optimizers and scalers."""
        return [part.owner for part in self._parts.values() if not isinstance(part, _Module)]

    def forget(self) -> None:
        """Keeps no object alive that a recorded call may replace."""
        for part in self._parts.values():
            part.forget()
        self._joined = None

    def snapshot(self, others: Iterable[tuple[str, Any]], arguments: list[torch.Tensor]) -> Snapshot:
        """Reads the state.

        Args:
            others: arguments that are no tensors, with their labels.
            arguments: tensor arguments.
        """
        reading = Reading()
        for index, each in enumerate(self._declared):
            reading.look(each, f"state[{index}]", (self._declared, (index,)), ())
        self._scope.read(reading)
        for label, value in others:
            reading.add(value, label, (None, ()), named=False)
        for reference in self._seen:
            if (owner := reference()) is not None:
                reading.add(owner, f"the {type(owner).__name__} that it calls", (None, ()))
        parts = self._update(reading)
        joined = self._joined
        if joined is None or not joined.holds(parts):
            joined = self._joined = _Joined(parts)
        for part in parts:
            for value, label, place in part.open:
                reading.add(value, label, place)
        loose = [each for each in (*(each.tensor for each in reading.tensors), *arguments) if _has_gradient(each)]
        known = set(map(id, joined.parameters)) if loose else set()
        found = Snapshot()
        found.tensors = [*joined.tensors, *reading.tensors]
        found.parameters = [*joined.parameters, *(each for each in dict.fromkeys(loose) if id(each) not in known)]
        found.gradients = [parameter.grad for parameter in found.parameters]
        found.options, found.numbers = joined.options, list(map(value_of, joined.options))
        found.schedules = [(label, schedule.last_epoch) for label, schedule in reading.schedules]
        found.arguments = list(map(tensor_io.buffer_of, arguments))
        found.buffers = [*found.arguments, *joined.buffers, *buffers_of(reading.tensors)]
        first: dict[Buffer, int] = {}
        hooks = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in found.parameters]
        found.chunks = [
            *joined.chunks,
            (reading.labels, reading.values),
            (
                [
                    "which tensors share memory",
                    "which parameters require a gradient",
                    "hooks of its parameters",
                    "hooks of all modules",
                ],
                [
                    list(map(first.setdefault, found.buffers, itertools.count())),
                    list(map(_requires_grad, found.parameters)),
                    [[tuple(each.values()) if each else () for each in pair] for pair in hooks]
                    if any(itertools.chain(*hooks))
                    else [],
                    [hook for hook in private_api.hooks_of_all_modules() if not _is_ours(hook)],
                ],
            ),
        ]
        return found

    def _update(self, reading: Reading) -> list[_StatePart]:
        """The parts of the objects that were found, modules first, up to date."""
        waiting, parts = dict(reading.objects), dict[int, _StatePart]()
        while waiting:
            key, (label, owner) = waiting.popitem()
            part = self._parts.get(key) or next(make for kind, make in _PARTS if isinstance(owner, kind))(owner, label)
            parts[key] = part.update()
            waiting.update({each: found for each, found in part.reading.objects.items() if each not in parts})
        self._parts = parts
        return sorted(parts.values(), key=lambda part: not isinstance(part, _Module))


class _Joined:
    """All parts together, with each parameter once."""

    def __init__(self, parts: list[_StatePart]) -> None:
        self._readings = [part.reading for part in parts]
        self.parameters: list[torch.Tensor] = []
        self.chunks: Chunks = [(reading.labels, reading.values) for reading in self._readings]
        index: dict[int, int] = {}
        own = Reading()
        for part in parts:
            for parameter, label, place in part.parameters:
                if id(parameter) not in index:
                    index[id(parameter)] = len(index)
                    self.parameters.append(parameter)
                    own.add(parameter, label, place)
            labels = [label for _, label, _ in part.parameters]
            self.chunks.append((labels, [index[id(parameter)] for parameter, *_ in part.parameters]))
        self.chunks.append((own.labels, own.values))
        self._own = own.tensors
        self._buffers = buffers_of(own.tensors)
        self.tensors = [each for reading in (*self._readings, own) for each in reading.tensors]
        self.buffers = [*itertools.chain(*(part.buffers for part in parts)), *self._buffers]
        self.options = [each for part in parts for each in part.options]

    def holds(self, parts: list[_StatePart]) -> bool:
        """Whether this is what `parts` are now."""
        readings = [part.reading for part in parts]
        same = len(readings) == len(self._readings) and all(map(is_, readings, self._readings))
        return same and all(map(is_, buffers_of(self._own), self._buffers))


_storage = attrgetter("_xla_amp")
_tensor = attrgetter("tensor")
_requires_grad = attrgetter("requires_grad")


def buffers_of(tensors: list[Tensor]) -> list[Buffer]:
    """The buffers of tensors on the device."""
    found = list(map(_storage, map(torch.Tensor.untyped_storage, map(_tensor, tensors))))
    return [tensor_io.buffer_of(each.tensor) for each in tensors] if None in found else found


def _is_ours(hook: Any) -> bool:
    """Whether a hook is this package's: those come and go with each step."""
    return str(getattr(hook, "__module__", "")).startswith("xla_amp.")


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf
