"""`monitor`: numbers of a training run in PyTorch, computed on the device inside the step's own program.

Hooks write into two tensors on the device, so a step costs no executable and no wait, also in a captured step, whose
replays run no Python.  At the end of each step the host starts to read what they have written.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from xla_amp.common import arguments
from xla_amp.engines import base, devices
from xla_amp.errors import StepError
from xla_amp.tools.monitor.history import HostMonitor, StepRecord
from xla_amp.torch_common import dynamo, module_paths
from xla_amp.torch_common.trees import tree_leaves
from xla_amp.training import skip_step

_NUMBERS: Final = ("count", "skipped", "loss_scale", "gradient_norm")
"""What `Monitor._status` begins with; ``count`` is the number of the step, from 1."""
_TOGETHER: Final = 100
"""Steps that wait together on torch_xla, which cannot read without waiting."""


class RunningStep:
    """One step while it runs; ``with monitor.step(...) as step`` gives it."""

    def __init__(self, number: int) -> None:
        self.loss: torch.Tensor | float | None = None
        """Set it to the step's loss, () or with one element; it is read later, without waiting."""
        self._number = number

    def end(self, monitor: Monitor) -> None:
        """Starts to read the loss and what the device has recorded."""
        self._monitor, self._reads = monitor, [devices.read_later(monitor._status)]
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
        if status[0] != self._number + 1:
            raise StepError(
                f"monitor: {self._number + 1} `with monitor.step(...)` blocks have ended, and the device counts "
                f"{status[0]:.0f} optimizer steps: put one optimizer step, with all its micro-batches, into one block"
            )
        for loss in losses:
            self._loss = loss[0] if isinstance(loss, list) else loss
        return self._monitor._record(status, self._number, self._loss)


