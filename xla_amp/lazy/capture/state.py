"""The state of a captured step: entries to compare, and tensors by position.

A replay finds each tensor by its position, whatever object holds it now, so checkpoints may be loaded and parameters
replaced between calls.  A large model has hundreds of modules: modules, optimizers and scalers are read again only if
something in them was replaced, which is seen by identity, all at once.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call, is_, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from xla_amp.lazy.capture.values import FUNCTIONS, NOWHERE, Entry, Named, Reading, Slot, bound, called, is_dense, plain
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.steps import optimizer_step
from xla_amp.lazy.tensors import tensor_io
from xla_amp.training import capturable, held, initial_state

_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
_SILENT: Final = _OF_EVERY_MODULE - {"training"} | {"_until_check"}
"""Attributes of modules and scalers that are read otherwise, or that no step depends on."""

_TABLES: Final = [
    name for name, table in vars(torch.nn.Module()).items() if isinstance(table, dict) and "hook" not in name
]
"""Those of parameters, buffers and modules; the others have hooks."""


class Option(NamedTuple):
    """A float among the options of an optimizer."""

    slot: Slot
    label: str
    is_input: bool
    """Whether the optimizer gives it to the program as an input."""


class _Objects(Reading):
    """Modules, optimizers and scalers, each with its label by its id, and what they hold."""

    def __init__(self, given: dict[int, tuple[str, Any]]) -> None:
        super().__init__()
        self._given = list(given)
        self.options: list[Option] = []
        self._groups: list[dict[str, Any]] = []
        self._spaces: list[dict[str, Any]] = []
        self._attributes: list[Callable[[Any], Any]] = []
        """Each reads from one of `_spaces`, those of modules and scalers, what is watched of them."""
        self.objects.update(given)
        known = set[int]()
        while new := [(key, *each) for key, each in self.objects.items() if key not in known]:
            modules = [each for each in new if not isinstance(each[2], Optimizer)]
            for key, label, owner in modules or new:  # optimizers last, when most of their tensors have a position
                self._object(owner, label)
                known.add(key)
        self._plain = [each.tensor for each in self.tensors]
        self.buffers = _buffers_of(self._plain)
        self.parameters = {id(each.tensor): each.tensor for each in self.tensors if _may_have_gradient(each.tensor)}
        self._counts = self._count(self._given)
        self._seen = [*self._now()]

    def is_current(self, given: dict[int, tuple[str, Any]]) -> bool:
        """Whether reading `given` now would find the same."""
        with contextlib.suppress(KeyError):  # an attribute that was deleted
            return self._counts == self._count(list(given)) and all(map(is_, self._now(), self._seen))
        return False

    def _count(self, given: list[int]) -> list[int]:
        """All that is seen by equality: the objects, how many hooks were ever registered, and lengths."""
        return [*given, RemovableHandle.next_id, *map(len, self.sized)]

    def _now(self) -> Iterator[Any]:
        """All that is seen by identity; a float of an optimizer may be another one."""
        types = map(type, map(itemgetter(1), self.objects.values()))
        options = (float if _is_float(value) else value for group in self._groups for value in group.values())
        attributes = itertools.chain.from_iterable(map(call, self._attributes, self._spaces))
        watched = itertools.chain.from_iterable(self.watched)
        return itertools.chain(types, options, attributes, watched, (_END,), map(_buffer, map(_storage, self._plain)))

    def _object(self, owner: Any, label: str) -> None:
        space = vars(owner)
        self.owners[label] = owner
        self.compare(f"the class of {label}", type(owner))
        if isinstance(owner, Optimizer):
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                self._hooks(space.get(name, {}), label)  # a wrapper, such as Accelerate's, has none
            for table in (space, owner.state, owner.param_groups):
                self.watch(table)
            inner = (each for each in space.values() if isinstance(each, Optimizer))
            wraps = any(each.param_groups is owner.param_groups for each in inner)  # which has them, too
            for number, group in enumerate([] if wraps else owner.param_groups):
                self._group(owner, group, f"{label}.param_groups[{number}]")
            self._rest(owner, label)
            return
        own = {name: value for name, value in space.items() if name not in _SILENT}
        self.sized.append(space)
        self._spaces.append(space)
        is_module = isinstance(owner, torch.nn.Module)
        self._attributes.append(itemgetter(*(_TABLES if is_module else ()), *own))
        for name, table in space.items() if is_module else ():
            if name in _TABLES:
                self.watch(table)
                for key, each in table.items():
                    self.add(each, f"{label}.{key}", Slot(table, key))
            elif name in _OF_EVERY_MODULE and isinstance(table, dict):
                self._hooks(table, label)
        for name, value in own.items():
            self.add(value, f"{label}.{name}", Slot(space, name))

    def _hooks(self, table: dict[Any, Any], label: str) -> None:
        if table:  # one that is added to an empty table is seen by its number
            self.watch(table)
        for hook in table.values():
            self.compare(f"a hook of {label}", hook)

    def _group(self, owner: Optimizer, group: dict[str, Any], label: str) -> None:
        """Options, parameters, and the state in the order of the parameters."""
        self._groups.append(group)
        for name in [name for name in group if name not in ("params", "param_names")]:
            self._option(owner, Slot(group, name), f"{label}[{name!r}]")
        self.watch(group["params"])
        known = {id(each.tensor): at for at, each in enumerate(self.tensors)}
        for index, parameter in enumerate(group["params"]):
            name, state = f"{label}['params'][{index}]", owner.state.get(parameter, {})
            if id(parameter) in known:
                self.compare(name, known[id(parameter)])
            else:
                self.add(parameter, name, Slot(group["params"], index))
            self.watch(state)
            for key, value in state.items():
                self.add(value, f"the {key!r} of {name}{_remedy(owner, value)}", Slot(state, key))

    def _rest(self, owner: Optimizer, label: str) -> None:
        """Attributes, and state that has a name; another optimizer among them is an object as this one is."""
        space = vars(owner)

        def attributes(value: Any) -> dict[str, Any] | None:
            return space if value is owner else None

        known = {id(space), id(owner.state), *(id(group["params"]) for group in owner.param_groups)}
        for path, container, _ in held.containers(owner, None, attributes):
            of_parameter = path[:1] == ("state",) and len(path) > 1 and isinstance(path[1], torch.Tensor)
            if of_parameter or path[:1] in (("param_groups",), ("defaults",)):
                known.add(id(container))
            elif id(container) not in known:
                self.watch(container)
        known -= {id(space), id(owner.state)}
        for path, holder, key, value in held.leaves(owner, None, attributes):
            if id(holder) not in known and not callable(value):
                self.add(value, f"{label}.{held.name(path)}", Slot(holder, key))

    def _option(self, owner: Optimizer, slot: Slot, label: str) -> None:
        value = slot.value()
        is_input, label = _is_input(owner, slot), label + _remedy(owner, value)
        if _is_float(value) or (is_input and optimizer_step.is_number(value)):
            slots = [Slot(slot, at) for at in range(len(value))] if isinstance(value, tuple) else [slot]
            self.options += [Option(each, label, is_input) for each in slots]
        else:
            self.add(value, label, slot)


def _is_float(value: Any) -> bool:
    return all(isinstance(number, float) for number in (value if isinstance(value, tuple) else (value,)))


def _is_input(optimizer: Optimizer, slot: Slot) -> bool:
    """Whether an optimizer gives an option to the program as it is, and uses it nowhere else.

    What a schedule keeps in a group, such as ``initial_lr``, is no option.
    """
    if getattr(optimizer, "numbers_are_inputs", False):
        return slot.key in optimizer.defaults
    kind, group = initial_state.torchs_class(optimizer), slot.holder
    if slot.key not in optimizer.defaults or not initial_state.has_torchs_step(kind):
        return False
    return slot.key == "lr" or capturable.form(kind, group) == "fused"


def _remedy(optimizer: Optimizer, value: Any) -> str:
    """What to type where an option or the state of an optimizer that is not torch's is a value on the host."""
    on_host = type(value) in (int, float) or (isinstance(value, torch.Tensor) and not is_dense(value))
    if not on_host or initial_state.is_torchs(initial_state.torchs_class(optimizer)):
        return ""
    return f" (on the host; make it a tensor: torch.tensor(..., device={tensor_io.DEVICE_TYPE!r}))"


