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
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

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


_Call: TypeAlias = Literal["foreign", "first", "inside", "step", "repeat", "either"]


class _Next(NamedTuple):
    """What a module's call is after an event."""

    waits: _Call
    """A step has ended, or must begin with the next forward pass."""
    ran: _Call
    """A program has run."""
    called: _Call
    """A module is called."""
    repeats: _Call
    """The program ends where its first module is called again (`loops`)."""
    first_too: _Call
    """It should, and that module is gone: the next one is the first."""


_CALLS: Final[Mapping[_Call, _Next]] = MappingProxyType(
    {  # a module's call is nothing; the thread loads or logs
        "foreign": _Next("first", "foreign", "inside", "repeat", "first"),
        # begins the thread's first step, if it calls modules at all
        "first": _Next("first", "foreign", "inside", "repeat", "first"),
        # is nothing
        "inside": _Next("step", "step", "inside", "repeat", "step"),
        # begins a step
        "step": _Next("step", "step", "inside", "either", "step"),
        # of the first module ends the program
        "repeat": _Next("step", "step", "repeat", "repeat", "either"),
        # begins a step, and a later one of the first module ends the program
        "either": _Next("step", "step", "repeat", "either", "either"),
    }
)
"""What a module's call is for a thread -> what it is after an event."""
_NOTHING: Final = ("foreign", "inside")


class _Forward:
    """The forward pass of a training step, and its loss, until a backward pass ends."""

    __slots__ = ("model", "nodes", "parts")

    def __init__(self, model: weakref.ref[torch.nn.Module]) -> None:
        self.model = model
        """The module whose call began it."""
        self.nodes = private_api.autograd_nodes()
        """The count of autograd's nodes then."""
        self.parts = MOST_PARTS
        """How many further programs may be parts of it."""


class _Step:
    """Where a thread is in its step."""

    def __init__(self) -> None:
        self.call: _Call = "foreign"
        """What a module's call is."""
        self.phase: Literal["between", "open", "stepped"] = "between"
        """Whether a training step has begun that no optimizer step has ended, or an optimizer step was recorded."""
        self.at: Generation | None = None
        """The trace in which that was; no longer the present one after a flush."""
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that stepped in that trace."""
        self.first: tuple[Generation | None, Any] = None, None
        """A trace, and a weak reference to the module that was called first in it."""
        self.forward: _Forward | None = None
        self.begins_program = False
        """Whether the last training step began with its program: nothing was recorded before its forward pass."""
        self.ended = False
        """Whether the next forward pass that begins a step begins a program, too (`end_step`)."""
        self.paused = False
        self.unscaled = False
        """Whether a scaler has unscaled gradients and not updated its scale."""

    def is_in(self, phase: Literal["open", "stepped"]) -> bool:
        """Whether the phase began in this trace."""
        return self.phase == phase and self.at is trace.generation


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
        _step().call = "inside"
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
        if step.phase == "stepped":
            step.phase = "between"
            if step.at is trace.generation and not step.paused:
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
        if _process.with_optimizer and not step.paused and step.is_in("stepped"):
            end_step()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer_steps(optimizer)
    if not optimizer_step.is_on_device(optimizer):
        return
    with trace.lock:
        if _step().is_in("stepped") and optimizer in _step().stepped:
            step_begins()
        forward_ended()
        trace.nodes = None  # what the optimizer records is part of a training step


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer_step.is_on_device(optimizer):
        device_was_used()
        with trace.lock:
            step = _step()
            if step.phase == "open":
                step.phase = "between"
            if trace.code:
                _optimizer_stepped(step, optimizer)
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


def _optimizer_stepped(step: _Step, optimizer: torch.optim.Optimizer) -> None:
    if not step.is_in("stepped"):
        step.stepped.clear()
    step.phase, step.at = "stepped", trace.generation
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
        step.call = _CALLS[step.call].waits
        _install_hook()


def forward_ended() -> None:
    """A backward pass or an optimizer's step: what follows is not the loss of the last training step's forward pass."""
    _step().forward = None


def _program_ran() -> None:
    step = trace.step or _step()
    forward = step.forward
    if forward is not None and forward.model() is not None and forward.parts:
        forward.parts -= 1
        if private_api.autograd_nodes() != forward.nodes:
            trace.nodes = threading.get_ident(), -1
    step.call = _CALLS[step.call].ran
    if step.call == "step" and _process.hook is None:
        _install_hook()


def _install_hook() -> None:
    if _process.hook is None:
        _process.hook = nn_module.register_module_forward_pre_hook(forward_hook.before_forward)


def before_forward(module: torch.nn.Module) -> None:
    """Marks the forward pass of a module, or of a compiled graph, which may be the first one of a step."""
    with trace.lock:
        step = _step()
        if step.call not in _NOTHING:
            trains = getattr(module, "training", False)  # a frozen module of TorchScript does not have it
            _forward_begins(step, module, trains and torch.is_grad_enabled())


def _forward_begins(step: _Step, module: torch.nn.Module, trains: bool) -> None:
    if step.call == "repeat":
        if module is not _first_module() or step.paused or not any(may_repeat()):
            return
        flush()
        step.call = "repeat"
    step.call = _CALLS[step.call].called
    if step.ended:
        step.ended = False
        flush()
    if not _process.keeps_hook and all(each.call in _NOTHING for each in _process.steps):
        _remove_hook()
    step_begins()
    if trains and not is_open() and any(p.device.type == DEVICE_TYPE for p in module.parameters()):
        # What was recorded between two steps, sums and copies of weights for instance, is no part of the second.
        before, step.begins_program = step.begins_program, not trace.code
        if before and trace.nodes == (threading.get_ident(), private_api.autograd_nodes()):
            _run_alone()
    step.first = trace.generation, weakref.ref(module)
    model = step.forward and step.forward.model()
    again = model is not None and any(each is model for each in module.modules())
    if trains:
        step.phase, step.at = "open", trace.generation
        if again or model is None:  # not a module of the same loss
            step.forward = _Forward(step.first[1])
    elif again:  # an evaluation
        step.forward = None
        if trace.nodes == (threading.get_ident(), -1):
            trace.nodes = threading.get_ident(), private_api.autograd_nodes()


def _first_module() -> Any:
    generation, module = _step().first
    return module() if generation is trace.generation else None


def ends_at_first_module() -> bool:
    """From now on this program ends where its first module is called again; False if none has been called in it."""
    _install_hook()
    step = _step()
    after = _CALLS[step.call]
    step.call = after.first_too if _first_module() is None else after.repeats  # it was called on the CPU, and is gone
    return step.call in ("repeat", "either")


def is_open() -> bool:
    """Whether the forward pass of a training step has begun in this trace, and no optimizer step has followed."""
    with trace.lock:
        return _step().is_in("open")


def _remove_hook() -> None:
    if _process.hook is not None:
        _process.hook.remove()
        _process.hook = None


def _forget() -> None:
    """In a forked child: a module on the CPU, a loader's transform for instance, begins no step of the parent's."""
    for step in _process.steps:
        step.phase, step.ended = "between", False
        step.call = "foreign" if step.call in ("foreign", "first") else "inside"
    _remove_hook()


for _hook in (_before_step, _after_step):
    dynamo.skip(_hook)
