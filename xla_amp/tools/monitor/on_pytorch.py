"""`monitor`: numbers of a training run in PyTorch, computed on the device inside the step's own program.

Hooks call the device's half (`device_numbers`); at the end of each step the host's half (`host_monitor`) starts to read
what it has written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from xla_amp.backends import devices, dynamo, step_state
from xla_amp.common import arguments
from xla_amp.errors import PolicyError, StepError
from xla_amp.policy import module_patterns
from xla_amp.tools.monitor import kept
from xla_amp.tools.monitor.device_numbers import DeviceNumbers
from xla_amp.tools.monitor.history import StepRecord
from xla_amp.tools.monitor.host_monitor import HostMonitor

_TOGETHER: Final = 100
"""Steps that wait together on torch_xla, which cannot read without waiting."""


class RunningStep:
    """One step while it runs; ``with monitor.step(...) as step`` gives it."""

    def __init__(self, number: int, batch: tuple[Any, ...], generators: dict[str, Any] | None) -> None:
        self.loss: torch.Tensor | float | None = None
        """Set it to the step's loss, () or with one element; it is read later, without waiting."""
        self.batch = batch
        """What is kept of a bad step as its batch; set it where it is known only in the block."""
        self.generators = generators
        """Random states before the step; None if it would not be kept."""
        self._number = number

    def end(self, numbers: DeviceNumbers, count: int) -> None:
        """Starts to read the loss and what the device has recorded of step `count`, from 1."""
        self._numbers, self._count = numbers, count
        self._reads = [devices.read_later(numbers.status)]
        loss, self.loss = self.loss, None
        self._loss = None if isinstance(loss, torch.Tensor | None) else float(loss)
        if isinstance(loss, torch.Tensor):
            with contextlib.suppress(ValueError):  # a view: only its storage can be read without recording
                self._reads.append(devices.read_later(loss.detach()))

    def ready(self) -> bool:
        """Whether `record` does not wait."""
        return all(read.ready() for read in self._reads)

    def record(self) -> StepRecord | None:
        """The numbers of the step; None if the step failed.

        Raises:
            StepError: the device has counted other steps than the host.
        """
        status, *losses = [None if (value := read.value()) is None else value.tolist() for read in self._reads]
        if status is None:
            return None
        if status[0] != self._count:
            raise StepError(
                f"monitor: {self._count} `with monitor.step(...)` blocks or steps of the optimizer have ended, and the "
                f"device counts {status[0]:.0f}: put one optimizer step, with all its micro-batches, into one block"
            )
        for loss in losses:
            self._loss = loss[0] if isinstance(loss, list) else loss
        return self._numbers.record(status, self._number, self._loss)