class Snapshot:
    """The state at one call, and its arguments: what is compared, and the tensors by position."""

    def __init__(self, modes: list[Entry], fresh: Reading, objects: _Objects, names: tuple[str, ...]) -> None:
        self.names = names
        """In the step's own code."""
        given = [each.tensor for each in fresh.tensors]
        loose = {id(tensor): tensor for tensor in given if _may_have_gradient(tensor)}
        self.tensors = [*fresh.tensors, *objects.tensors]
        self.parameters = list({**objects.parameters, **loose}.values())
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.had_gradient = [gradient is not None for gradient in self.gradients]
        of_gradients = [
            None if each is None or each.is_sparse else tensor_io.buffer_of(each) for each in self.gradients
        ]
        self.buffers: list[Buffer | None] = [*_buffers_of(given), *objects.buffers, *of_gradients]
        """By position: of `tensors`, then of `gradients`."""
        self.repeated = {**fresh.repeated, **objects.repeated}
        """Objects on the host by label, each with the method that a replay calls."""
        self.counts: collections.ChainMap[str, Any] = collections.ChainMap(fresh.counts, objects.counts)
        self.owners: collections.ChainMap[str, Any] = collections.ChainMap(fresh.owners, objects.owners)
        self.options = objects.options
        self.numbers = [float(option.slot.value()) for option in self.options]
        hooks = itertools.chain.from_iterable(map(_hooks, self.parameters))
        derived = [
            ("which parameters require a gradient", [each.requires_grad for each in self.parameters]),
            ("hooks of its parameters", [[*each.values()] for each in hooks if each]),
            ("which tensors share memory", _shared(self.buffers)),
            *fresh.steps,
        ]
        self.entries = [*modes, *fresh.entries()], objects.entries(), derived
        """In parts, as that of objects is mostly the same list."""

    def at(self, position: int) -> tuple[torch.Tensor | None, str, Slot]:
        """The tensor at a position, with what it is called and where it is bound."""
        index = position - len(self.tensors)
        if index < 0:
            return self.tensors[position]
        return self.gradients[index], "a gradient", Slot(self.parameters[index], "grad")

    def steered(self) -> list[Entry]:
        """What schedules change: the numbers of optimizers, and their counts, as they are now."""
        epochs = [(f"{label}.last_epoch", getattr(each, "last_epoch", 0)) for label, (each, _) in self.repeated.items()]
        return [*((option.label, plain(option.slot.value())) for option in self.options), *epochs]

    def unchanged(self, steered: list[Entry]) -> list[list[Entry]]:
        """What a call may not change: all but what follows from something else."""
        *parts, derived = self.entries
        return [steered, *parts, derived[:2]]

    def release(self) -> None:
        """Keeps no tensor alive."""
        self.counts, self.owners = collections.ChainMap(), collections.ChainMap()
        self.tensors, self.parameters, self.gradients, self.buffers = [], [], [], []


