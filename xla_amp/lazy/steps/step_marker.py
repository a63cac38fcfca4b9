"""Mark step boundaries in training loops that never call `sync()`.

Such a loop must run one executable for each optimizer step, and gradients that the next ``zero_grad()`` drops must not
be among its outputs.  So an optimizer step only arms a flush, and the beginning of the next step triggers it: a
module's forward, the entry of an autocast region, or the second step of the same optimizer.  A step of another
optimizer does not, because several optimizers may share a backward pass.  An upload does not either: it records
nothing, and loops fetch the next batch before they drop the gradients.

Before the first step, a loop over a DataLoader is such a beginning (`loop_begins`).  `loops` has the rule for loops
without an optimizer.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from xla_amp.common import events
from xla_amp.lazy.base import forks, private_api
from xla_amp.lazy.graph.trace import Generation, OwnPoint, trace
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.programs.execute import flush
from xla_amp.lazy.steps import cpu_training, forward_hook, optimizer_step
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.torch_common import dynamo, module_paths

MOST_PARTS = 16
"""Programs into which reads may cut a forward pass and its loss."""


class _Step:
    """Where a thread is in its step."""

    def __init__(self) -> None:
        self.armed: Generation | None = None
        """The trace in which an optimizer step was recorded; no longer the present one after a flush."""
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that stepped in that trace."""
        self.awaited = False
        """Whether the next forward pass begins a step."""
        self.ended = False
        """Whether the next forward pass begins a program, too (`end_step`)."""
        self.first: tuple[Generation | None, Any] = None, None
        """A trace, and a weak reference to the module that was called first in it."""
        self.repeats = False
        """Whether the program ends where that module is called again (`loops`)."""
        self.paused = False
        self.open: Generation | None = None
        """The trace in which a training step began that no optimizer step has ended."""
        self.model: weakref.ref[Any] | None = None
        """The module whose forward pass began the training step, until a backward pass ends."""
        self.nodes = -1
        """The count of autograd's nodes then."""
        self.parts = 0
        """How many further programs may be parts of that forward pass and its loss."""
        self.begins_program = False
        """Whether the last training step began with its program: nothing was recorded before its forward pass."""
        self.unscaled = False
        """Whether a scaler has unscaled gradients and not updated its scale."""
        self.calls = False
        """Whether the thread calls modules, or is the one that started the device."""


class _Process:
    """What all threads share."""

    def __init__(self) -> None:
        self.steps: weakref.WeakSet[_Step] = weakref.WeakSet()
        """Of the threads that record."""
        self.hook: Any = None
        """The module hook's handle, while it is installed."""
        self.keeps_hook = False
        """Whether it stays installed (`keep_hook`)."""
        self.with_optimizer = False
        """Whether a step ends with the optimizer's (`end_with_optimizer`)."""
        self.watches = True
        """Whether no optimizer has stepped parameters on the device."""


_process = _Process()


def _step() -> _Step:
    """Where this thread is in its step; the caller holds the trace's lock."""
    found: _Step | None = trace.step
    if found is None:
        found = trace.step = _Step()
        _process.steps.add(found)
    return found


@events.Point
def may_repeat() -> bool:  # type: ignore[empty-body]
    """Asks whether the program may end where its first module is called again."""


@OwnPoint
def optimizer_steps(optimizer: torch.optim.Optimizer, /) -> None:
    """Before an optimizer's step.  torch's own table of hooks may not change while another thread's step reads it."""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Context manager that disables step boundaries: everything recorded becomes one executable."""
    with trace.lock:
        step = _step()
    before, step.paused = step.paused, True
    try:
        yield
    finally:
        step.paused = before


def install() -> None:
    """Registers PyTorch's global hooks."""
    optim.register_optimizer_step_pre_hook(_before_step)
    optim.register_optimizer_step_post_hook(_after_step)
    forward_hook.forward_begins.subscribe(before_forward)
    execute.program_ran.subscribe(_program_ran)
    forks.in_child.subscribe(_forget)
    with trace.lock:
        _step().calls = True
        _await_forward()


def thread_begins() -> None:
    """Before the first operation of a thread, which may be in its first forward pass: no hook has seen that begin."""
    _await_forward()
    for module in module_paths.running()[:1]:
        before_forward(module)


def step_begins() -> None:
    """Flushes if an optimizer step was recorded since the last flush."""
    with trace.lock:
        step = trace.step or _step()
        armed = step.armed is trace.generation
        step.armed = None
        if armed and not step.paused:
            flush()


def end_step() -> None:
    """Flushes, now and at the next forward pass.

    For loops of several processes, whose programs with collectives must be the same: what a process records or reads
    in between, to log a value for instance, is no part of them.
    """
    with trace.lock:
        flush()
        _step().ended = True
        _await_forward()


def end_program() -> None:
    """Flushes, unless everything becomes one executable (`paused`)."""
    with trace.lock:
        if not _step().paused:
            flush()


def loop_begins() -> None:
    """A loop over data begins: what was recorded before it runs now, as it would make the first step another program.

    Not inside a training step, which reads a batch of another loader there.  A copy, such as a running average of the
    weights, gets its memory here: sharing the weights' until one is written, it would make the first step another
    program, too.
    """
    if not is_open():
        _run_alone()


def _run_alone() -> None:
    with trace.lock:
        if not trace.code or _step().paused or forks.is_forked():
            return
        arrays = {id(buffer.array) for buffer in trace.parameters}
        made = [buffer for reference in trace.computed if (buffer := reference()) is not None]
        flush()
        for buffer in made:
            if id(buffer.array) in arrays:
                buffer.store(memory_layout.copy(buffer.array))
            arrays.add(id(buffer.array))


