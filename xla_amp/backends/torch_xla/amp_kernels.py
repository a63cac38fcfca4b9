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

import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

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


def fused_sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: Number,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """`_fused_sgd_`: `torch.optim.SGD`'s step of each parameter."""
    if not params:
        return
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    rate = _as_input(lr, _wide(params[0]))  # a call's parameters have one dtype
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        unscaled = _unscaled(grad, grad_scale, skip)
        wide = _wide(param)
        step = -unscaled if maximize else unscaled
        if weight_decay:
            step = step + wide * weight_decay
        if buffers:
            buffer = step
            if not is_first_step:
                buffer = _wide(buffers[index]) * momentum + (step * (1 - dampening) if dampening else step)
            step = step + buffer * momentum if nesterov else buffer
            _put(buffers[index], buffer, skip)
        _put(param, wide - step * rate, skip)


def fused_adam(*lists: Tensors, **options: Any) -> None:
    """`_fused_adam_`: `torch.optim.Adam`'s step of each parameter, weight decay acting on the gradient."""
    _adam(*lists, **options, decoupled=False)


def fused_adamw(*lists: Tensors, **options: Any) -> None:
    """`_fused_adamw_`: `torch.optim.AdamW`'s step of each parameter, weight decay acting on the parameter."""
    _adam(*lists, **options, decoupled=True)


def _adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    if not params:
        return
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    rate = _as_input(lr, _wide(params[0]))  # a call's parameters have one dtype
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        unscaled = _unscaled(grad, grad_scale, skip)
        wide = _wide(param)
        step = -unscaled if maximize else unscaled
        if weight_decay and not decoupled:
            step = step + wide * weight_decay
        exp_avg, exp_avg_sq = _wide(exp_avgs[index]), _wide(exp_avg_sqs[index])
        exp_avg = exp_avg + (step - exp_avg) * (1 - beta1)
        exp_avg_sq = exp_avg_sq * beta2 + step * step * (1 - beta2)
        _put(exp_avgs[index], exp_avg, skip)
        _put(exp_avg_sqs[index], exp_avg_sq, skip)
        second = exp_avg_sq
        if amsgrad:
            second = torch.maximum(_wide(max_exp_avg_sqs[index]), exp_avg_sq)
            _put(max_exp_avg_sqs[index], second, skip)
        count = state_steps[index].to(wide.dtype).reshape(())
        denominator = second.sqrt() / _bias_correction(beta2, count).sqrt() + eps
        update = exp_avg * (rate / _bias_correction(beta1, count)) / denominator
        decayed = wide - wide * (rate * weight_decay) if weight_decay and decoupled else wide
        _put(param, decayed - update, skip)


def fused_adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Number,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """`_fused_adagrad_`: `torch.optim.Adagrad`'s step of each parameter."""
    if not params:
        return
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    rate = _as_input(lr, _wide(params[0]))  # a call's parameters have one dtype
    for param, grad, state_sum, count in zip(params, grads, state_sums, state_steps, strict=True):
        unscaled = _unscaled(grad, grad_scale, skip)
        wide = _wide(param)
        step = -unscaled if maximize else unscaled
        if weight_decay:
            step = step + wide * weight_decay
        squares = _wide(state_sum) + step * step
        _put(state_sum, squares, skip)
        decayed = rate / (1 + (count.to(wide.dtype).reshape(()) - 1) * lr_decay) if lr_decay else rate
        _put(param, wide - decayed * step / (squares.sqrt() + eps), skip)


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """``1 - beta**count``; the difference would lose half of float32's digits, ``expm1`` loses none."""
    if beta == 0:
        return torch.ones_like(count)
    return -torch.expm1(count * math.log(beta))


def _unscaled(grad: Tensor, grad_scale: Tensor | None, skip: Tensor | None) -> Tensor:
    """The gradient divided by the scale; also written back, as in torch's fused kernels."""
    wide = _wide(grad)
    if grad_scale is None:
        return wide
    unscaled = wide / grad_scale.to(wide.dtype).reshape(())
    _put(grad, unscaled, skip)
    return unscaled


def _put(tensor: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Write `value` to `tensor` unless the step is skipped."""
    value = value.to(tensor.dtype)
    _write(tensor, value if skip is None else torch.where(skip, tensor, value))


# ---- on the dispatcher -----------------------------------------------------------------------------------------------

KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_amp_foreach_non_finite_check_and_unscale_": non_finite_check_and_unscale,
        "_amp_update_scale_": update_scale,
        "_fused_adagrad_": fused_adagrad,
        "_fused_adagrad_.tensor_lr": fused_adagrad,
        "_fused_adam_": fused_adam,
        "_fused_adam_.tensor_lr": fused_adam,
        "_fused_adamw_": fused_adamw,
        "_fused_adamw_.tensor_lr": fused_adamw,
        "_fused_sgd_": fused_sgd,
        "_fused_sgd_.tensor_lr": fused_sgd,
    }
)
"""ATen operation -> its kernel on XLA tensors."""

_lock = threading.Lock()
_library: torch.library.Library | None = None


def install() -> None:
    """Register `KERNELS` with the dispatcher, until `uninstall`; a second call does nothing."""
    global _library
    with _lock:
        if _library is not None:
            return
        _library = torch.library.Library("aten", "IMPL", KEY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that an autograd kernel is replaced
            for name, kernel in KERNELS.items():
                _library.impl(name, torch.no_grad()(kernel), allow_override=True)


def uninstall() -> None:
    """Restore torch_xla's kernels."""
    global _library
    with _lock:
        if _library is not None:
            _library._destroy()
            _library = None
