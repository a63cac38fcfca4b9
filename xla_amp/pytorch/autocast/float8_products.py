"""The cast ``fp8`` for one operation of torch on the lazy device (`xla_amp.policy.float8`).

The product is the operator ``xla_amp::float8_mm``, which only the lazy device has.  The gradient with regard to the
data reads the gradient of the result in ``float8_e5m2``; that of the weight is a product of 16-bit operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from xla_amp.backends import base, devices
from xla_amp.policy import Decision, float8

_DEVICE: Final = base.LAZY
_OPERANDS: Final[Mapping[str, tuple[int, int]]] = {"addmm": (1, 2), "linear": (0, 1), "matmul": (0, 1), "mm": (0, 1)}
"""Operation -> positions of the factors."""
_VALUES: Final = "float8_e4m3fn"


class Told(NamedTuple):
    """A call, and what a report says of it."""

    call: Callable[..., Any]
    in_8_bits: tuple[int, ...]
    """Positions of the operands that it reads in 8 bits."""
    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def shown(self, decision: Decision, used: tuple[str, ...]) -> tuple[Decision, tuple[str, ...]]:
        """The decision and the dtypes of the operands as a report shows them."""
        if not self.in_8_bits:
            return decision._replace(cast="low"), used
        return decision, tuple(_VALUES if i in self.in_8_bits else dtype for i, dtype in enumerate(used))


class _Factors(NamedTuple):
    data: torch.Tensor
    weight: torch.Tensor
    """A matrix, summed over its first dimension, or its last if it is the first factor."""
    weight_first: bool


def make(
    name: str,
    low: Callable[..., tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]],
    device: str,
    asked: bool,
) -> Callable[[Sequence[Any], Mapping[str, Any]], tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]]:
    """The prepare function (`xla_amp.pytorch.autocast.casting`) of the cast.

    Args:
        name: of the operation.
        low: the prepare function of the cast ``low``, which runs first.
        device: device type of the region.
        asked: whether a rule of the user's gives the cast.

    Raises:
        PolicyError: the device has no products of 8-bit floats.
    """
    if device != _DEVICE:
        raise float8.refused(
            f"on torch's device {device!r}",
            "move the model to xla_amp.xla_device(), use torchao.float8 there, or give the operation 'low'",
        )

    def prepare(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        call, cast, named = low(arguments, keywords)
        given = torch.get_autocast_dtype(device)
        if given is not torch.bfloat16:
            raise float8.refused(f"where the low dtype is {given}", "pass dtype=torch.bfloat16 to autocast")
        engine = devices.engine()
        place = float8.Device(engine.platform(), engine.device_kind(), engine.compute_capability())
        if why := float8.unavailable(place):
            return Told(call, (), why), cast, named
        factors, why = _factors(name, arguments, cast, named)
        if factors is None:
            return Told(call, (), f"{float8.LEFT_OUT}: {why}"), cast, named
        depth, columns = factors.weight.shape[::-1] if factors.weight_first else factors.weight.shape
        rows = math.prod(factors.data.shape) // max(1, depth)
        target = float8.target_of(place.kind)
        if why := float8.left_out(rows, depth, columns, asked=asked, target=target):
            return Told(call, (), why), cast, named
        told = float8.explained(rows, depth, columns, target)
        return Told(_call(name, factors), _OPERANDS[name], told), cast, named

    return prepare


def _factors(
    name: str, given: Sequence[Any], cast: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[_Factors | None, str]:
    """The factors after the cast, or why the product cannot be in 8 bits."""
    positions = _OPERANDS[name]
    if len(given) <= positions[1] or keywords:
        return None, "it has arguments by keyword"
    left, right = (cast[index] for index in positions)
    if not (_is_ready(left) and _is_ready(right)):
        return None, "an operand is no floating tensor of the device"
    if _is_transformed(left, right):
        return None, "a transform of torch.func, torch.compile or a tensor subclass sees it"
    weights = [_is_weight(given[index]) for index in positions]
    if name == "linear":
        return (_Factors(left, right.t(), False), "") if right.dim() == 2 else (None, "its weight is no matrix")
    if weights[1] and right.dim() == 2 and left.dim() >= 2:
        return _Factors(left, right, False), ""
    if weights[0] and left.dim() == 2 and right.dim() == 2:
        return _Factors(right, left, True), ""
    return None, "neither operand is a matrix of parameters"


def _is_ready(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 and value.device.type == _DEVICE


def _is_transformed(*tensors: torch.Tensor) -> bool:
    """Whether something else than autograd sees this call; our operator has a gradient only."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or any(torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
        or torch._C._len_torch_dispatch_stack() > 0
        or any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    )


def _is_weight(tensor: Any) -> bool:
    base: Any = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def _call(name: str, factors: _Factors) -> Callable[..., torch.Tensor]:
    def run(*arguments: Any) -> torch.Tensor:
        added = arguments[0] if name == "addmm" else arguments[2] if len(arguments) > 2 else None
        result = _product(factors)
        return result if added is None else torch.add(result, added)

    return run


def _product(factors: _Factors) -> torch.Tensor:
    data, weight, weight_first = factors
    flat = data if weight_first or data.dim() == 2 else data.reshape(-1, data.shape[-1])
    rows: torch.Tensor = _Product.apply(flat, weight, weight_first)  # type: ignore[no-untyped-call]
    if flat is data:
        return rows
    return rows.view(*data.shape[:-1], weight.shape[1])


class _Product(torch.autograd.Function):
    """``data @ weight`` of two bfloat16 matrices, or ``weight @ data``."""

    @staticmethod
    def forward(ctx: Any, data: Any, weight: Any, weight_first: bool) -> Any:
        ctx.save_for_backward(data, weight)
        ctx.weight_first = weight_first
        left, right = (weight, data) if weight_first else (data, weight)
        return _operator()(left, right, "e4m3", "e4m3")

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        data, weight = ctx.saved_tensors
        of_data, of_weight, *_ = ctx.needs_input_grad
        results: list[Any] = [None, None, None]
        if of_data:
            left, right = (weight.t(), gradient) if ctx.weight_first else (gradient, weight.t())
            formats = ("e4m3", "e5m2") if ctx.weight_first else ("e5m2", "e4m3")
            # With create_graph=True the gradient is differentiated itself.
            again = torch.is_grad_enabled()
            results[0] = torch.mm(left, right) if again else _operator()(left, right, *formats)
        if of_weight:
            results[1] = torch.mm(gradient, data.t()) if ctx.weight_first else torch.mm(data.t(), gradient)
        return tuple(results)


@functools.cache
def _operator() -> Any:
    library = torch.library.Library("xla_amp", "FRAGMENT")
    library.define(f"{_NAME}(Tensor left, Tensor right, str left_format, str right_format) -> Tensor")
    library.impl(_NAME, lambda left, right, *_: left.new_empty((left.shape[0], right.shape[1])), "Meta")
    _libraries.append(library)
    return getattr(torch.ops.xla_amp, _NAME).default


_NAME: Final = "float8_mm"
_libraries: Final[list[Any]] = []
"""torch forgets the operators of a library that is freed."""
