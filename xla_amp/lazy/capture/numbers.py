"""How Python numbers of a step become data of its program, so that schedules of learning rates replay.

While an optimizer steps in a recorded call, each float of its ``param_groups`` is a `SymbolicFloat`, whose arithmetic
and comparisons are written down in the call's `CallNumbers`.  torch's dispatcher passes on only the value, so these
hyperparameters are shifted by a few units in the last place, differently in each call: numbers of the trace are
recognized by their value, and `CallNumbers.resolve` restores the true ones before the program runs.  A replay computes
them again from the hyperparameters of now (`ReplayNumbers`).  It works with any optimizer.

The other options of optimizers are fixed in a capture.  A path from hyperparameter to operation that is not arithmetic
(``math.sqrt``) shows as a number that changes from call to call, which prevents a capture.  So does state that an
optimizer computes with on the host.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xla_amp.lazy.capture.reach import NotReplayableError
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

# ---- floats that carry their formula ---------------------------------------------------------------------------------


class Hyperparameter(NamedTuple):
    """The location of a hyperparameter."""

    group: int
    """`id` of the optimizer's group, a dict that lives as long as the optimizer."""
    name: str
    position: int
    """Position in a tuple such as ``betas``, otherwise 0."""


class Formula(NamedTuple):
    """An operation of `OPERATIONS` on hyperparameters, formulas and plain numbers."""

    operation: str
    operands: tuple[Any, ...]


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("neg", "pos", "abs")
CONDITIONS = ("lt", "le", "eq", "ne", "ge", "gt", "bool")
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name, operator.truth) for name in (*ARITHMETIC, *UNARY, *CONDITIONS)
}
"""Name of a method of floats, without the underscores -> its function."""

Term: TypeAlias = Hyperparameter | Formula | float
Hyperparameters: TypeAlias = Mapping[Hyperparameter, float]


def evaluate(term: Term, values: Hyperparameters) -> Any:
    """The term's value for these values of the hyperparameters."""
    if type(term) is Hyperparameter:
        return values[term]
    if type(term) is Formula:
        return OPERATIONS[term.operation](*[evaluate(operand, values) for operand in term.operands])
    return term


class SymbolicFloat(float):
    """A float with the term that gave its value."""

    __slots__ = ("numbers", "term")

    term: Term
    numbers: CallNumbers

    __hash__ = float.__hash__


def _term(value: Any) -> Any:
    return value.term if type(value) is SymbolicFloat else value


def _value(value: Any) -> Any:
    return float(value) if type(value) is SymbolicFloat else value


def _method(name: str, reflected: bool) -> Callable[..., Any]:
    """The method of `SymbolicFloat` for an operation of `OPERATIONS`."""

    def method(self: SymbolicFloat, *others: Any) -> Any:
        if any(type(other) not in (int, float, SymbolicFloat) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        formula = Formula(name, tuple(map(_term, operands)))
        if name in CONDITIONS:
            return self.numbers.compare(formula)
        return self.numbers.symbol(OPERATIONS[name](*map(_value, operands)), formula)

    return method


for _name in OPERATIONS:
    setattr(SymbolicFloat, f"__{_name}__", _method(_name, reflected=False))
for _name in ARITHMETIC:
    setattr(SymbolicFloat, f"__r{_name}__", _method(_name, reflected=True))


# ---- a recorded call -------------------------------------------------------------------------------------------------


class CallNumbers:
    """The optimizers that step in one recorded call, and the numbers that Python computes from their hyperparameters.

    Args:
        shift: 0 or 1 selects the amounts by which hyperparameters are moved; consecutive calls alternate.
    """

    def __init__(self, shift: int) -> None:
        self._shift = shift
        self.values: dict[Hyperparameter, float] = {}
        """The true value of each hyperparameter."""
        self._terms: dict[float, dict[Term, None]] = {}
        """Value -> the terms that gave it: one, unless rounding made several equal."""
        self.conditions: dict[Formula, bool] = {}
        """Comparisons, with their outcome."""
        self.terms: dict[int, tuple[Term, ...]] = {}
        """Index of each lifted float that was computed from hyperparameters -> its terms."""
        self.floats: list[float] = []
        """The lifted floats as the program received them."""
        self._options: dict[Optimizer, Any] = {}
        """The optimizers that have stepped, with their options before."""
        self.obstacle: str | None = None
        """Why a replay could not do what an optimizer did: it computes on the host, or its options changed."""
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """(group, option, value, symbolic value) while an optimizer steps."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped."""
        return list(self._options)

    def track(self, hyperparameter: Hyperparameter, value: float) -> float:
        """A symbolic float for a hyperparameter that is not zero."""
        if self.values.setdefault(hyperparameter, value) != value:  # in its second step of the call
            self.obstacle = self.obstacle or "it changes the options of an optimizer between two of its steps"
            return value
        return self.symbol(value * (1 + (2 * len(self.values) + self._shift) * 2.0**-46), hyperparameter)

    def symbol(self, value: float, term: Term) -> SymbolicFloat:
        """A symbolic float with the value of `term`."""
        result = SymbolicFloat(value)
        result.term, result.numbers = term, self
        self._terms.setdefault(float(value), {})[term] = None
        return result

    def compare(self, formula: Formula) -> bool:
        """The outcome of a comparison of the true values."""
        return self.conditions.setdefault(formula, evaluate(formula, self.values))

    def resolve(self, floats: list[float]) -> None:
        """Replaces each lifted float that was computed from hyperparameters by the true one, in place."""
        self.terms = {index: tuple(self._terms[x]) for index, x in enumerate(floats) if x in self._terms}
        for index, terms in self.terms.items():
            floats[index] = evaluate(terms[0], self.values)
        self.floats = list(floats)

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Inside, optimizers that step compute with symbolic hyperparameters."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._restore)
        try:
            yield
        finally:
            self._restore()
            for optimizer, before in self._options.items():
                if _options([optimizer]) != before:
                    self.obstacle = self.obstacle or (
                        f"it changes the options of {type(optimizer).__name__} (a schedule's step?), which a replay "
                        "would not; do that outside"
                    )
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        if optimizer not in self._options:
            self._options[optimizer] = _options([optimizer])
        self.obstacle = self.obstacle or _host_state(optimizer)
        for group in optimizer.param_groups:
            for name, value in group.items():
                if any(map(_is_trackable, _items(value))):
                    self._replaced.append((group, name, value, self._symbolic(id(group), name, value)))
        for group, name, _, symbolic in self._replaced:
            group[name] = symbolic

    def _symbolic(self, group: int, name: str, value: Any) -> Any:
        items = [
            self.track(Hyperparameter(group, name, position), item) if _is_trackable(item) else item
            for position, item in enumerate(_items(value))
        ]
        return tuple(items) if isinstance(value, tuple) else items[0]

    def _restore(self, *_: Any) -> None:
        for group, name, value, symbolic in self._replaced:
            if group[name] is symbolic:
                group[name] = value
        self._replaced.clear()


def _items(option: Any) -> tuple[Any, ...]:
    return option if isinstance(option, tuple) else (option,)


def _is_trackable(value: Any) -> bool:
    return type(value) is float and value != 0 and math.isfinite(value)


def _options(optimizers: Iterable[Optimizer]) -> tuple[list[Any], dict[Hyperparameter, float]]:
    """The options of optimizers: what of them is fixed in a capture, and the hyperparameters that may change."""
    fixed: list[Any] = []
    values: dict[Hyperparameter, float] = {}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        fixed.append(len(group["params"]))
        for name, option in group.items():
            items = _items(option)
            fixed.append((name, len(items), isinstance(option, tuple)))
            for position, item in enumerate(items):
                if _is_trackable(item):
                    values[Hyperparameter(id(group), name, position)] = item
                else:
                    fixed.append(id(item) if isinstance(item, (torch.Tensor, list)) else item)
    return fixed, values


def _host_state(optimizer: Optimizer) -> str | None:
    """A description of state or options with which the optimizer computes on the host."""
    name = type(optimizer).__name__
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE):
                return (
                    f"{name} keeps its {key!r} on the host; use the class of the same name in xla_amp.syncfree, or "
                    "capturable=True where the optimizer has it"
                )
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE:
                return f"{name} has a tensor on the host as {key!r}; move it to the device, or give a number"
    return None


