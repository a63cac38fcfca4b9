"""The Python numbers of a replay: those of the recorded call, or computed from the hyperparameters of now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xla_amp.lazy.capture.reach import NotReplayableError
from xla_amp.lazy.capture.recording import Recording
from xla_amp.lazy.capture.symbolic_scalars import Term, evaluate
from xla_amp.lazy.graph.tape import nodes


class Numbers:
    """The lifted floats of a step for the hyperparameters that optimizers have now.

    Args:
        earlier, later: two recorded calls in a row.
        scalers: that the step can see.

    Raises:
        NotReplayableError: a number differs between the calls and was not computed from hyperparameters.
    """

    def __init__(self, earlier: Recording, later: Recording, scalers: list[torch.amp.GradScaler]) -> None:
        terms, before = (each.steps.table.terms_of(each.raw_floats) for each in (later, earlier))
        self._indices: dict[tuple[Term, ...], list[int]] = {}
        rows = zip(_names(later.code), earlier.floats, later.floats, strict=True)
        for index, (name, old, new) in enumerate(rows):
            if index in terms and terms[index] == before.get(index):
                self._indices.setdefault(terms[index], []).append(index)
            elif old != new or math.isnan(new):
                raise NotReplayableError(
                    f"Python computes {new!r} for {name}, a number that changes from call to call ({old!r} before) and "
                    "is no hyperparameter; keep it in a tensor on the device, or pass it as one"
                )
        self._floats, self._steps, self._scalers = later.floats, later.steps, scalers
        self._reads, self._fixed = later.steps.reads(), self._fixed_options()
        self._hyperparameters: list[float] | None = None
        """Those of the last call."""
        self._current: list[float] | None = None

    def current(self) -> list[float] | None:
        """The floats, None if the step has to be recorded again.

        That is if an option that is fixed has changed, if a comparison has another outcome than when captured, or if
        terms that were equal then are not now.
        """
        if self._fixed_options() != self._fixed:
            return None
        now = [read() for read in self._reads.values()]
        if now != self._hyperparameters:
            self._hyperparameters, self._current = now, self._compute()
        return self._current

    def _fixed_options(self) -> list[Any]:
        return [*self._steps.fixed_options(), *map(_growth, self._scalers)]

    def _compute(self) -> list[float] | None:
        if any(evaluate(test, self._reads) != outcome for test, outcome in self._steps.table.conditions.items()):
            return None
        floats = list(self._floats)
        for equal_terms, indices in self._indices.items():
            numbers = {evaluate(term, self._reads) for term in equal_terms}
            if len(numbers) > 1:
                return None
            number = numbers.pop()
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