class Monitor(HostMonitor):
    """Records loss, loss scale, skips, gradients and the range of `model`'s layers while it trains: `monitor`.

    On an XLA device everything is part of the step's executable, and nothing waits for the device.  Each iteration of
    the loop goes into ``with monitor.step(...)``, gradient accumulation as a whole.

    Args:
        model: in evaluation mode, or without gradients, nothing is recorded.
        optimizer: its step ends a step.
        scaler: None records no loss scale.
        sinks: functions that are called with each `StepRecord`, in order.

    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer.

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

    find = "xla_amp.find_overflow(step, batch)"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        *,
        sinks: Iterable[Callable[[StepRecord], object]] = (),
    ) -> None:
        super().__init__(sinks)
        arguments.require("monitor(model)", model, torch.nn.Module, "a torch.nn.Module")
        arguments.require("monitor(model, optimizer)", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        self._model, self._optimizer = model, optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._layers = [path for path, _ in model.named_modules()]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = {names.get(id(p), f"parameter {n} of the optimizer"): p for n, p in enumerate(parameters)}
        self._counts = False
        """Whether a step runs; outside of steps nothing is recorded."""
        self._ended = 0
        """Optimizer steps that hooks have seen; a replay of a captured step runs no hooks."""
        self._returned: dict[str, None] = {}
        """Layers in the order in which they have returned."""
        self._pass: dict[str, torch.Tensor] = {}
        """Layer -> largest magnitude in the forward passes that run."""
        self._gradients: tuple[torch.Tensor, torch.Tensor] | None = None
        """Of a step that runs: their norm, and for each parameter whether that of its gradient is not finite."""
        sizes = len(_NUMBERS) + len(parameters) + len(self._layers), len(self._layers)
        # Made outside of the step, so that the first step is the program of the next ones.
        self._status, self._largest = base.zeros_like([torch.empty(s, device="meta") for s in sizes], self._device)
        self._flag = f"_xla_amp_monitor_{id(self)}"
        """Attribute of the model, which the guards of captured steps compare: whether the step is recorded."""
        self._handles = [
            *(module.register_forward_hook(_Hook(self, "_layer", path)) for path, module in model.named_modules()),
            model.register_forward_hook(_Hook(self, "_fold"), always_call=True),
            optimizer.register_step_pre_hook(_Hook(self, "_before_step")),
            optimizer.register_step_post_hook(_Hook(self, "_after_step")),
        ]

    @contextlib.contextmanager
    def step(self) -> Iterator[RunningStep]:
        """Context manager around one step: all its micro-batches, the backward passes and the optimizer.

        Set ``step.loss`` inside to record the loss.  Outside of blocks nothing is recorded.
        """
        if self._counts:
            raise RuntimeError("monitor.step(): the step before has not ended; one `with` block holds one step")
        entry = RunningStep(self._next_step)
        self._counts = self._model.__dict__[self._flag] = True
        self._ended, self._open_steps, self._gradients, scale = 0, 0, None, self._loss_scale()
        try:
            with skip_step.left_out.subscribed(self._left_out):
                yield entry
        except BaseException:
            self._pass = {}
            self._largest.zero_()
            raise
        finally:
            self._counts = self._model.__dict__[self._flag] = False
        if not self._ended and not devices.is_xla(self._device.type):
            if self._scaler is None:
                return  # no optimizer step: the block holds a part of a step
            self._end(torch.ones(()), scale)  # torch's scaler saw what is not finite, and has changed its scale
        self._next_step += 1
        entry.end(self)
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

    def _layer(self, path: str, module: Any, inputs: Any, output: object) -> None:
        """The layer at `path` has returned `output`."""
        if not (self._counts and self._model.training and torch.is_grad_enabled()) or module_paths.in_backward():
            return  # in a backward pass checkpointing computes again what was seen in the forward pass
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.is_floating_point()]
        tensors = [each for each in tensors if each.layout is torch.strided and each.numel()]
        for each in tensors:
            with torch.no_grad():
                found = self._number(each.detach().abs().max())
                self._pass[path] = torch.maximum(self._pass[path], found) if path in self._pass else found
            self._returned[path] = None

    @torch.no_grad()
    def _fold(self, *_: Any) -> None:
        """Adds the forward passes since the last call to the step's numbers."""
        found, self._pass = self._pass, {}
        if found:
            new = torch.stack([found.get(path, self._number(0.0)) for path in self._layers])
            self._largest.copy_(torch.maximum(self._largest, new))

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The optimizer's step begins, with these arguments."""
        if self._counts:
            self._open_steps += 1  # a class may call the step of its base class, which has these hooks, too
            if self._open_steps == 1 and not any(map(callable, (*args[1:], *kwargs.values()))):
                self._gradients = self._take_gradients()  # with a closure they are there after the step

    def _after_step(self, *_: Any) -> None:
        """The optimizer's step has ended."""
        if self._counts:
            self._open_steps -= 1
            if not self._open_steps:
                self._end(self._found_inf())

    def _left_out(self, optimizer: Any, found_inf: torch.Tensor) -> None:
        """The host has read that gradients are not finite, so the optimizer is not called."""
        if optimizer is self._optimizer:
            self._end(found_inf)

    def _loss_scale(self) -> torch.Tensor | None:
        """float32 (): a copy of the scale as a step begins; None where the scaler does not leave steps out."""
        if self._scaler is None or devices.is_xla(self._device.type):
            return None
        scale = self._scaler._scale  # None until the first loss is scaled
        return torch.tensor(self._scaler.get_scale()) if scale is None else scale.detach().clone()

    @torch.no_grad()
    def _take_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        norms = []
        for parameter in self._parameters.values():
            gradient = torch.zeros((1,), device=parameter.device) if parameter.grad is None else parameter.grad.detach()
            values = torch.ops.aten._values(gradient) if gradient.is_sparse else gradient
            values = values.abs() if values.is_complex() else values  # torch has no real dtype for their norm
            norms.append(self._number(torch.linalg.vector_norm(values, dtype=torch.float32)))
        together = torch.stack(norms)
        scaled = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale by themselves
        norm = torch.linalg.vector_norm(together)
        return (norm if scaled is None else norm / self._number(scaled)), (~together.isfinite()).float()

    @torch.no_grad()
    def _end(self, skipped: torch.Tensor | None, scale: torch.Tensor | None = None) -> None:
        """The step has ended; `scale` is what it used, None is the scaler's."""
        self._ended += 1
        self._fold()
        norm, bad = self._gradients or self._take_gradients()
        self._gradients = None  # a captured step keeps tensors in its state only
        if scale is None and self._scaler is not None:
            scale = self._scaler._scale
        numbers = torch.stack([self._status[0] + 1, self._number(skipped), self._number(scale), norm])
        self._status.copy_(torch.cat([numbers, bad, self._largest]))
        self._largest.zero_()
        if devices.is_xla(self._device.type):
            devices.engine().spare(self._status, self._largest)

    def _found_inf(self) -> Any:
        state = {} if self._scaler is None else self._scaler._per_optimizer_states.get(id(self._optimizer), {})
        found = list(state.get("found_inf_per_device", {}).values())
        return sum(found[1:], found[0]) if found else getattr(self._optimizer, "found_inf", None)

    def _number(self, value: torch.Tensor | float | None) -> torch.Tensor:
        """float32 () on the model's first device."""
        if isinstance(value, torch.Tensor):
            return value.reshape(()).to(self._device, torch.float32)
        return torch.zeros((), device=self._device)

    def _record(self, status: Sequence[float], step: int, loss: float | None) -> StepRecord:
        """The record of a step whose `status` has arrived."""
        layers = len(status) - len(self._layers)
        given = *_NUMBERS, *(f"nonfinite/{name}" for name in self._parameters)
        numbers = dict(zip(given, status[:layers], strict=True))
        if self._scaler is None:
            del numbers["loss_scale"]
        largest = dict(zip(self._layers, status[layers:], strict=True))
        return StepRecord.of(step, numbers | {f"largest/{path}": largest[path] for path in self._returned}, loss)


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
