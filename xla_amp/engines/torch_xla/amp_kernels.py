"""Loss scaling and fused optimizer steps for torch_xla, composed of torch operations that torch_xla lowers.

torch_xla 2.9 has kernels for the first two: they refuse bfloat16 gradients, freeze the growth parameters at their first
compilation and let the scale grow to infinity.  It has no kernels for the fused steps, which would run on the CPU.  The
kernels here are registered for autograd's dispatch key, before functionalization, where in-place operations are still
in place.

Formulas and rounding are those of `xla_amp.lowering.training`, whose modules name their sources: low-precision tensors
are computed in float32 and rounded once.  torch_xla treats Python numbers as data, except 0 and 1, which become
constants of the program.  It merges equal numbers of a step into one input, and recompiles when they later differ.
Learning rates, which schedules change, are therefore uploaded explicitly, once for each call.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_amp.common import loss_scaling

KEY = "AutogradXLA"

Tensors = Sequence[Tensor]
Number = float | Tensor


def _wide(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype of elementwise arithmetic: float32 for bfloat16 and float16, otherwise its own."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _data(value: float, like: Tensor) -> Number:
    """`value`, uploaded if torch_xla would make it a constant of the program."""
    return _as_input(value, like) if value in (0, 1) else value


def _as_input(value: Number, like: Tensor) -> Tensor:
    """A number as a separate input: 0-d on the device of `like`, in its dtype."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype).reshape(())
    # One dimension: torch_xla treats an uploaded 0-d tensor as a Python number.
    return torch.tensor([value], dtype=like.dtype).to(like.device).reshape(())


def _write(tensor: Tensor, value: Tensor) -> None:
    """``tensor.copy_(value)``."""
    make_own(tensor)
    tensor.copy_(value)


def make_own(tensor: Tensor) -> None:
    """Give a tensor whose elements share memory (the gradient of a sum) separate memory for each element.

    An in-place write of torch_xla 2.9 to an expanded tensor gives the sum of the old and the new value.
    """
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
        tensor.data = tensor.clone()


# ---- loss scaling ----------------------------------------------------------------------------------------------------


def non_finite_check_and_unscale(grads: Tensors, found_inf: Tensor, inv_scale: Tensor) -> None:
    """`_amp_foreach_non_finite_check_and_unscale_`: gradients times `inv_scale`.

    `found_inf` becomes 1 if one of them is not finite, otherwise it is unchanged.
    """
    if not grads:
        return
    bad = torch.stack([(~torch.isfinite(grad)).any() for grad in grads]).any()
    found_inf.copy_(torch.where(bad, torch.ones_like(found_inf), found_inf))
    for grad in grads:
        wide = _wide(grad)
        _write(grad, wide * inv_scale.to(wide.dtype).reshape(()))


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """`_amp_update_scale_`: the next scale and growth tracker, in place."""
    new_scale, new_tracker = loss_scaling.update(
        scale,
        growth_tracker,
        found_inf.reshape(()),
        scale_growth_factor,
        scale_backoff_factor,
        _data(growth_interval, growth_tracker),
        where=torch.where,
        multiply=_multiply,
    )
    growth_tracker.copy_(new_tracker)
    scale.copy_(new_scale)
    return scale


def _multiply(scale: Tensor, factor: float) -> Tensor:
    """The product formed in float64 and rounded once, as torch does."""
    wide = scale.double()
    return (wide * _data(factor, wide)).to(scale.dtype)


# ---- optimizer steps -------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """The step of one parameter."""

    parameter: Tensor
    wide: Tensor
    """Its value in the dtype of arithmetic."""
    gradient: Tensor
    """What it steps with: unscaled, negated where `maximize` says it, with weight decay."""
    rate: Tensor
    put: Callable[[Tensor, Tensor], None]
    """Writes a value to a tensor unless the step is skipped."""


