"""One cache entry of a captured step: captures when two recorded calls agree, then replays and audits."""

from __future__ import annotations

import math
import weakref
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from xla_amp import config
from xla_amp.lazy.capture import observer
from xla_amp.lazy.capture.guards import Guards
from xla_amp.lazy.capture.observer import Geometry, NotReplayableError, ObservedRun, ProgramObserver
from xla_amp.lazy.capture.optimizer_replay import OptimizerSteps
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.capture.symbolic_scalars import Term, evaluate
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import Program
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

AUDIT = 8
"""After 8, 64, 512, ... replays one call is recorded again and compared."""


class CacheEntry:
    """The recorded calls of a step for one set of guarded values, and their replay.

    Args:
        values: `Guards.values` of the calls that it serves.
        missing_gradients: `Guards.missing_gradients` of them.
    """

    def __init__(self, values: Any, missing_gradients: list[bool]) -> None:
        self.values = values
        self.missing_gradients = missing_gradients
        self.calls = self.replays = 0
        self._audit_at = AUDIT
        self._last: tuple[OptimizerSteps, ObservedRun, list[Any]] | None = None
        self._replay: Replay | None = None
        self.storages: list[int] = []
        """`Guards.storages` after the captured call."""
        self._held: Any = None
        """Weak reference to the program that this entry has."""
        self.lost: str | None = None
        """Why the capture was dropped, to be reported at the next call."""

    @property
    def captured(self) -> bool:
        """Whether there is a replay."""
        return self._replay is not None

    def audit_is_due(self) -> bool:
        """Whether the next call is recorded although there is a replay."""
        return self.replays >= self._audit_at

    def drop_capture(self) -> None:
        """Drops the replay; the next two recorded calls can capture again."""
        self._replay = self._last = None
        self.replays, self._audit_at = 0, AUDIT

    def _hold(self, program: Program) -> None:
        if self._held is None or self._held() is not program:
            self._held = weakref.ref(program)
            release = weakref.WeakMethod(self._release)
            program.holders.append(lambda: None if (method := release()) is None else method())

    def _release(self) -> None:
        """Called when the cache of programs drops this one's: to stay within bounds, a capture must not keep it."""
        if self._replay is not None:
            self._replay.release()
            self.lost = f"its program was dropped to stay within {config.PROGRAM_MEMORY}"
        self.drop_capture()

    def last_run(self) -> ObservedRun | None:
        """The run of the last recorded call, if it was one program."""
        return None if self._last is None else self._last[1]

    # -- capturing -----------------------------------------------------------------------------------------------

    def add_recorded_call(
        self,
        steps: OptimizerSteps,
        programs: ProgramObserver,
        flat_args: list[Any],
        gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]],
        result: Any,
        guards: Guards,
    ) -> Any:
        """Compares a recorded call with the one before it, and captures if they agree; audits a captured step.

        Args:
            steps: what optimizers did in the call.
            programs: the programs that ran in the call.
            flat_args: arguments of the call.
            gradients: parameters with their gradients before the call.
            result: what the step returned.
            guards: of the call.

        Returns:
            What the call returns to the user.

        Raises:
            NotReplayableError: they do not agree, or something in the call cannot be replayed.
        """
        last, self._last = self._last, None
        run = programs.single_run()
        if steps.obstacle is not None:
            raise NotReplayableError(steps.obstacle)
        flat, tree = tree_flatten(result)
        changed = [(p, p.grad) for p, before in gradients if p.grad is not before]
        plain = [item for item in flat if not isinstance(item, torch.Tensor)]
        needs_backward = any(isinstance(item, torch.Tensor) and item.requires_grad for item in flat)
        if needs_backward and not (steps.optimizers or changed):
            raise NotReplayableError(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        if self._replay is not None:
            self._audit(run)
            return result
        self._last = steps, run, plain
        self._hold(run.program)
        if last is None:
            return result
        earlier_steps, earlier, earlier_plain = last
        if plain != earlier_plain:
            raise NotReplayableError(f"it returns a Python value that changes: {earlier_plain} and then {plain}")
        arguments = _argument_buffers(flat_args)
        replay = Replay(earlier, run, programs.begin, programs.end, arguments)
        self._explain_numbers(earlier_steps, earlier, steps, run)
        self._steps, self._options, self._fixed_options = steps, steps.options(), steps.fixed_options()
        self._reads = steps.reads()
        self._hyperparameters: list[float] | None = None
        """Those of the last replay."""
        self._numbers: np.ndarray[Any, Any] | None = None
        """The program's numbers for them; the same object until one changes."""
        self._scalers = guards.scalers
        self._growth = [_growth(scaler) for scaler in self._scalers]
        self._gradients = [(p, grad) for p, grad in changed if grad is not None]
        self._dropped_gradients = [p for p, grad in changed if grad is None]
        self._returns_one = len(flat) == 1 and flat[0] is result
        self._tree, self._outputs = tree, [_Output(item, replay, flat_args, arguments) for item in flat]
        self._replay, self._last = replay, None
        return self.outputs(replay.values(), flat_args)

    def _audit(self, run: ObservedRun) -> None:
        """Compares a recorded call with what a replay would have run.

        Raises:
            NotReplayableError: they differ.
        """
        self._audit_at *= AUDIT
        if run.code != self._code:
            raise NotReplayableError(f"by now {observer.first_difference(self._code, run.code)}")
        expected = self._compute_numbers()
        if expected is None:
            return
        for name, old, new in zip(observer.number_names(run.code), expected, run.floats, strict=True):
            if old != new:
                raise NotReplayableError(f"by now Python computes {new!r} for {name}, where a replay takes {old!r}")

    def _explain_numbers(
        self, earlier_steps: OptimizerSteps, earlier: ObservedRun, steps: OptimizerSteps, run: ObservedRun
    ) -> None:
        """Finds for each number of the program that it is constant, or the terms that give it.

        Raises:
            NotReplayableError: a number is neither.
        """
        terms = steps.table.terms_of(run.raw_floats)
        before = earlier_steps.table.terms_of(earlier.raw_floats)
        for index, (name, old, new) in enumerate(
            zip(observer.number_names(run.code), earlier.floats, run.floats, strict=True)
        ):
            if index in terms and terms[index] == before.get(index):
                continue
            if old != new or math.isnan(new):
                raise NotReplayableError(
                    f"Python computes a number for {name} that changes from call to call ({old!r}, then {new!r}) and "
                    "is no hyperparameter; keep it in a tensor on the device, or pass it as one"
                )
            terms.pop(index, None)
        self._code, self._floats = run.code, np.array(run.floats, np.float64)
        self._indices: dict[tuple[Term, ...], list[int]] = {}
        for index, equal_terms in terms.items():
            self._indices.setdefault(equal_terms, []).append(index)

    # -- replaying -----------------------------------------------------------------------------------------------

    def is_stale(self) -> bool:
        """Whether options of optimizers or scalers have changed in a way that needs another capture."""
        if self._replay is None:
            return False
        if self._fixed_options_changed() or [_growth(scaler) for scaler in self._scalers] != self._growth:
            return True
        now = [read() for read in self._reads.values()]
        if now != self._hyperparameters:
            self._hyperparameters, self._numbers = now, self._compute_numbers()
        return self._numbers is None

    def run(self, flat_args: list[Any]) -> list[Any] | None:
        """Runs the captured program, which is not stale; None if a value that it needs no longer exists."""
        execute.flush()
        arguments = _argument_buffers(flat_args)
        if self._replay is None or self._numbers is None:  # the flush can end the capture
            return None
        values = self._replay.run(arguments, self._numbers)
        if values is None:
            return None
        self.replays += 1
        for parameter, grad in self._gradients:
            if parameter.grad is not grad:
                parameter.grad = grad
        for parameter in self._dropped_gradients:
            parameter.grad = None
        return values

    def outputs(self, values: list[Any], flat_args: list[Any]) -> Any:
        """What the step returns, from what `run` gave."""
        outputs = [output.read(values, flat_args) for output in self._outputs]
        return outputs[0] if self._returns_one else tree_unflatten(outputs, self._tree)

    def _fixed_options_changed(self) -> bool:
        options = self._steps.options()
        if options[0] == self._options[0] and all(map(is_, options[1], self._options[1])):
            return False
        if self._steps.fixed_options() != self._fixed_options:
            return True
        self._options = options
        return False

    def _compute_numbers(self) -> np.ndarray[Any, Any] | None:
        """The program's numbers for the current hyperparameters.

        None if a comparison has another outcome than when captured, or if terms that were equal then are not now.
        """
        if any(evaluate(test, self._reads) != outcome for test, outcome in self._steps.table.conditions.items()):
            return None
        floats = self._floats.copy()
        for equal_terms, indices in self._indices.items():
            numbers = {evaluate(term, self._reads) for term in equal_terms}
            if len(numbers) > 1:
                return None
            floats[indices] = numbers.pop()
        return floats


def _argument_buffers(flat_args: list[Any]) -> list[Buffer]:
    return [observer.argument_buffer(item) for item in flat_args if isinstance(item, torch.Tensor)]


def _growth(scaler: torch.amp.GradScaler) -> tuple[float, ...]:
    if not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


class _Output:
    """One item of what the step returns."""

    def __init__(self, item: Any, replay: Replay, flat_args: list[Any], arguments: list[Buffer]) -> None:
        self._fixed = item
        self._result: int | None = None
        """Index among the replay's results; None for an argument, a tensor of the state, and plain values."""
        self._argument: int | None = None
        if not isinstance(item, torch.Tensor) or item.device.type != DEVICE_TYPE:
            return
        self._argument = next((index for index, given in enumerate(flat_args) if given is item), None)
        buffer = tensor_io.buffer_of(item)
        if self._argument is not None or replay.keeps(buffer) or buffer in arguments:
            return
        self._result = replay.result_index(buffer)
        if self._result is not None:
            if item.dtype is not buffer.spec.dtype:
                raise NotReplayableError(f"it returns a view of other bytes ({item.dtype} of {buffer.spec.dtype})")
            self._geometry = Geometry.from_tensor(item)
            self._fixed = None

    def read(self, values: list[Any], flat_args: list[Any]) -> Any:
        """The item of a call whose program gave `values`; a new tensor each time, so that no replay overwrites it."""
        if self._result is not None:
            return self._geometry.new_tensor(values[self._result])
        return self._fixed if self._argument is None else flat_args[self._argument]
