"""One form of a captured step: how it is learned from two calls, compared with a third, and replayed."""

from __future__ import annotations

import math
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from xla_amp.lazy.capture import observer
from xla_amp.lazy.capture.guards import Surroundings
from xla_amp.lazy.capture.observer import Geometry, NotReplayable, Watch
from xla_amp.lazy.capture.optimizer_replay import Call
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.capture.symbolic_scalars import Term, evaluate
from xla_amp.lazy.runtime import execute
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

AUDIT = 8
"""After 8, 64, 512, ... replays one call is recorded again and compared."""
STALE = object()
"""What a replay gives when a value that it needs is gone."""


class Plan:
    """One form of a step: what was seen of it, and its replay."""

    def __init__(self, values: list[Any], absent: list[bool]) -> None:
        self.values = values
        """The plain Python values around it."""
        self.absent = absent
        """Which parameters have no gradient when it begins."""
        self.calls = self.replays = 0
        self._audit_at = AUDIT
        self._last: tuple[Call, observer.Run, list[Any]] | None = None
        self._replay: Replay | None = None

    @property
    def captured(self) -> bool:
        """Whether there is a replay."""
        return self._replay is not None

    def ready(self) -> bool:
        """Whether the next call need not be recorded."""
        return self._replay is not None and self.replays < self._audit_at

    def forget(self) -> None:
        """Drops the capture; the form goes on being recorded until there is one again."""
        self._replay = self._last = None
        self.replays, self._audit_at = 0, AUDIT

    def last_run(self) -> observer.Run | None:
        """The run of the last recorded call, if it was one program."""
        return None if self._last is None else self._last[1]

    # -- learning ------------------------------------------------------------------------------------------------

    def learn(
        self, call: Call, watch: Watch, leaves: list[Any], grads: list[Any], result: Any, around: Surroundings
    ) -> Any:
        """Compares a recorded call with the one before it, and captures when they agree.

        Raises:
            NotReplayable: they do not agree, or something in the call cannot be replayed.
        """
        last, self._last = self._last, None
        run = observer.only_run(watch)
        if call.on_host is not None:
            raise NotReplayable(call.on_host)
        if call.changed is not None:
            raise NotReplayable(call.changed)
        flat, tree = tree_flatten(result)
        changed = [(p, p.grad) for p, before in grads if p.grad is not before]
        plain = [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]
        needs_backward = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flat)
        if needs_backward and not (call.optimizers or changed):
            raise NotReplayable(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        if self._replay is not None:
            self._audit(self._replay, call, run)
            return result
        self._last = call, run, plain
        if last is None:
            return result
        earlier_call, earlier, earlier_plain = last
        if plain != earlier_plain:
            raise NotReplayable(f"it returns a Python value that changes: {earlier_plain} and then {plain}")
        arguments = [observer.argument_buffer(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        replay = Replay(earlier, run, watch.begin, watch.end, arguments)
        self._explain_numbers(earlier_call, earlier, call, run)
        self._call, self._options, self._settings = call, call.options(), call.settings()
        self._reads = call.reads()
        self._readers = list(self._reads.values())
        self._read: list[float] | None = None
        self._ready: np.ndarray | None = None
        """`_numbers`; the same object while no hyperparameter changes."""
        self._scalers = [scaler for scaler in around.found if isinstance(scaler, torch.amp.GradScaler)]
        self._growth = [_growth(scaler) for scaler in self._scalers]
        self._grads = [(p, grad) for p, grad in changed if grad is not None]
        self._dropped = [p for p, grad in changed if grad is None]
        self._is_leaf = len(flat) == 1 and flat[0] is result
        self._tree, self._outputs = tree, [_Output(leaf, replay, leaves, arguments) for leaf in flat]
        self._replay, self._last = replay, None
        return self._result(replay.values(), leaves)

    def _audit(self, replay: Replay, call: Call, run: observer.Run) -> None:
        """Compares a recorded call with what a replay would have run.

        Raises:
            NotReplayable: they differ.
        """
        self._audit_at *= AUDIT
        if run.code != self._code:
            raise NotReplayable(f"by now {observer.first_difference(self._code, run.code)}")
        expected = self._numbers()
        if expected is None:
            return
        for name, old, new in zip(observer.number_names(run.code), expected, run.floats, strict=True):
            if old != new:
                raise NotReplayable(f"by now Python computes {new!r} for {name}, where a replay takes {old!r}")

    def _explain_numbers(self, earlier_call: Call, earlier: observer.Run, call: Call, run: observer.Run) -> None:
        """Finds out how each lifted number comes about."""
        terms = call.ledger.terms_of(run.seen)
        before = earlier_call.ledger.terms_of(earlier.seen)
        for index, (name, old, new) in enumerate(
            zip(observer.number_names(run.code), earlier.floats, run.floats, strict=True)
        ):
            if index in terms and terms[index] == before.get(index):
                continue
            if old != new or math.isnan(new):
                raise NotReplayable(
                    f"Python computes a number for {name} that changes from call to call ({old!r}, then {new!r}) and "
                    "is no hyperparameter; keep it in a tensor on the device, or pass it as one"
                )
            terms.pop(index, None)
        self._code, self._floats = run.code, np.array(run.floats, np.float64)
        self._places: dict[tuple[Term, ...], list[int]] = {}
        for index, ways in terms.items():
            self._places.setdefault(ways, []).append(index)

    # -- replaying -----------------------------------------------------------------------------------------------

    def is_stale(self) -> bool:
        """Whether options of optimizers or scalers have changed, so that another program is to be captured."""
        if self._replay is None:
            return False
        if not self._has_its_settings() or [_growth(scaler) for scaler in self._scalers] != self._growth:
            return True
        now = [read() for read in self._readers]
        if now != self._read:
            self._read, self._ready = now, self._numbers()
        return self._ready is None

    def replay(self, leaves: list[Any]) -> Any:
        """Runs the captured program, which is not stale; `STALE` when values that it needs are gone."""
        execute.cut()
        arguments = [observer.argument_buffer(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = None
        if self._replay is not None and self._ready is not None:
            values = self._replay.run(arguments, self._ready)
        if values is None:
            return STALE
        self.replays += 1
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        for parameter in self._dropped:
            parameter.grad = None
        return self._result(values, leaves)

    def _result(self, values: list[Any], leaves: list[Any]) -> Any:
        outputs = [output.now(values, leaves) for output in self._outputs]
        return outputs[0] if self._is_leaf else tree_unflatten(outputs, self._tree)

    def _has_its_settings(self) -> bool:
        options = self._call.options()
        if options[0] == self._options[0] and all(map(is_, options[1], self._options[1])):
            return True
        if self._call.settings() != self._settings:
            return False
        self._options = options
        return True

    def _numbers(self) -> np.ndarray | None:
        """The lifted numbers with the hyperparameters as they are now.

        None where it is unknown which is which: two formulas had one value when captured and have two now; or where
        Python now decides otherwise by them.
        """
        if any(evaluate(test, self._reads) != outcome for test, outcome in self._call.ledger.conditions.items()):
            return None
        floats = self._floats.copy()
        for ways, places in self._places.items():
            numbers = {evaluate(term, self._reads) for term in ways}
            if len(numbers) > 1:
                return None
            floats[places] = numbers.pop()
        return floats


def _growth(scaler: torch.amp.GradScaler) -> tuple[Any, ...]:
    if not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


class _Output:
    """One leaf of what the step returns."""

    def __init__(self, leaf: Any, replay: Replay, leaves: list[Any], arguments: list[Any]) -> None:
        self._fixed = leaf
        self._place: int | None = None
        """Which of the replay's results it is; None for an argument, a tensor that lives on, and plain values."""
        self._argument: int | None = None
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != DEVICE_TYPE:
            return
        self._argument = next((index for index, given in enumerate(leaves) if given is leaf), None)
        buffer = tensor_io.buffer_of(leaf)
        if self._argument is not None or replay.keeps(buffer) or buffer in arguments:
            return
        self._place = replay.place_of(buffer)
        if self._place is not None:
            if leaf.dtype is not buffer.spec.dtype:
                raise NotReplayable(f"it returns a view of other bytes ({leaf.dtype} of {buffer.spec.dtype})")
            self._geometry = Geometry.of(leaf)
            self._fixed = None

    def now(self, values: list[Any], leaves: list[Any]) -> Any:
        """The leaf of a call whose program gave `values`; always a fresh tensor, so that no replay overwrites it."""
        if self._place is not None:
            return observer.result(values[self._place], self._geometry)
        return self._fixed if self._argument is None else leaves[self._argument]
