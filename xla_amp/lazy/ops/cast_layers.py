"""Layers under autocast as one operation of autograd: the casts of their operands are part of it.

torch records a cast of each operand as an operation, so a linear layer is four nodes of autograd forward and backward,
and as many calls through the dispatcher.  Here one node casts the operands, computes, and casts their gradients.  It
records what the separate operations would, and saves what they would save: the cast input and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.ops import composites, memory
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.torch_common import dynamo

aten = torch.ops.aten
_kernels: dict[str, Callable[..., Any]] = {}
"""ATen name -> the kernel that is installed."""

_Run = Callable[..., tuple[torch.Tensor | None, ...]]
_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_cast = memory.KERNELS["_to_copy"]


_is_batch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor has several gradients: ``torch.autograd.grad(..., is_grads_batched=True)``."""


class _Cast(torch.autograd.Function):
    """A parameter for autograd, and its cast, which was made before, as the value: for derivatives of gradients."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context.dtype = parameter.dtype
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(context.dtype), None


def _layer(name: str, derivative: Any, gradients: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """A function of (low dtype, x, weight, bias, *rest) that returns the layer's result, or NotImplemented.

    Args:
        name: of the operation that computes it.
        derivative: torch's operator that computes its gradients.
        gradients: calls that operator, or the kernel of it, with what this function has.
    """
    backward_name = derivative.overloadpacket.__name__

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, dtype: torch.dtype, x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
            low_x, low = _cast_to(dtype, x), _cast_to(dtype, weight)
            context.set_materialize_grads(False)
            context.save_for_backward(low_x, low)
            context.given = x.dtype, weight, None if bias is None else bias.dtype, rest
            result = _kernels[name](low_x, low, _cast_to(dtype, bias), *rest)
            # The cast is a result, too: derivatives of gradients reach `x` through it, and `x` is not kept.
            return result if low_x is x else (result, low_x)

        @staticmethod
        @dynamo.skip
        def backward(context: Any, gradient: Any, of_low_x: Any = None) -> tuple[torch.Tensor | None, ...]:
            of_input, weight, of_bias, rest = context.given
            of_x, of_weight, bias = of_low_x, None, None
            run, cast = derivative, torch.Tensor.to
            if gradient is not None:
                x, low = context.saved_tensors
                if torch.is_grad_enabled() or composites.is_transformed(gradient) or _is_batch(gradient):
                    low = _Cast.apply(weight, low) if low is not weight else low  # type: ignore[no-untyped-call]
                else:
                    run, cast = _kernels[backward_name], _cast
                of_x, of_weight, bias = gradients(run, gradient, x, low, rest, context.needs_input_grad[1:4])
                of_x = of_x if of_low_x is None else of_x + of_low_x
            if bias is not None and bias.dtype is not of_bias:
                bias = cast(bias, dtype=of_bias)
            if of_weight is not None and of_weight.dtype is not weight.dtype:
                of_weight = cast(of_weight, dtype=weight.dtype)
            if of_x is not None and of_x.dtype is not of_input:
                of_x = cast(of_x, dtype=of_input)
            return None, of_x, of_weight, bias, *(None for _ in rest)

    Layer.__name__ = Layer.__qualname__ = name.capitalize()
    apply: Any = super(torch.autograd.Function, Layer).apply  # no transform is active, so torch's own checks are idle

    def layer(low: torch.dtype, x: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any) -> Any:
        if not _fits(x, weight, bias):
            return NotImplemented
        wanted = torch.is_grad_enabled()
        if not (wanted and x.requires_grad):
            x = _cast_to(low, x)
            wanted = wanted and (weight.requires_grad or (bias is not None and bias.requires_grad))
        if not wanted:
            return _kernels[name](x, _cast_to(low, weight), _cast_to(low, bias), *rest)
        result = apply(low, x, weight, bias, *rest)
        return result[0] if type(result) is tuple else result

    return layer


def _cast_to(dtype: torch.dtype, operand: Any) -> Any:
    return operand if operand is None or operand.dtype is dtype else _cast(operand, dtype=dtype)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether these are plain tensors of the device, the parameters leaves: the node keeps them until it has run."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if composites.is_transformed(*tensors) or trace.eager or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    for tensor in tensors:
        if tensor.dtype not in _FLOATING or tensor.device.type != DEVICE_TYPE or not (tensor is x or tensor.is_leaf):
            return False
    return True


# -- the layers -------------------------------------------------------------------------------------------------------


def _of_linear(
    run: _Run, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rest: Any, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    return run(x, gradient, weight, wanted)


_linear = _layer("linear", aten.linear_backward.default, _of_linear)


def _linear_layer(low: torch.dtype, x: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if weight.dim() != 2 or (bias is not None and bias.dim() > 1):
        return NotImplemented  # see `composites`
    return _linear(low, x, weight, bias)


def _of_convolution(
    run: _Run, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rest: Any, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    return run(gradient, x, weight, [weight.shape[0]], *rest, wanted)


_convolution = _layer("convolution", aten.convolution_backward.default, _of_convolution)


def _convolution_layer(dimensions: int) -> Callable[..., Any]:
    ones, zeros = [1] * dimensions, [0] * dimensions

    def convolution(
        low: torch.dtype,
        x: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Sequence[int] = ones,
        padding: Sequence[int] = zeros,
        dilation: Sequence[int] = ones,
        groups: int = 1,
    ) -> Any:
        batched = x.dim() == weight.dim() == dimensions + 2
        if not batched or not len(stride) == len(padding) == len(dilation) == dimensions:
            return NotImplemented
        return _convolution(low, x, weight, bias, stride, padding, dilation, False, zeros, groups)

    return convolution


LAYERS: dict[str, Callable[..., Any]] = {
    "linear": _linear_layer,
    "conv1d": _convolution_layer(1),
    "conv2d": _convolution_layer(2),
    "conv3d": _convolution_layer(3),
}
"""Operation as policies name it -> a function of the low dtype and the operands, or NotImplemented."""


def installed(name: str, kernel: Callable[..., Any]) -> None:
    """Tells which kernel an operation has from now on, for layers that record it."""
    _kernels[name] = kernel


def cast_layer(operation: str) -> Callable[..., Any] | None:
    """The function of an operation, as `xla_amp.engines.base.Engine` describes it."""
    return LAYERS.get(operation)
