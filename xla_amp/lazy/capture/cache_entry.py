"""One cache entry of a captured step: captures when two recorded calls agree, then replays and audits."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from xla_amp import config
from xla_amp.lazy.capture.guards import Gradients, Values
from xla_amp.lazy.capture.optimizer_steps import Numbers, OptimizerSteps
from xla_amp.lazy.capture.recording import NotReplayableError, Recording, require_replaced
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.programs.compile import Program

AUDIT = 8
"""After 8, 64, 512, ... replays one call is recorded again and compared."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A recorded call."""

    steps: OptimizerSteps
    run: Recording
    plain: list[Any]
    """Python values that it returned."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Capture:
    """What replays a call."""

    replay: Replay
    numbers: Numbers
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]]
    """Those that the call sets or drops."""
    structure: TreeSpec | None
    """Of what the call returns; None for one item."""
    storages: list[int]
    """`Values.storages` and those of modules and optimizers that it left."""


class CacheEntry:
    """The recorded calls of a step for one set of guarded values, and their replay.

    Args:
        values: the Python values of the calls that it serves.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.calls = self.replays = 0
        self._audit_at = AUDIT
        self.last: Call | None = None
        """The last recorded call, if the next one can be compared with it."""
        self._capture: Capture | None = None
        self._program: weakref.ref[Program] | None = None
        self._lost: str | None = None
        """Why the capture was dropped, to be reported at the next call."""

    @property
    def captured(self) -> bool:
        """Whether there is a replay."""
        return self._capture is not None

    def audit_is_due(self) -> bool:
        """Whether the next call is recorded although there is a replay."""
        return self.replays >= self._audit_at

    def drop_capture(self) -> None:
        """Drops the replay; the next two recorded calls can capture again."""
        self._capture = self.last = None
        self.replays, self._audit_at = 0, AUDIT

    def _release(self) -> None:
        """Called when the cache of programs drops this one's: to stay within bounds, a capture must not keep it."""
        if self._capture is not None:
            self._lost = f"its program was dropped to stay within {config.PROGRAM_MEMORY}"
        self.drop_capture()

    def _hold(self, reference: weakref.ref[Program]) -> None:
        program = reference()
        if program is not None and (self._program is None or self._program() is not program):
            self._program, release = reference, weakref.WeakMethod(self._release)
            program.holders.append(lambda: None if (method := release()) is None else method())

    # -- capturing -----------------------------------------------------------------------------------------------

    def add(
        self, call: Call, result: Any, tensors: list[torch.Tensor], gradients: Gradients, storages: list[int],
        scalers: list[torch.amp.GradScaler],
    ) -> Any:  # fmt: skip
        """Compares a recorded call with the one before it, and captures if they agree.

        Args:
            call: the recorded call.
            result: what the step returned.
            tensors: tensor arguments.
            gradients: of the step's parameters, before the call.
            storages: as in `Capture`.
            scalers: that the step can see.

        Returns:
            What the call returns to the user.

        Raises:
            NotReplayableError: they do not agree, or something in the call cannot be replayed.
        """
        last, self.last = self.last, None
        if call.steps.obstacle is not None:
            raise NotReplayableError(call.steps.obstacle)
        flat, structure = tree_flatten(result)
        changed = gradients.changed()
        needs_backward = any(isinstance(item, torch.Tensor) and item.requires_grad for item in flat)
        if needs_backward and not (call.steps.optimizers or changed):
            raise NotReplayableError(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        self._hold(call.run.program)
        self.last = call
        if last is None:
            return result
        self.last = None
        if call.plain != last.plain or list(map(type, call.plain)) != list(map(type, last.plain)):
            raise NotReplayableError(f"it returns a Python value that changes: {last.plain} and then {call.plain}")
        require_replaced(last.run, call.run, storages)
        replay = Replay(last.run, call.run, flat, tensors)
        numbers = Numbers((last.steps, last.run), (call.steps, call.run), scalers)
        if self._capture is not None:
            self._audit_at *= AUDIT
        one = len(flat) == 1 and flat[0] is result
        self._capture = Capture(
            replay=replay, numbers=numbers, gradients=changed, structure=None if one else structure, storages=storages
        )
        self.last = call
        return self._returned(replay.results(tensors))

    def _returned(self, items: list[Any]) -> Any:
        assert self._capture is not None  # noqa: S101  (the callers have one)
        structure = self._capture.structure
        return items[0] if structure is None else tree_unflatten(items, structure)

    # -- replaying -----------------------------------------------------------------------------------------------

    def lost(self, storages: list[int]) -> str | None:
        """Drops the capture if it no longer holds, and says why; None if it holds or if there is none.

        Args:
            storages: those of now.
        """
        lost, self._lost = self._lost, None
        capture = self._capture
        if capture is None:
            return lost
        if capture.numbers.current() is None:
            lost = "an option of an optimizer or a scaler has changed"
        elif storages != capture.storages:
            lost = "a tensor of its state was freed or replaced"
        if lost is not None:
            self.drop_capture()
        return lost

    def run(self, tensors: list[torch.Tensor]) -> tuple[Any] | None:
        """Replays a captured call; returns what it returns, None if a value that it needs no longer exists.

        Args:
            tensors: tensor arguments.
        """
        capture = self._capture
        floats = None if capture is None else capture.numbers.current()
        if capture is None or floats is None:
            return None
        items = capture.replay.run(tensors, floats)
        if items is None:
            self._lost = "a tensor of its state was freed or replaced"
            return None
        self.replays += 1
        for parameter, grad in capture.gradients:
            if parameter.grad is not grad:
                parameter.grad = grad
        return (self._returned(items),)
