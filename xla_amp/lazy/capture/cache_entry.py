"""One cache entry of a captured step: captures when two recorded calls agree, then replays and audits."""

from __future__ import annotations

import weakref
from itertools import starmap
from typing import Any

import numpy as np
import torch

from xla_amp.backends.trees import tree_leaves
from xla_amp.common import config
from xla_amp.lazy.capture.guards import Guards
from xla_amp.lazy.capture.module_tree import is_frozen, plain
from xla_amp.lazy.capture.numbers import ReplayNumbers
from xla_amp.lazy.capture.reach import NotReplayableError, Values
from xla_amp.lazy.capture.recording import Recording, require_replaced
from xla_amp.lazy.capture.replay import Replay
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.tensors import tensor_io

AUDIT = 8
"""After 8, 64, 512, ... replays one call is recorded again and compared."""


class CacheEntry:
    """The recorded calls of a step for one set of guarded values, and their replay.

    Args:
        call: the arguments and modes of the calls that it serves, each with words for messages.
        values: the Python values of these calls.
    """

    def __init__(self, call: list[tuple[str, Any]], values: Values) -> None:
        self.call, self.values = call, values
        self.calls = self.replays = 0
        self.last: Recording | None = None
        """The last recorded call, if the next one can be compared with it."""
        self._audit_at = AUDIT
        self._replay: Replay | None = None
        self._program: weakref.ref[XlaProgram] | None = None
        self._lost: str | None = None
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
        self._replay = self.last = None
        self.replays, self._audit_at = 0, AUDIT

    def _release(self) -> None:
        """Called when the cache of programs drops this one's: to stay within bounds, a capture must not keep it."""
        if self._replay is not None:
            self._lost = f"its program was dropped to stay within {config.PROGRAM_MEMORY}"
        self.drop_capture()

    def _hold(self, reference: weakref.ref[XlaProgram]) -> None:
        program = reference()
        if program is not None and (self._program is None or self._program() is not program):
            self._program, release = reference, weakref.WeakMethod(self._release)
            program.holders.append(lambda: None if (method := release()) is None else method())

    def add(
        self, run: Recording, result: Any, tensors: list[torch.Tensor], guards: Guards, after: Values
    ) -> Any:  # fmt: skip
        """Compares a recorded call with the one before it, and captures if they agree.

        Args:
            run: the recorded call.
            result: what the step returned.
            tensors: tensor arguments.
            guards: of the call.
            after: the Python values after it.

        Returns:
            What the call returns to the user.

        Raises:
            NotReplayableError: they do not agree, or something in the call cannot be replayed.
        """
        last, self.last = self.last, None
        run.require_one_program()
        leaves, gradients = tree_leaves(result), [parameter.grad for parameter in guards.parameters]
        run.plain = [_constant(item) for item in leaves if not isinstance(item, torch.Tensor)]
        needs_backward = any(isinstance(item, torch.Tensor) and item.requires_grad for item in leaves)
        if needs_backward and not (run.numbers.optimizers or any(map(run.has_written, gradients))):
            raise NotReplayableError(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        self._hold(run.program)
        if last is None:
            self.last = run
            return result
        if run.plain != last.plain:
            kinds = ", ".join(dict.fromkeys(kind.__name__ for kind, *_ in (*last.plain, *run.plain)))
            raise NotReplayableError(
                f"it returns a Python value that is another one in each call (among {kinds}); return tensors and "
                "constants, in tuples, lists and dictionaries"
            )
        storages = guards.storages(after)
        require_replaced(last, run, storages)
        replay = Replay(last, run, result, tensors)
        numbers = ReplayNumbers(last.numbers, run.numbers, run.code, guards.scalers)
        if self._replay is not None:
            self._audit_at *= AUDIT
        self._replay, self._numbers, self._storages = replay, numbers, storages
        self._gradients = list(zip(guards.parameters, gradients, run.gradients, strict=True))
        self.last = run
        return replay.results(tensors)

    def lost(self, guards: Guards) -> str | None:
        """Drops the capture if it no longer holds, and says why; None if it holds or if there is none."""
        lost, self._lost = self._lost, None
        if self._replay is None:
            return lost
        if self._numbers.current() is None:
            lost = "an option of an optimizer or a scaler has changed"
        elif guards.storages(self.values) != self._storages:
            lost = "a tensor of its state was freed or replaced"
        elif any(starmap(_is_replaced, self._gradients)):
            lost = "a gradient was replaced"
        if lost is not None:
            self.drop_capture()
        return lost

    def run(self, tensors: list[torch.Tensor]) -> tuple[Any] | None:
        """Replays a captured call; returns what it returns, None if a value that it needs no longer exists.

        Args:
            tensors: tensor arguments.
        """
        replay = self._replay
        floats = None if replay is None else self._numbers.current()
        computed = None if replay is None or floats is None else replay.run(tensors, floats)
        if replay is None or computed is None:
            self._lost = "a tensor of its state was freed or replaced"
            return None
        self.replays += 1
        for parameter, grad, _ in self._gradients:
            if parameter.grad is not grad:
                parameter.grad = grad
        return (replay.results(tensors, computed),)


def _constant(value: Any) -> tuple[Any, ...]:
    """An entry of a Python value that a call returned: equal if a replay may return it again.

    An object that is no plain value may hold tensors, so it is equal to itself only.
    """
    if is_frozen(value):
        return plain(value)
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return type(value), id(value), value


def _is_replaced(parameter: torch.nn.Parameter, left: torch.Tensor | None, dropped: weakref.ref[Buffer] | None) -> bool:
    """Whether a parameter has another gradient than the one that the recorded call left, or read and dropped."""
    grad = parameter.grad
    if grad is None or grad is left:
        return False
    return left is not None or dropped is None or tensor_io.buffer_of(grad) is not dropped()