class State:
    """What a step computes with: declared, named by its code, or seen in a recorded call."""

    def __init__(self, step: Callable[..., Any], declared: Iterable[Any]) -> None:
        self._step, self._declared = step, list(declared)
        self.functions = [step, *(each for each in self._declared if isinstance(each, FUNCTIONS))]
        """Those whose code is read."""
        self.counters = set[str]()
        """Integers that a recorded call has changed, by label."""
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

    def snapshot(self, modes: list[Entry], arguments: list[Any]) -> Snapshot:
        """Reads the state and the arguments; `modes` are compared, too."""
        fresh, (named, names) = Reading(), bound(self._step)
        for index, each in enumerate(arguments):
            own = () if index else called(self._step, each, None)
            if not fresh.look(each, f"argument {index}", NOWHERE, names + own):
                fresh.compare(f"argument {index} (a {type(each).__name__}, compared by ==)", (type(each), each))
        for index, each in enumerate(self._declared):
            attributes = tuple(getattr(each, "__dict__", ()))
            fresh.look(each, f"state[{index}]", Slot(self._declared, index), attributes)
        for value, label, slot in named:
            fresh.look(value, label, slot, names + called(self._step, value, label))
        if self.functions[1:]:
            names += self._search(fresh, named, arguments)
        for owner in [owner for reference in self._used if (owner := reference()) is not None]:
            fresh.add(owner, f"the {type(owner).__name__} that it calls", NOWHERE)
        objects = self.objects
        if objects is None or not objects.is_current(fresh.objects):
            objects = self.objects = _Objects(fresh.objects)
            self._known.update(owner for _, owner in objects.objects.values())
        return Snapshot(modes, fresh, objects, names)

    def _search(self, fresh: Reading, named: list[Named], arguments: list[Any]) -> tuple[str, ...]:
        """Reads what the declared functions name, and what they name of modules among the arguments; their names."""
        functions = [bound(each) for each in self.functions[1:]]
        names = tuple(dict.fromkeys(itertools.chain.from_iterable(each for _, each in functions)))
        given = [
            (each, f"argument {at}", NOWHERE) for at, each in enumerate(arguments) if isinstance(each, torch.nn.Module)
        ]
        known, seen = {(id(value), label) for value, label, _ in named}, dict[int, Any]()
        for value, label, slot in itertools.chain(given, *(found for found, _ in functions)):
            if (id(value), label) not in known:
                known.add((id(value), label))
                fresh.follow(value, label, slot, names, seen)
        return names


_END: Final = object()
_buffer, _hooks = attrgetter("_xla_amp"), attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_storage = torch.Tensor.untyped_storage


def _buffers_of(tensors: list[torch.Tensor]) -> list[Buffer]:
    """The buffers of tensors on the device."""
    return [*map(_buffer, map(_storage, tensors))]


def _shared(buffers: Sequence[Buffer | None]) -> list[tuple[int, int]]:
    """The positions of buffers that are at an earlier one too, each with that."""
    if len({*buffers}) + max(buffers.count(None) - 1, 0) == len(buffers):
        return []
    firsts = dict[Buffer | None, int]()
    found = list(map(firsts.setdefault, buffers, itertools.count()))
    return [(at, first) for at, first in enumerate(found) if at != first and buffers[at] is not None]


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
