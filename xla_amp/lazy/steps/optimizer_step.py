"""A step of torch.optim on the lazy device: it counts there, and its learning rates are inputs of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from xla_amp.lazy.graph.trace import Instruction, instruction_cache, record, spec, trace
from xla_amp.lazy.tensors import tensor_io
from xla_amp.torch_common import dynamo
from xla_amp.training import capturable

OPTIONS = "_optimizer_options"
"""The instruction whose floats are options of optimizers."""


def replaced(original: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """A function for the step of `kind`, a class of torch.optim, which was `original`."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return _run(original, kind, self, closure) if is_on_device(self) else original(self, closure)

    return step


def is_on_device(optimizer: Optimizer) -> bool:
    """Whether the first parameter of an optimizer is on the device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return bool(parameter.device.type == tensor_io.DEVICE_TYPE)
    return False


@dynamo.graph_break
def _run(original: Callable[..., Any], kind: type, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    update = capturable.step_of(optimizer, kind) or original
    with capturable.counting(optimizer, kind), _rates(optimizer):
        update(optimizer)
    return loss


@contextlib.contextmanager
def _rates(optimizer: Optimizer) -> Iterator[None]:
    """Gives a step the learning rates that are numbers on the host as inputs of its program."""
    rates: list[tuple[dict[str, Any], Any]] = [
        (group, rate) for group in optimizer.param_groups if is_number(rate := group.get("lr"))
    ]
    others = [float(rate) for group, rate in rates if not group.get("fused")]  # whose kernels take numbers as inputs
    inputs = iter(_inputs(others))
    try:
        for group, rate in rates:
            group["lr"] = float(rate) if group.get("fused") else next(inputs)
        with _Factors() if others else contextlib.nullcontext():
            yield
    finally:
        for group, rate in rates:
            group["lr"] = rate


def is_number(rate: Any) -> bool:
    """Whether a learning rate is a number, or a tensor of one, on the host."""
    if isinstance(rate, torch.Tensor):
        return rate.device.type == "cpu" and rate.numel() == 1 and not rate.requires_grad
    return isinstance(rate, int | float)


def _inputs(numbers: list[float]) -> list[torch.Tensor]:
    """Scalars on the device, in float64 as Python's numbers, whose values do not shape the program."""
    if not numbers:
        return []
    count, scalar = len(numbers), spec((), torch.float64)
    with trace.lock:
        instruction = _instructions.get(count)
        if instruction is None:
            instruction = Instruction(OPTIONS, lambda _, __, floats, *___: floats, (scalar,) * count, 0, floats=count)
            _instructions[count] = instruction
        trace.floats.extend(numbers)
        first = record(instruction)
        return [tensor_io.new_tensor(scalar, first + at) for at in range(count)]


_instructions = instruction_cache()


class _Factors(TorchFunctionMode):
    """Multiplies by `alpha` and `value`, factors of the second argument, where they are tensors; torch reads those."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = next((name for name in ("alpha", "value") if isinstance(kwargs.get(name), torch.Tensor)), None)
        if name is None:
            return func(*args, **kwargs)
        target, second, *others = args
        factor = kwargs[name]
        if func is torch._foreach_add_:
            return torch._foreach_addcmul_(target, second, [factor] * len(target))
        if func is torch.Tensor.add_ and not second.is_sparse:
            return target.addcmul_(second, factor)  # not rounded in between
        scaled = torch._foreach_mul(second, factor) if isinstance(second, list) else second * factor
        return func(target, scaled, *others, **{key: each for key, each in kwargs.items() if key != name})