class Monitor(HostMonitor):
    """Records loss, loss scale, skips, gradients and the range of `model`'s layers while it trains: `monitor`.

    On an XLA device everything is part of the step's executable, and nothing waits for the device.  Each iteration of
    the loop goes into ``with monitor.step(...)``, gradient accumulation as a whole.

    Args:
        model: in evaluation mode, or without gradients, nothing is recorded.
        optimizer: its step ends a step.
        scaler: None records no loss scale, and nothing guards the update: no bad step can be kept.
        directory: gets the first bad step (`xla_amp.tools.monitor.kept`) for ``find_overflow(step, kept=...)``.  Until
            one is kept, each step waits for the one before it: otherwise the state would have gone on.
        layers: patterns as in rules for modules, ``"*.attn"``; a module that one names and all modules in it.
        history: steps that `Monitor.history` holds.
        sinks: functions that are called with each `StepRecord`, in order.
        first_step: number of the first step, of a run that goes on.
        **gone: arguments of earlier versions, which are errors.

    Raises:
        TypeError: `optimizer` is none, or an argument is one of earlier versions.
        ValueError: a number is out of its range.
        PolicyError: a pattern matches no module.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> recorder = monitor(model, optimizer)
        >>> with recorder.step() as step:
        ...     step.loss = model(torch.ones(1, 2)).sum()
        ...     step.loss.backward()
        ...     optimizer.step()
        >>> recorder.read().of("nonfinite")
        [()]
    """

    find = "xla_amp.find_overflow(step{})"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        layers: str | Iterable[str] = "*",
        history: int = 1000,
        sinks: Iterable[Callable[[StepRecord], object]] = (),
        first_step: int = 0,
        **gone: Any,
    ) -> None:
        super().__init__(directory, history, sinks, first_step, gone)
        arguments.require("monitor(model)", model, torch.nn.Module, "a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"monitor(model, optimizer, ...): expected a torch.optim.Optimizer, got {optimizer!r}")
        self._model, self._optimizer = model, optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device = kept.device_of(model)
        modules, patterns = dict(model.named_modules()), [layers] if isinstance(layers, str) else list(layers)
        for pattern in patterns:
            if not any(module_patterns.selects(pattern, path) for path in modules):
                near = module_patterns.nearest(pattern, modules)
                raise PolicyError(f"monitor(layers={pattern!r}): no module matches{near}")
        chosen = [path for path in modules if any(module_patterns.selects(pattern, path) for pattern in patterns)]
        self._numbers = DeviceNumbers(model, chosen, optimizer, self._scaler, self._device)
        self._first = first_step
        self._flag = f"_xla_amp_monitor_{id(self)}"
        """Attribute of the model, which the guards of captured steps compare: whether the step is recorded."""
        hook = functools.partial(_Hook, self._numbers)
        self._handles = [
            *(modules[path].register_forward_hook(hook("layer", path)) for path in chosen),
            model.register_forward_hook(hook("fold"), always_call=True),
            optimizer.register_step_pre_hook(hook("before_step")),
            optimizer.register_step_post_hook(hook("after_step")),
        ]
        if self._scaler is None:
            self._says_unguarded("Type xla_amp.monitor(model, optimizer, xla_amp.GradScaler(), directory=...)")

    def __repr__(self) -> str:
        return f"<xla_amp.monitor of {type(self._model).__name__}: {self._next_step - self._first} steps>"

    @contextlib.contextmanager
    def step(self, *batch: Any) -> Iterator[RunningStep]:
        """Context manager around one step: all its micro-batches, the backward passes and the optimizer.

        Args:
            batch: what ``find_overflow(step, kept=...)`` calls the step with if it is bad: tensors, numbers and texts
                in lists, tuples and dicts.

        Set ``step.loss`` inside to record the loss.  Outside of blocks nothing is recorded.
        """
        numbers = self._numbers
        if numbers.counts:
            raise RuntimeError("monitor.step(): the step before has not ended; one `with` block holds one step")
        if self._keeps:
            self._collect(wait=True)
        entry = RunningStep(self._next_step, batch, step_state.random_state() if self._keeps else None)
        numbers.counts = self._model.__dict__[self._flag] = True
        numbers.ended, scale = 0, numbers.loss_scale()
        try:
            yield entry
        except BaseException:
            numbers.drop()
            raise
        finally:
            numbers.counts = self._model.__dict__[self._flag] = False
        if not numbers.ended and not devices.is_xla(self._device.type):
            if self._scaler is None:
                return  # no optimizer step: the block holds a part of a step
            numbers.step_was_left_out(scale)
        self._next_step += 1
        entry.end(numbers, self._next_step - self._first)
        entry.batch = entry.batch if self._keeps else ()
        self._waiting.append(entry)
        self._collect(wait=self._device.type == "xla" and len(self._waiting) >= _TOGETHER)

    def close(self) -> None:
        """Reads what is left and removes all hooks."""
        try:
            self.read()
        finally:
            while self._handles:
                self._handles.pop().remove()
            self._model.__dict__.pop(self._flag, None)

    def _save(self, folder: Path, waiting: RunningStep, record: StepRecord) -> None:
        kept.save(folder, record, waiting.batch, waiting.generators, self._model, self._optimizer, self._scaler)


monitor = Monitor


class _Hook:
    """A method that modules and optimizers call; weak, so that a monitor without other references ends.

    The hook of a copied or unpickled module does nothing: the copy is another model.
    """

    def __init__(self, owner: Any, method: str, *first: Any) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._method, self._first = method, first

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and (owner := self._owner()) is not None:
            return getattr(owner, self._method)(*self._first, *args)
        return None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (None, self._method, *self._first)


dynamo.skip(_Hook.__call__)