def _steps(
    params: Tensors,
    grads: Tensors,
    *,
    lr: Number,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Iterator[_Step]:
    """The steps of a call's parameters, which have one dtype; gradients are unscaled, as torch's kernels do."""
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    put = functools.partial(_put, skip)
    rate = _as_input(lr, _wide(params[0])) if params else torch.empty(())
    for param, grad in zip(params, grads, strict=True):
        wide, gradient = _wide(param), _wide(grad)
        if grad_scale is not None:
            gradient = gradient / grad_scale.to(gradient.dtype).reshape(())
            put(grad, gradient)
        if maximize:
            gradient = -gradient
        yield _Step(param, wide, gradient + wide * weight_decay if weight_decay else gradient, rate, put)


def fused_sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    momentum: float,
    dampening: float,
    nesterov: bool,
    is_first_step: bool,
    **options: Any,
) -> None:
    """`_fused_sgd_`: `torch.optim.SGD`'s step of each parameter."""
    for index, (param, wide, step, rate, put) in enumerate(_steps(params, grads, **options)):
        if buffers:
            buffer = step
            if not is_first_step:
                buffer = _wide(buffers[index]) * momentum + (step * (1 - dampening) if dampening else step)
            step = step + buffer * momentum if nesterov else buffer
            put(buffers[index], buffer)
        put(param, wide - step * rate)


def fused_adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    decoupled: bool = False,
    **options: Any,
) -> None:
    """`_fused_adam_`: `torch.optim.Adam`'s step of each parameter.

    Weight decay acts on the gradient, or (`decoupled`, `_fused_adamw_`) on the parameter.
    """
    decay = 0.0 if decoupled else weight_decay
    for index, (param, wide, step, rate, put) in enumerate(_steps(params, grads, weight_decay=decay, **options)):
        exp_avg, exp_avg_sq = _wide(exp_avgs[index]), _wide(exp_avg_sqs[index])
        exp_avg = exp_avg + (step - exp_avg) * (1 - beta1)
        exp_avg_sq = exp_avg_sq * beta2 + step * step * (1 - beta2)
        put(exp_avgs[index], exp_avg)
        put(exp_avg_sqs[index], exp_avg_sq)
        second = exp_avg_sq
        if amsgrad:
            second = torch.maximum(_wide(max_exp_avg_sqs[index]), exp_avg_sq)
            put(max_exp_avg_sqs[index], second)
        count = state_steps[index].to(wide.dtype).reshape(())
        denominator = second.sqrt() / _bias_correction(beta2, count).sqrt() + eps
        update = exp_avg * (rate / _bias_correction(beta1, count)) / denominator
        decayed = wide - wide * (rate * weight_decay) if weight_decay and decoupled else wide
        put(param, decayed - update)


def fused_adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr_decay: float,
    eps: float,
    **options: Any,
) -> None:
    """`_fused_adagrad_`: `torch.optim.Adagrad`'s step of each parameter."""
    for index, (param, wide, step, rate, put) in enumerate(_steps(params, grads, **options)):
        squares = _wide(state_sums[index]) + step * step
        put(state_sums[index], squares)
        count = state_steps[index].to(wide.dtype).reshape(())
        decayed = rate / (1 + (count - 1) * lr_decay) if lr_decay else rate
        put(param, wide - decayed * step / (squares.sqrt() + eps))


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """``1 - beta**count``; the difference would lose half of float32's digits, ``expm1`` loses none."""
    if beta == 0:
        return torch.ones_like(count)
    return -torch.expm1(count * math.log(beta))


def _put(skip: Tensor | None, tensor: Tensor, value: Tensor) -> None:
    value = value.to(tensor.dtype)
    _write(tensor, value if skip is None else torch.where(skip, tensor, value))


# ---- on the dispatcher -----------------------------------------------------------------------------------------------

_ADAMW = functools.partial(fused_adam, decoupled=True)
KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_amp_foreach_non_finite_check_and_unscale_": non_finite_check_and_unscale,
        "_amp_update_scale_": update_scale,
        **dict.fromkeys(("_fused_adagrad_", "_fused_adagrad_.tensor_lr"), fused_adagrad),
        **dict.fromkeys(("_fused_adam_", "_fused_adam_.tensor_lr"), fused_adam),
        **dict.fromkeys(("_fused_adamw_", "_fused_adamw_.tensor_lr"), _ADAMW),
        **dict.fromkeys(("_fused_sgd_", "_fused_sgd_.tensor_lr"), fused_sgd),
    }
)
"""ATen operation -> its kernel on XLA tensors."""


@functools.cache
def install() -> torch.library.Library:
    """Registers `KERNELS` with the dispatcher, as long as the result is kept; a second call does nothing."""
    library = torch.library.Library("aten", "IMPL", KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an autograd kernel is replaced
        for name, kernel in KERNELS.items():
            library.impl(name, torch.no_grad()(kernel), allow_override=True)
    return library
