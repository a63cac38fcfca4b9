"""The state of a captured step: entries to compare, and tensors by position.

A replay finds each tensor by its position, whatever object holds it now, so checkpoints may be loaded and parameters
replaced between calls.  A large model has hundreds of modules: modules, optimizers and scalers are read again only if
something in them was replaced, which is seen by identity, all at once.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, getitem, is_not, methodcaller
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from xla_amp.lazy.capture.values import Entry, Reading, accumulates, is_dense, plain
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.steps import optimizer_step
from xla_amp.lazy.tensors import tensor_io
from xla_amp.training import capturable, initial_state, reader
from xla_amp.training.reader import FUNCTIONS, NOWHERE, Bound, Named, Slot, bound

_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
_SILENT: Final = _OF_EVERY_MODULE - {"training"} | {"_until_check"}
"""Attributes of modules and scalers that are read otherwise, or that no step depends on."""
_STEP_HOOKS: Final = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_OF_OPTIMIZERS: Final = reader.NOTES.union(("defaults", "param_groups", "state", *_STEP_HOOKS))
"""Attributes of optimizers that are read otherwise, or that no step depends on."""
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
        self._places: tuple[list[Any], list[str]] = [], []
        """Groups, and which of their options are numbers or tuples of them."""
        self.numbers: list[float] = []
        """The options, as they were when this was last found to be current."""
        self._has_tuples = False
        self.objects.update(given)
        known = set[int]()
        while new := [(key, *each) for key, each in self.objects.items() if key not in known]:
            modules = [each for each in new if not isinstance(each[2], Optimizer)]
            for key, label, owner in modules or new:  # optimizers last, when most of their tensors have a position
                self._object(owner, label)
                known.add(key)
        self._typed += [owner for _, owner in self.objects.values()]
        self.end()
        self.firsts = dict[Buffer | None, int]()
        """The first position of each of `buffers`."""
        self.shared = _shared(self.buffers, 0, self.firsts)
        self.keep()

    def holds(self, given: dict[int, tuple[str, Any]]) -> bool:
        """Whether reading `given` now would find the same."""
        return self._given == list(given) and self.is_current()

    def _now(self) -> Iterator[Any]:
        values = self.numbers = [*map(getitem, *self._places)]
        if self._has_tuples:
            self.numbers = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        return itertools.chain(map(type, values + self.numbers), super()._now())

    def _sizes(self) -> list[Any]:
        return [RemovableHandle.next_id, *super()._sizes()]  # how many hooks were ever registered

    def _object(self, owner: Any, label: str) -> None:
        space = vars(owner)
        self.owners[label] = owner
        self.compare(f"the class of {label}", type(owner))
        if isinstance(owner, Optimizer):
            for name in _STEP_HOOKS:
                self._hooks(space.get(name, {}), label)  # a wrapper, such as Accelerate's, has none
            for table in (space, owner.state, owner.param_groups):
                self.watch(table, label)
            inner = (each for each in space.values() if isinstance(each, Optimizer))
            wraps = any(each.param_groups is owner.param_groups for each in inner)  # which has them, too
            for number, group in enumerate([] if wraps else owner.param_groups):
                self._group(owner, group, f"{label}.param_groups[{number}]")
            for holder, before in ((space, label), (space.get("state", {}), f"{label}.state")):
                for key, value in holder.items():
                    if not (isinstance(key, torch.Tensor) or key in _OF_OPTIMIZERS or callable(value)):
                        self.add(value, f"{before}.{key}", Slot(holder, key), sys.maxsize)
            return
        own = {name: value for name, value in space.items() if name not in _SILENT}
        is_module = isinstance(owner, torch.nn.Module)
        self._sized.append(space)
        self.looked += [(space.get, name) for name in (*own, *(_TABLES if is_module else ()))]
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
        self._sized.append(group)
        self.looked.append((group.get, "params"))
        for name in [name for name in group if name not in ("params", "param_names")]:
            self._option(owner, Slot(group, name), f"{label}[{name!r}]")
        self.watch(group["params"], label)
        known = {id(each.value): at for at, each in enumerate(self.tensors)}
        for index, parameter in enumerate(group["params"]):
            name, state = f"{label}['params'][{index}]", owner.state.get(parameter, {})
            if id(parameter) in known:
                self.compare(name, known[id(parameter)])
            else:
                self.add(parameter, name, Slot(group["params"], index))
            self.watch(state)
            for key, value in state.items():
                self.add(value, f"the {key!r} of {name}{_remedy(owner, value)}", Slot(state, key))

    def _option(self, owner: Optimizer, slot: Slot, label: str) -> None:
        value, (group, name) = slot.value(), slot
        is_input, label = _is_input(owner, slot), label + _remedy(owner, value)
        if not _is_float(value):
            self.looked.append((group.get, name))
        if _is_float(value) or (is_input and optimizer_step.is_number(value)):
            self._has_tuples |= isinstance(value, tuple)
            slots = [Slot(slot, at) for at in range(len(value))] if isinstance(value, tuple) else [slot]
            self.options += [Option(each, label, is_input) for each in slots]
            for found, each in zip(self._places, slot, strict=True):
                found.append(each)
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

    def __init__(self, state: State, modes: list[Entry], given: Reading, named: Reading, objects: _Objects) -> None:
        self._readings: tuple[Reading, ...] = given, named, objects
        self.names = state.names
        """In the code of the step."""
        self.tensors = [*given.tensors, *named.tensors, *objects.tensors]
        self.parameters = [*{**objects.parameters, **given.parameters, **named.parameters}.values()]
        self.gradients = [*map(_gradient, self.parameters)]
        self.had_gradient = [*map(is_not, self.gradients, itertools.repeat(None))]
        of_gradients = [
            None if each is None or each.is_sparse else tensor_io.buffer_of(each) for each in self.gradients
        ]
        others = [*given.buffers, *named.buffers, *of_gradients]
        shared = objects.shared, _shared(others, len(objects.buffers), {**objects.firsts})
        self.buffers: list[Buffer | None] = [*given.buffers, *named.buffers, *objects.buffers, *of_gradients]
        """By position: of `tensors`, then of `gradients`."""
        self.repeated = {**given.repeated, **named.repeated, **objects.repeated}
        """Objects on the host by label, each with the method that a replay calls."""
        self.options, self.numbers = objects.options, [*map(float, objects.numbers)]
        hooks = filter(None, itertools.chain.from_iterable(map(_hooks, self.parameters)))
        derived = [
            ("which parameters require a gradient", [*map(_requires_grad, self.parameters)]),
            ("hooks of its parameters", [*map(list, map(methodcaller("values"), hooks))]),
            ("which tensors share memory", shared),
            *(accumulates(label, each) for label, (each, name) in self.repeated.items() if name == "accumulate"),
        ]
        self.entries = [*modes, *given.entries()], named.entries(), objects.entries(), derived
        """In parts, as those of names and objects are mostly the same lists."""

    def by_label(self, what: str) -> dict[str, Any]:
        """The `counts` or `owners` of its readings."""
        return {label: each for reading in reversed(self._readings) for label, each in getattr(reading, what).items()}

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
        self.tensors, self.parameters, self.gradients, self.buffers, self._readings = [], [], [], [], ()


class State:
    """What a step computes with: declared, named by its code, or seen in a recorded call."""

    def __init__(self, step: Callable[..., Any], declared: Iterable[Any]) -> None:
        self._step, self._declared = step, list(declared)
        self.functions = [step, *(each for each in self._declared if isinstance(each, FUNCTIONS))]
        """Those whose code is read."""
        self.names: tuple[str, ...] = ()
        """In the code of `functions`."""
        self._own_names: tuple[str, ...] = ()
        """In that of the step."""
        self.counters = set[str]()
        """Integers that a recorded call has changed, by label."""
        self._named: Reading | None = None
        """What code names, as it was last read."""
        self._objects: _Objects | None = None
        self._modules: list[torch.nn.Module] = []
        """Those among the arguments of which the declared functions name attributes."""
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models and optimizers."""
        self._used: list[weakref.ref[Any]] = []
        """Those that a recorded call has used, and schedules of its optimizers; code need not name them."""

    def saw(self, owner: Any) -> None:
        """Adds a model that a recorded call has called, or an optimizer that has stepped."""
        if owner not in self._known:
            self._known.update(owner.modules() if isinstance(owner, torch.nn.Module) else [owner])
            self._used.append(weakref.ref(owner))

    def forget(self) -> None:
        """Reads all again in the next call, and keeps nothing alive until then."""
        self._named, self._objects, self._modules = None, None, []

    def snapshot(self, modes: list[Entry], arguments: list[Any]) -> Snapshot:
        """Reads the state and the arguments; `modes` are compared, too."""
        named = self._read_names(arguments)
        given = Reading()
        for index, each in enumerate(arguments):
            label = f"argument {index}"
            if not given.look(each, label, NOWHERE, self._own_names, None if index else self._step, None):
                given.compare(f"{label} (a {type(each).__name__}, compared by ==)", (type(each), each))
        given.end()
        found = {**given.objects, **named.objects, **given.objects} if given.objects else named.objects
        objects = self._objects
        if objects is None or not objects.holds(found):
            objects = self._objects = _Objects(found)
            self._known.update(owner for _, owner in objects.objects.values())
        return Snapshot(self, modes, given, named, objects)

    def _read_names(self, arguments: list[Any]) -> Reading:
        """What is declared, what code names, and the models and optimizers that a recorded call has used."""
        modules = [each for each in arguments if isinstance(each, torch.nn.Module)] if self.functions[1:] else []
        known = self._named
        if known and [*map(id, modules)] == [*map(id, self._modules)] and known.is_current():
            return known
        self._modules = modules
        named, found = Reading(), bound(self._step)
        self.names = self._own_names = found.names
        named.add_bound(found)
        named.watch(getattr(inspect.unwrap(self._step), "keywords", {}))  # of a functools.partial
        for index, each in enumerate(self._declared):
            attributes = tuple(getattr(each, "__dict__", ()))
            named.look(each, f"state[{index}]", Slot(self._declared, index), attributes, None, None)
        for value, label, slot in found.values:
            named.look(value, label, slot, found.names, self._step, label)
        if self.functions[1:]:
            self._search(named, found, arguments)
        for owner in [owner for reference in self._used if (owner := reference()) is not None]:
            if all(owner is not each for each, _ in named.repeated.values()):
                named.add(owner, f"the {type(owner).__name__} that it calls", NOWHERE)
        named.end()
        self._named = None
        if not named.tensors:  # one that is replaced is freed before the next call
            named.keep()
            self._named = named
        return named

    def find_schedules(self, now: Snapshot) -> bool:
        """Adds schedules of the optimizers of a snapshot that it lacks; whether there are any.

        What steps one may be anywhere in the program, so what refers to the optimizers is searched.  It keeps no other
        object alive meanwhile: other threads' recordings depend on when tensors are freed.
        """
        found = self._objects.objects.values() if self._objects else ()
        owners = [owner for _, owner in found if isinstance(owner, Optimizer)]
        spaces = [each for each in gc.get_referrers(*owners) if type(each) is dict and "optimizer" in each]
        schedules = [each for each in gc.get_referrers(*owners, *spaces) if issubclass(type(each), LRScheduler)]
        known = {id(each) for each, _ in now.repeated.values()}
        new = [each for each in schedules if getattr(each, "optimizer", None) in owners and id(each) not in known]
        self._used += map(weakref.ref, new)
        self._named = None
        return bool(new)

    def _search(self, named: Reading, own: Bound, arguments: list[Any]) -> None:
        """Reads what the declared functions name, and what they name of modules among the arguments."""
        functions = [bound(each) for each in self.functions[1:]]
        names = tuple(dict.fromkeys(itertools.chain.from_iterable(each.names for each in functions)))
        self.names += names
        given = [
            Named(each, f"argument {at}", NOWHERE)
            for at, each in enumerate(arguments)
            if isinstance(each, torch.nn.Module)
        ]
        known, seen = {(id(each.value), each.name) for each in own.values}, dict[int, Any]()
        for each in functions:
            named.add_bound(each)
        for value, label, slot in itertools.chain(given, *(each.values for each in functions)):
            if (id(value), label) not in known:
                known.add((id(value), label))
                named.follow(value, label, slot, names, seen)


_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_gradient, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")


def _shared(buffers: Sequence[Buffer | None], start: int, firsts: dict[Buffer | None, int]) -> list[tuple[int, int]]:
    """The positions, from `start` on, of buffers that are at an earlier one too, each with that.

    `firsts` has the earlier ones, and gets these.
    """
    found = zip(buffers, map(firsts.setdefault, buffers, itertools.count(start)), strict=True)
    return [(at, first) for at, (buffer, first) in enumerate(found, start) if at != first and buffer is not None]