# ---- a replay --------------------------------------------------------------------------------------------------------


class ReplayNumbers:
    """The lifted floats of a step for the hyperparameters that optimizers have now.

    Args:
        earlier, later: of two recorded calls in a row.
        code: of the later call.
        scalers: that the step can see.

    Raises:
        NotReplayableError: a number differs between the calls and was not computed from hyperparameters.
    """

    def __init__(
        self, earlier: CallNumbers, later: CallNumbers, code: Sequence[int], scalers: list[torch.amp.GradScaler]
    ) -> None:
        self._indices: dict[tuple[Term, ...], list[int]] = {}
        for index, (name, old, new) in enumerate(zip(_names(code), earlier.floats, later.floats, strict=True)):
            if index in later.terms and later.terms[index] == earlier.terms.get(index):
                self._indices.setdefault(later.terms[index], []).append(index)
            elif old != new or math.isnan(new):
                raise NotReplayableError(
                    f"Python computes {new!r} for {name}, a number that changes from call to call ({old!r} before) and "
                    "is no hyperparameter; keep it in a tensor on the device, or pass it as one"
                )
        self._recorded, self._optimizers, self._scalers = later, later.optimizers, scalers
        self._fixed, _ = self._options()
        self._values: dict[Hyperparameter, float] | None = None
        """The hyperparameters of the last call."""
        self._current: list[float] | None = None

    def current(self) -> list[float] | None:
        """The floats, None if the step has to be recorded again.

        That is if an option that is fixed has changed, if a comparison has another outcome than when captured, or if
        terms that were equal then are not now.
        """
        fixed, values = self._options()
        if fixed != self._fixed:
            return None
        if values != self._values:
            self._values, self._current = values, self._compute(values)
        return self._current

    def _options(self) -> tuple[list[Any], dict[Hyperparameter, float]]:
        fixed, values = _options(self._optimizers)
        return [*fixed, *map(_growth, self._scalers)], values

    def _compute(self, values: Hyperparameters) -> list[float] | None:
        if any(evaluate(test, values) != outcome for test, outcome in self._recorded.conditions.items()):
            return None
        floats = list(self._recorded.floats)
        for equal_terms, indices in self._indices.items():
            number, *others = {evaluate(term, values) for term in equal_terms}
            if others:
                return None
            for index in indices:
                floats[index] = number
        return floats


def _names(code: Sequence[int]) -> Iterator[str]:
    """For each lifted float of a trace, the operation that takes it."""
    for node in nodes(code):
        for _ in range(node.instruction.floats):
            yield node.instruction.name


def _growth(scaler: torch.amp.GradScaler) -> tuple[float, ...]:
    if not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
