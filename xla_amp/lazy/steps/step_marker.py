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

from xla_amp.backends import dynamo, initial_state
from xla_amp.common import config, events
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.programs.execute import flush
from xla_amp.lazy.steps import forward_hook
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import forks

_armed = -1
"""Generation of the trace in which an optimizer step was recorded; no longer current after a flush."""
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that stepped in that trace."""
_forward_hook: Any = None
_awaited = False
"""Whether the next forward pass begins a step."""
_ended = False
"""Whether the next forward pass begins a program, too (`end_step`)."""
_kept = False
"""Whether the hook stays installed (`keep_hook`)."""
_first: tuple[int, Any] = -1, None
"""Generation of a trace, and a weak reference to the module that was called first in it."""
_repeats = False
"""Whether the program ends where that module is called again (`loops`)."""
_paused = False
_open = -1
"""Generation of the trace in which a training step began that no optimizer step has ended."""
_begins_program = False
"""Whether the last training step began with its program: nothing was recorded before its forward pass."""
_with_optimizer = False
"""Whether a step ends with the optimizer's (`end_with_optimizer`)."""
_unscaled = False
"""Whether a scaler has unscaled gradients and not updated its scale."""


@events.Point
def may_repeat() -> bool:  # type: ignore[empty-body]
    """Asks whether the program may end where its first module is called again."""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Context manager that disables step boundaries: everything recorded becomes one executable."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def install() -> None:
    """Registers PyTorch's global hooks."""
    optim.register_optimizer_step_pre_hook(_before_step)
    optim.register_optimizer_step_post_hook(_after_step)
    forward_hook.forward_begins.subscribe(_before_forward)
    execute.program_ran.subscribe(_await_forward)
    forks.in_child.subscribe(_forget)
    _await_forward()


def step_begins() -> None:
    """Flushes if an optimizer step was recorded since the last flush."""
    global _armed
    armed = _armed == trace.generation
    _armed = -1
    if armed and not _paused:
        flush()


def end_step() -> None:
    """Flushes, now and at the next forward pass.

    For loops of several processes, whose programs with collectives must be the same: what a process records or reads
    in between, to log a value for instance, is no part of them.
    """
    global _ended
    flush()
    with trace.lock:
        _ended = True
        _await_forward()


def end_program() -> None:
    """Flushes, unless everything becomes one executable (`paused`)."""
    if not _paused:
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
    if not trace.code or _paused or forks.is_forked():
        return
    with trace.lock:
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
    global _with_optimizer
    _with_optimizer = True


def unscales() -> None:
    """A scaler unscales gradients: its update will end the step."""
    global _unscaled
    _unscaled = True


def scale_is_updated() -> None:
    """A scaler has updated its scale."""
    global _unscaled
    _unscaled = False
    if _with_optimizer and not _paused and _armed == trace.generation:
        end_step()


