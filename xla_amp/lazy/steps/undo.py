"""Undo a training step that a signal's handler interrupts, so that training goes on as if it had not begun.

A step begins with the first forward pass of a module in training mode, with gradients enabled, since the last program
or optimizer step.  It ends with an optimizer's step.  An exception that a handler raises between them is preceded by
`_undo`: operations of the step leave the trace, and the random generator and the buffers that they overwrote get their
old values.  Tensors made in the step have no values any more; gradients among them are dropped by the next backward
pass.  Outside of steps nothing is undone, as on other devices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from xla_amp import interrupts
from xla_amp.lazy.graph.buffer import Buffer, Poisoned
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute
from xla_amp.lazy.torch_integration import generator


class _Step:
    """A training step that has begun."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.generation = trace.generation
        self.position = trace.position()
        self.numbers = [(weakref.ref(buffer), buffer.number) for buffer in trace.buffers()]
        self.restore_generators = generator.remember()
        self.arrays: dict[int, tuple[weakref.ref[Buffer], Any]] = {}
        """By id of a buffer that programs of this step have overwritten: its value when the step began."""
        self.made: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Buffers that programs of this step have made."""

    def before_run(self, overwritten: list[Buffer], computed: list[Buffer]) -> None:
        """Called before a program runs in the middle of the step.  A value that is kept here is not donated."""
        for buffer in overwritten:
            if id(buffer) not in self.arrays and buffer not in self.made:
                self.arrays[id(buffer)] = weakref.ref(buffer), buffer.array
        self.made.update(buffer for buffer in computed if buffer.array is None)


_step: _Step | None = None
_orphans: weakref.WeakSet[Buffer] = weakref.WeakSet()
"""Buffers that were made in steps which were undone, while something refers to them."""


def begin() -> None:
    """A training step begins; one that has begun in an earlier trace has ended."""
    global _step
    with trace.lock:
        _step = _Step()
        execute.before_run = _step.before_run


def is_open() -> bool:
    """Whether a training step has begun in this trace, and not ended."""
    return _step is not None and _step.generation == trace.generation


def end() -> None:
    """The training step has ended; nothing undoes it any more."""
    global _step
    _step = execute.before_run = None


def _undo(error: BaseException) -> None:
    step = _step
    if step is None or step.thread != threading.get_ident():
        return
    end()
    reason = Poisoned(
        f"this tensor was made in a training step that was interrupted ({type(error).__name__}) and undone"
    )
    touched = list(trace.buffers())
    in_same_trace = step.generation == trace.generation
    if in_same_trace:
        trace.truncate(step.position)
        numbers = {id(buffer): number for ref, number in step.numbers if (buffer := ref()) is not None}
    else:
        trace.clear()
        numbers = {}
    step.restore_generators(in_same_trace)
    for buffer in touched:
        buffer.number = numbers.get(id(buffer), -1)
        if buffer.number < 0 and buffer.array is None:
            buffer.array = reason
            _orphans.add(buffer)
    for ref, array in step.arrays.values():
        if (buffer := ref()) is not None:
            buffer.array, buffer.number = array, -1
    _orphans.update(step.made)
    for listener in interrupts.after_undo:
        listener()
    error.add_note(
        "xla_amp: the training step that this interrupted was undone. Parameters, buffers, optimizers and the device's "
        "random generator are as before its forward pass; gradients that it made are dropped."
    )


interrupts.before_raising.append(_undo)


def drop_gradients(outputs: Iterable[Any]) -> None:
    """Before a backward pass from `outputs`: drops gradients of its leaves that were made in steps since undone."""
    if not _orphans:
        return
    seen: set[Any] = set()
    found = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None]
    while found:
        node = found.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf.grad is not None and not leaf.grad.is_sparse:
            storage: Any = leaf.grad.untyped_storage()
            if storage._xla_amp in _orphans:
                leaf.grad = None
        found += [below for below, _ in node.next_functions if below is not None]