def end_with_optimizer() -> None:
    """From now on a step ends with the optimizer's step, or with the scaler's update after it.

    In every process at the same place: afterwards each may read what it likes.
    """
    _process.with_optimizer = True


def unscales() -> None:
    """A scaler unscales gradients: its update will end the step."""
    with trace.lock:
        _step().unscaled = True


def scale_is_updated() -> None:
    """A scaler has updated its scale."""
    with trace.lock:
        step = _step()
        step.unscaled = False
        if _process.with_optimizer and not step.paused and step.armed is trace.generation:
            end_step()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer_steps(optimizer)
    if not optimizer_step.is_on_device(optimizer):
        return
    with trace.lock:
        if _step().armed is trace.generation and optimizer in _step().stepped:
            step_begins()
        forward_ended()
        trace.nodes = None  # what the optimizer records is part of a training step


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer_step.is_on_device(optimizer):
        device_was_used()
        with trace.lock:
            step = _step()
            step.open = None
            if trace.code:
                _arm(step, optimizer)
                if _process.with_optimizer and not step.paused and not step.unscaled:
                    end_step()
    elif not has_stepped() and cpu_training.is_told(optimizer):
        device_was_used()


def device_was_used() -> None:
    """An optimizer has stepped parameters on the device: the program knows what is where."""
    _process.watches = False
    cpu_training.forget()


def has_stepped() -> bool:
    """Whether an optimizer has stepped parameters on the device."""
    return not _process.watches


def _arm(step: _Step, optimizer: torch.optim.Optimizer) -> None:
    if step.armed is not trace.generation:
        step.stepped.clear()
    step.armed = trace.generation
    step.stepped.add(optimizer)
    _await_forward()


def keep_hook() -> None:
    """Leaves the module hook installed for good: Dynamo compiles again when hooks have changed."""
    with trace.lock:
        _process.keeps_hook = True
        _await_forward()


def _await_forward() -> None:
    """Waits for the next forward pass.

    A global module hook slows every module call down, so it is removed after the first call.
    """
    with trace.lock:
        step = _step()
        step.awaited, step.repeats = True, False
        _install_hook()


def forward_ended() -> None:
    """A backward pass or an optimizer's step: what follows is not the loss of the last training step's forward pass."""
    _step().model = None


def _program_ran() -> None:
    step = trace.step or _step()
    if step.model is not None and step.model() is not None and step.parts:
        step.parts -= 1
        if private_api.autograd_nodes() != step.nodes:
            trace.nodes = threading.get_ident(), -1
    if step.calls:
        step.awaited, step.repeats = True, False
        if _process.hook is None:
            _install_hook()
    else:  # a thread that loads or logs
        step.awaited = False


def _install_hook() -> None:
    if _process.hook is None:
        _process.hook = nn_module.register_module_forward_pre_hook(forward_hook.before_forward)


def before_forward(module: torch.nn.Module) -> None:
    """Marks the forward pass of a module, or of a compiled graph, which may be the first one of a step."""
    with trace.lock:
        step = _step()
        if step.awaited or step.repeats:
            trains = getattr(module, "training", False)  # a frozen module of TorchScript does not have it
            _forward_begins(step, module, trains and torch.is_grad_enabled())


def _forward_begins(step: _Step, module: torch.nn.Module, trains: bool) -> None:
    if not step.awaited:
        if module is not _first_module() or step.paused or not any(may_repeat()):
            return
        flush()
        step.repeats = True
    step.awaited, step.calls = False, True
    if step.ended:
        step.ended = False
        flush()
    if not _process.keeps_hook and not any(each.awaited or each.repeats for each in _process.steps):
        _remove_hook()
    step_begins()
    if trains and not is_open() and any(p.device.type == DEVICE_TYPE for p in module.parameters()):
        # What was recorded between two steps, sums and copies of weights for instance, is no part of the second.
        before, step.begins_program = step.begins_program, not trace.code
        if before and trace.nodes == (threading.get_ident(), private_api.autograd_nodes()):
            _run_alone()
    step.first = trace.generation, weakref.ref(module)
    again = step.model is not None and any(each is step.model() for each in module.modules())
    if trains:
        step.open = trace.generation
        if again or step.model is None or step.model() is None:  # not a module of the same loss
            step.model, step.parts, step.nodes = step.first[1], MOST_PARTS, private_api.autograd_nodes()
    elif again:  # an evaluation
        step.model = None
        if trace.nodes == (threading.get_ident(), -1):
            trace.nodes = threading.get_ident(), private_api.autograd_nodes()


def _first_module() -> Any:
    generation, module = _step().first
    return module() if generation is trace.generation else None


def ends_at_first_module() -> bool:
    """From now on this program ends where its first module is called again; False if none has been called in it."""
    _install_hook()
    step = _step()
    if _first_module() is None:  # it was called on the CPU, and is gone
        step.awaited = True
    else:
        step.repeats = True
    return step.repeats


def is_open() -> bool:
    """Whether the forward pass of a training step has begun in this trace, and no optimizer step has followed."""
    with trace.lock:
        return _step().open is trace.generation


def _remove_hook() -> None:
    if _process.hook is not None:
        _process.hook.remove()
        _process.hook = None


def _forget() -> None:
    """In a forked child: a module on the CPU, a loader's transform for instance, begins no step of the parent's."""
    for step in _process.steps:
        step.armed = step.open = None
        step.awaited = step.ended = step.repeats = False
    _remove_hook()


for _hook in (_before_step, _after_step):
    dynamo.skip(_hook)