def _on_device(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return bool(parameter.device.type == DEVICE_TYPE)
    return False


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not _on_device(optimizer):
        return None
    if _armed == trace.generation and optimizer in _stepped:
        step_begins()
    trace.nodes = None  # what the optimizer records is part of a training step
    return initial_state.before_step(optimizer, args, kwargs)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _open
    if _on_device(optimizer):
        device_was_used()
        _open = -1
        if trace.code:
            _arm(optimizer)
            if _with_optimizer and not _paused and not _unscaled:
                end_step()
    else:
        stepped(optimizer)


def _arm(optimizer: torch.optim.Optimizer) -> None:
    global _armed
    with trace.lock:
        if _armed != trace.generation:
            _stepped.clear()
        _armed = trace.generation
        _stepped.add(optimizer)
        _await_forward()


def keep_hook() -> None:
    """Leaves the module hook installed for good: Dynamo compiles again when hooks have changed."""
    global _kept
    with trace.lock:
        _kept = True
        _await_forward()


def _await_forward() -> None:
    """Waits for the next forward pass.

    A global module hook slows every module call down, so it is removed after the first call.
    """
    global _awaited, _repeats
    with trace.lock:
        _awaited, _repeats = True, False
        _install_hook()


def _install_hook() -> None:
    global _forward_hook
    if _forward_hook is None:
        _forward_hook = nn_module.register_module_forward_pre_hook(forward_hook.before_forward)


def _before_forward(module: torch.nn.Module) -> None:
    if _awaited or _repeats:
        with trace.lock:
            trains = getattr(module, "training", False)  # a frozen module of TorchScript does not have it
            _forward_begins(module, trains and torch.is_grad_enabled())


def graph_begins(graph: torch.nn.Module) -> None:
    """Marks the forward pass of a compiled graph, which may be the first one of a step."""
    if _awaited or _repeats:
        with trace.lock:
            _forward_begins(graph, torch.is_grad_enabled())


def _forward_begins(module: torch.nn.Module, trains: bool) -> None:
    global _awaited, _begins_program, _ended, _first, _open, _repeats
    if not _awaited:
        if module is not _first_module() or _paused or not any(may_repeat()):
            return
        flush()
        _repeats = True
    _awaited = False
    if _ended:
        _ended = False
        flush()
    if not _kept and not _repeats:
        _remove_hook()
    step_begins()
    if trains and not is_open() and _is_here(module):
        # What was recorded between two steps, sums and copies of weights for instance, is no part of the second.
        before, _begins_program = _begins_program, not trace.code
        if before and trace.nodes == (threading.get_ident(), private_api.autograd_nodes()):
            _run_alone()
    _first = trace.generation, weakref.ref(module)
    if trains:
        _open = trace.generation


def _is_here(module: torch.nn.Module) -> bool:
    return any(parameter.device.type == DEVICE_TYPE for parameter in module.parameters())


def _first_module() -> Any:
    generation, module = _first
    return module() if generation == trace.generation else None


def ends_at_first_module() -> bool:
    """From now on this program ends where its first module is called again; False if none has been called in it."""
    global _awaited, _repeats
    _install_hook()
    if _first_module() is None:  # it was called on the CPU, and is gone
        _awaited = True
    else:
        _repeats = True
    return _repeats


def is_open() -> bool:
    """Whether the forward pass of a training step has begun in this trace, and no optimizer step has followed."""
    return _open == trace.generation


def _remove_hook() -> None:
    global _forward_hook
    if _forward_hook is not None:
        _forward_hook.remove()
        _forward_hook = None


def _forget() -> None:
    """In a forked child: a module on the CPU, a loader's transform for instance, begins no step of the parent's."""
    global _armed, _awaited, _ended, _open, _repeats
    _armed, _awaited, _ended, _open, _repeats = -1, False, False, -1, False
    _remove_hook()


for _hook in (_before_step, _after_step):
    dynamo.skip(_hook)


# ---- training on the CPU ---------------------------------------------------------------------------------------------


LEAST_ELEMENTS = 100_000
"""Parameters of a model that is worth a device; smaller ones may be on the CPU on purpose."""
STEPS = 10
"""Steps of one optimizer after which this is a training and not a comparison."""

_watching = True
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def device_was_used() -> None:
    """An optimizer has stepped parameters on the device: the program knows what is where."""
    global _watching
    _watching = False
    _steps.clear()


def has_stepped() -> bool:
    """Whether an optimizer has stepped parameters on the device."""
    return not _watching


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Counts a step of an optimizer whose first parameter is not on the device; warns at the `STEPS`-th."""
    global _watching
    if not _watching:
        return
    count = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if count < STEPS:
        return
    del _steps[optimizer]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    elements = sum(p.numel() for p in parameters)
    if elements < LEAST_ELEMENTS or any(p.device.type != "cpu" for p in parameters):
        return
    device_was_used()
    if config.warns_of_cpu_training():
        events.warn(
            f"{type(optimizer).__name__} has made {STEPS} steps on {elements} parameters that are on the CPU, and none "
            "has been made on the XLA device that this program started. Move the model with "
            "model.to(xla_amp.xla_device()) before the optimizer is built, or tell the framework the device; "
            f"{config.CPU_TRAINING}=allow silences this",
        )
