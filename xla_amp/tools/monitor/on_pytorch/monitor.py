"""`monitor`: statistics of a training run, computed on the device inside the step's own program.

Hooks call the device's half (`recording`), which writes into tensors on the device.  At the end of each step the host's
half (`run`) starts to read them; they are on their way while the next steps run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from xla_amp.backends import base, devices, dynamo
from xla_amp.common.types import VALUE_KINDS, Dtype, ValueKind
from xla_amp.tools.monitor.history import StepRecord
from xla_amp.tools.monitor.on_pytorch import columns, kept_step
from xla_amp.tools.monitor.on_pytorch.recording import StatisticsRecording
from xla_amp.tools.monitor.on_pytorch.running_step import MonitoredStep
from xla_amp.tools.monitor.run import SAMPLE, BaseMonitor, Options


def monitor(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    history: int = 64,
    directory: str | Path | None = None,
    layers: str | Iterable[str] = "*",
    kinds: Iterable[ValueKind] = VALUE_KINDS,
    sample: int = SAMPLE,
    low: Dtype | None = None,
    save_state: bool = False,
    sinks: Iterable[Callable[[StepRecord], object]] = (),
    first_step: int = 0,
) -> Monitor:
    """Records statistics of `model`'s layers while it trains, and keeps the first bad step.

    On an XLA device everything is part of the step's executable, and nothing waits for the device.  Each iteration of
    the loop goes into ``with monitor.step(...)``, gradient accumulation as a whole.

    Args:
        model: in evaluation mode, or without gradients, nothing is recorded.
        optimizer: its step ends a step.  None: each forward pass in training mode is one, with its activations
            only.
        scaler: None records no loss scale and finds no skipped step.
        history: sampled steps that `Monitor.history` holds.
        directory: gets ``history.jsonl`` and the folder of the first bad step (`xla_amp.tools.monitor.bad_step`); None
            keeps no bad step.
        layers: patterns as in rules for modules, ``"*.attn"``; a module that one names and all modules in it.
        kinds: of ``"activation"``, ``"gradient"``, ``"weight"`` and ``"update"``.
        sample: statistics in each `sample`-th step; 1 for every step.  Loss, scale, skips and the norm of the gradients
            are recorded in each.  There are two programs then, one with statistics and one without.
        low: low dtype that underflow and headroom refer to; None is the dtype of the autocast region in which the model
            runs, or of its results.
        save_state: keep a copy of the state before each step until the step is known to be good: memory for a second
            model and optimizer, and the time to copy them in each step.
        sinks: functions that are called with each `StepRecord`, in order.
        first_step: number of the first step, of a run that goes on.

    Raises:
        ValueError: a number is out of its range, or a name of `kinds` or `low` is unknown.
        LayerError: a pattern matches no module.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> recorder = monitor(model, optimizer, sample=1)
        >>> with recorder.step() as step:
        ...     step.loss = model(torch.ones(1, 2)).sum()
        ...     step.loss.backward()
        ...     optimizer.step()
        >>> recorder.read().steps[0].statistics[Key("", "activation")].inf
        0.0
    """
    options = Options(
        history=history,
        directory=directory,
        layers=layers,
        kinds=kinds,
        sample=sample,
        low=low,
        save_state=save_state,
        sinks=sinks,
        first_step=first_step,
    )
    return Monitor(model, optimizer, scaler, options)


_numbers = itertools.count()
_TOGETHER: Final = 100
"""Steps that wait together on torch_xla, which cannot read without waiting."""


class Monitor(BaseMonitor):
    """Records a run; `monitor` makes it."""

    front = "pytorch"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        options: Options,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"monitor(optimizer={optimizer!r}): expected a torch.optim.Optimizer, or None")
        if optimizer is None:
            options = dataclasses.replace(options, kinds=set(options.kinds) & {"activation"})
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        super().__init__(options, functools.partial(kept_step.process, self._device))
        self.model, self.optimizer = model, optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._modules = columns.selected(model, options.layers)
        self._recording = StatisticsRecording(model, self._modules, optimizer, self.scaler, options, self._device)
        self._entry: MonitoredStep | None = None
        """The step whose block is open."""
        self._ended = 0
        """Steps that hooks have ended in it; a replay of a captured step runs no hooks."""
        self._flag = f"_xla_amp_sampled_{next(_numbers)}"
        """Attribute of the model, which the guards of captured steps compare: whether the step computes statistics."""
        self._handles = list(self._install())
        self._set_sampled()

    def __repr__(self) -> str:
        steps = self._next_step - self._options.first_step
        return f"<xla_amp.monitor of {type(self.model).__name__}: {steps} steps, {len(self._modules)} layers>"

    @contextlib.contextmanager
    def step(self, *batch: Any) -> Iterator[MonitoredStep]:
        """Context manager around one step: all its micro-batches, the backward passes and the optimizer.

        Args:
            batch: what the step computes on, kept if the step is bad: tensors, numbers and strings in lists, tuples and
                dicts.  `xla-amp monitor replay` calls the step with them.

        Set ``step.loss`` inside to record the loss; a bad loss is found only then.  Once this was used, forward passes
        outside of a block do not count.
        """
        if self._entry is not None:
            raise RuntimeError("monitor.step(): the step before has not ended; one `with` block holds one step")
        kept = None
        # Copies are a part of the step's program, which is the same in all processes; they learn of a bad step at
        # different times, so they go on with the copies.
        if self._looks_for_bad_step or (self._options.save_state and self._process()[1] > 1):
            state = (self.model, self.optimizer, self.scaler) if self._options.save_state else None
            kept = kept_step.Before(batch, self._device, state)
        entry = self._new_step(kept)
        self._entry, self._ended = entry, 0
        self._recording.counts = True
        scale = self._recording.loss_scale()
        try:
            yield entry
        except BaseException:
            self._recording.drop()
            raise
        finally:
            self._entry = None
            self._recording.counts = False
        if not self._ended and self.optimizer is not None and not devices.is_xla(self._device.type):
            if self.scaler is None:
                return  # no optimizer step: the block holds a part of a step
            self._recording.step_was_left_out(scale)
        self._end(entry)

    def close(self) -> None:
        """Reads what is left and removes all hooks."""
        try:
            self.read()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self.model.__dict__.pop(self._flag, None)

    def _install(self) -> Iterator[Any]:
        yield self.model.register_forward_pre_hook(_Hook(self, "_enter"))
        if "activation" in self._options.kinds:
            for path, module in self._modules.items():
                yield module.register_forward_hook(_Hook(self, "_layer", path))
        yield self.model.register_forward_hook(_Hook(self, "_leave"), always_call=True)
        if self.optimizer is not None:
            yield self.optimizer.register_step_pre_hook(_Hook(self, "_before_step"))
            yield self.optimizer.register_step_post_hook(_Hook(self, "_after_step"))
        if devices.is_xla(self._device.type) and base.processes().world_size() > 1:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    yield parameter.register_post_accumulate_grad_hook(_Hook(self, "_gradient"))

    def _enter(self, *_: Any) -> None:
        self._recording.enter()

    def _layer(self, path: str, module: Any, args: Any, output: Any) -> None:
        self._recording.layer(path, output)

    def _leave(self, *_: Any) -> None:
        if self._recording.leave():
            self._step_ended()

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._recording.gradient(parameter)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._recording.before_step((*args[1:], *kwargs.values()))

    def _after_step(self, *_: Any) -> None:
        self._recording.after_step()
        self._step_ended()

    def _step_ended(self) -> None:
        self._ended += 1
        if self._entry is None:
            self._end(self._new_step(None))

    def _new_step(self, kept: kept_step.Before | None) -> MonitoredStep:
        count = self._next_step - self._options.first_step
        return MonitoredStep(self._next_step, count, kept, self._recording.sampled)

    def _end(self, entry: MonitoredStep) -> None:
        entry.end(self._recording.recorded())
        self._waiting.append(entry)
        self._next_step += 1
        self._set_sampled()
        self._collect(wait=self._device.type == "xla" and len(self._waiting) >= _TOGETHER)

    def _set_sampled(self) -> None:
        sampled = self._is_sampled(self._next_step)
        if self.model.__dict__.get(self._flag) is not sampled:
            self._recording.sampled = self.model.__dict__[self._flag] = sampled

    def _write(self, folder: Path, waiting: MonitoredStep) -> Mapping[str, Any]:
        if waiting.kept is not None:
            waiting.kept.write(folder)
        return {}

    def _versions(self) -> dict[str, str]:
        return kept_step.versions()

    def _is_local(self, waiting: MonitoredStep, record: StepRecord) -> bool:
        activations = (row for key, row in record.statistics.items() if key.kind == "activation")
        return waiting.local or not all(row.finite for row in activations)


class _Hook:
    """A method of a monitor that modules and optimizers call; weak, so that a monitor without other references ends.

    The hook of a copied or unpickled module does nothing: the copy is another model.
    """

    def __init__(self, monitor: Monitor | None, method: str, *first: Any) -> None:
        self._monitor = (lambda: None) if monitor is None else weakref.ref(monitor)
        self._method, self._first = method, first

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and (monitor := self._monitor()) is not None:
            return getattr(monitor, self._method)(*self._first, *args)
        return None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (None, self._method, *self._first)


dynamo.skip(_Hook.__call__)
