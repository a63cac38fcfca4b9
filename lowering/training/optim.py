"""Fused optimizer steps: SGD, Adam, AdamW, Adagrad over lists of tensors.

The update of one tensor is a plain function (`sgd_step`, `adam_step`, `adagrad_step`); the ATen operations apply it to
each entry of their lists.  Options arrive as float64 data and are combined in float64 (a bias correction
``1 - beta**t`` loses half its digits in float32), then rounded once to the opmath dtype, in which the elementwise part
runs (`_per_count`).

A step has no branch.  Gradients are divided by `grad_scale`, and if `found_inf` is not zero every tensor keeps its
value, gradients included.  torch's CUDA kernels do the same by returning early; a momentum buffer that they leave
unwritten on a skipped first step is zero here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype, opmath, up
from xla_amp.lowering.registry import register

Arrays = Sequence[jax.Array]
Keep = Callable[[jax.Array, jax.Array], jax.Array]
"""``keep(old, new)``: the value that a state has after the step."""


def _new(old: jax.Array, new: jax.Array) -> jax.Array:
    return new


def _double(value: Any) -> jax.Array:
    """An option as float64, or as float32 if JAX's 64-bit types are disabled."""
    return as_dtype(value, jax.dtypes.canonicalize_dtype(jnp.float64))


def _is_zero(value: Any) -> bool:
    """Whether `value` is the Python number zero; False for data, whose value is not known."""
    return isinstance(value, (int, float)) and value == 0


def _decayed(grad: jax.Array, param: jax.Array, weight_decay: Any) -> jax.Array:
    """``grad + weight_decay * param``; without decay an infinite parameter does not reach the gradient."""
    if _is_zero(weight_decay):
        return grad
    factor = as_dtype(weight_decay, grad.dtype)
    return jnp.where(factor == 0, grad, grad + factor * param)


def sgd_step(
    param: jax.Array,
    grad: jax.Array,
    buffer: jax.Array | None,
    *,
    lr: Any,
    momentum: Any = 0.0,
    dampening: Any = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool | jax.Array = False,
    keep: Keep = _new,
) -> tuple[jax.Array, jax.Array | None]:
    """One SGD step of one tensor, as `torch.optim.SGD`.

    Args:
        param, grad, buffer: one shape; `buffer` is the momentum, or ``None`` for none.
        first: whether `buffer` is still unset; may be data, for a first step that may have been skipped.
        keep: chooses the new buffer; the parameter is updated from its result.

    Returns:
        The new parameter and buffer, in the opmath dtype of `param`.
    """
    dtype = opmath(param.dtype)
    param, grad = up(param), as_dtype(grad, dtype)
    grad = _decayed(-grad if maximize else grad, param, weight_decay)
    if buffer is not None:
        share = as_dtype(momentum, dtype)
        moved = grad
        if first is not True:
            moved = share * as_dtype(buffer, dtype) + as_dtype(1 - _double(dampening), dtype) * grad
            moved = moved if first is False else jnp.where(first, grad, moved)
        buffer = keep(as_dtype(buffer, dtype), moved)
        grad = grad + share * buffer if nesterov else buffer
    return param - as_dtype(lr, dtype) * grad, buffer


def _per_count(
    formula: Callable[[jax.Array], tuple[jax.Array, ...]], counts: Arrays, dtype: Any, platform: str
) -> list[tuple[jax.Array, ...]]:
    """`formula` of each step count (a float64 scalar), rounded to `dtype`.

    It is computed for all counts at once before the updates.  Otherwise XLA computes a float64 power for every element
    on a GPU, and expands its emulation for every tensor on a TPU.  XLA:CPU computes it once for a tensor, and compiles
    updates of one shape once, unless each reads a different entry of a vector.
    """

    def rounded(count: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(as_dtype(factor, dtype) for factor in formula(_double(count)))

    counts = [count.reshape(()) if count.ndim else count for count in counts]
    if platform == "cpu" or not counts:
        return list(map(jax.jit(rounded), counts))
    factors = lax.optimization_barrier(rounded(jnp.stack(counts)))
    return [tuple(factor[i] for factor in factors) for i in range(len(counts))]


def adam_corrections(
    counts: Arrays, dtype: Any, *, lr: Any, beta1: Any, beta2: Any, platform: str
) -> list[tuple[jax.Array, ...]]:
    """Per step count (from 1), in `dtype`: lr / (1 - beta1**t) and sqrt(1 - beta2**t)."""
    lr, beta1, beta2 = _double(lr), _double(beta1), _double(beta2)
    return _per_count(lambda count: (lr / (1 - beta1**count), jnp.sqrt(1 - beta2**count)), counts, dtype, platform)


def adam_step(
    param: jax.Array,
    grad: jax.Array,
    exp_avg: jax.Array,
    exp_avg_sq: jax.Array,
    max_exp_avg_sq: jax.Array | None,
    corrections: tuple[jax.Array, ...],
    *,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any = 0.0,
    eps: Any = 1e-8,
    maximize: bool = False,
    decoupled: bool = False,
    keep: Keep = _new,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """One Adam step of one tensor, as `torch.optim.Adam` (Kingma and Ba 2015; AMSGrad of Reddi et al. 2018).

    Args:
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq: one shape; the last is ``None`` without AMSGrad.
        corrections: those of this step, from `adam_corrections`.
        decoupled: weight decay acts on the parameter (AdamW, Loshchilov and Hutter 2019), not on the gradient.
        keep: chooses the new averages and maximum; the parameter is updated from its results.

    Returns:
        The new parameter, averages and maximum, in the opmath dtype of `param`.
    """
    dtype = opmath(param.dtype)
    lr, beta1, beta2 = _double(lr), _double(beta1), _double(beta2)
    step_size, correction = corrections
    param, grad = up(param), as_dtype(grad, dtype)
    exp_avg, exp_avg_sq = as_dtype(exp_avg, dtype), as_dtype(exp_avg_sq, dtype)
    grad = -grad if maximize else grad
    if not decoupled:
        grad = _decayed(grad, param, weight_decay)
    elif not _is_zero(weight_decay):
        param = lax.mul(param, as_dtype(1 - lr * _double(weight_decay), dtype))
    # `lax` instead of operators: they trace a function of `jax.numpy` for each shape.
    exp_avg = keep(exp_avg, lax.add(exp_avg, lax.mul(as_dtype(1 - beta1, dtype), lax.sub(grad, exp_avg))))
    square = lax.mul(lax.mul(as_dtype(1 - beta2, dtype), grad), grad)
    second = exp_avg_sq = keep(exp_avg_sq, lax.add(lax.mul(as_dtype(beta2, dtype), exp_avg_sq), square))
    if max_exp_avg_sq is not None:
        maximum = as_dtype(max_exp_avg_sq, dtype)
        second = max_exp_avg_sq = keep(maximum, lax.max(maximum, exp_avg_sq))
    root = lax.add(lax.div(lax.sqrt(second), correction), as_dtype(eps, dtype))
    param = lax.sub(param, lax.div(lax.mul(step_size, exp_avg), root))
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq


def adagrad_rates(
    counts: Arrays, dtype: Any, *, lr: Any, lr_decay: Any = 0.0, platform: str
) -> list[tuple[jax.Array, ...]]:
    """Per step count (from 1): a tuple of the decayed learning rate in `dtype`."""
    lr, lr_decay = _double(lr), _double(lr_decay)
    return _per_count(lambda count: (lr / (1 + (count - 1) * lr_decay),), counts, dtype, platform)


def adagrad_step(
    param: jax.Array,
    grad: jax.Array,
    state_sum: jax.Array,
    rate: jax.Array,
    *,
    weight_decay: Any = 0.0,
    eps: Any = 1e-10,
    maximize: bool = False,
    keep: Keep = _new,
) -> tuple[jax.Array, jax.Array]:
    """One Adagrad step of one tensor, as `torch.optim.Adagrad` (Duchi et al. 2011); `rate` from `adagrad_rates`.

    `keep` chooses the new sum; the parameter is updated from its result.

    Returns:
        The new parameter and sum of squares, in the opmath dtype of `param`.
    """
    dtype = opmath(param.dtype)
    param, grad = up(param), as_dtype(grad, dtype)
    grad = _decayed(-grad if maximize else grad, param, weight_decay)
    state_sum = as_dtype(state_sum, dtype)
    state_sum = keep(state_sum, state_sum + grad * grad)
    return param - rate * grad / (jnp.sqrt(state_sum) + as_dtype(eps, dtype)), state_sum


def _stepped(
    step: Callable[..., tuple[jax.Array | None, ...]],
    params: Arrays,
    grads: Arrays,
    states: Iterable[Arrays],
    factors: Sequence[tuple[Any, ...]],
    grad_scale: jax.Array | None,
    found_inf: jax.Array | None,
) -> list[jax.Array]:
    """`step` on each entry of the lists.

    Args:
        step: (param, grad, *states, *factors, keep=) -> the new parameter and states.
        states: one list of arrays per state; an empty list if the optimizer does not keep this state.
        factors: per parameter, a tuple of the values that depend on its step count.

    Returns:
        New parameters, gradients and states, list after list.
    """
    skip = None if found_inf is None else found_inf.reshape(()) != 0

    # The gradient is selected before it updates the states, and the states before they update the parameter.  If a
    # value were computed from another's unselected update, both would need the old value, and XLA:CPU, where a kernel
    # has one result, would keep a copy of each.
    def unless_skipped(old: jax.Array, new: jax.Array) -> jax.Array:
        return new if skip is None else lax.select(skip, as_dtype(old, new.dtype), new)

    @jax.jit  # traced once for all parameters of a shape
    def updated(param: jax.Array, grad: jax.Array, old: list[Any], factor: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = opmath(param.dtype)
        if grad_scale is not None:
            grad = unless_skipped(grad, lax.div(as_dtype(grad, dtype), as_dtype(grad_scale, dtype).reshape(())))
        new_param, *new = step(param, as_dtype(grad, dtype), *old, *factor, keep=unless_skipped)
        return unless_skipped(param, new_param), grad, *new  # type: ignore[arg-type]

    states = [list(state) for state in states]
    columns: list[list[jax.Array]] = [[], [], *([] for _ in states)]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        new = updated(param, grad, [state[i] if state else None for state in states], factors[i])
        for column, state in zip(columns, new, strict=True):
            if state is not None:
                column.append(state)
    return [array for column in columns for array in column]


_ADAM: dict[str, Any] = {
    "mutates": ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "lifted": ("lr", "beta1", "beta2", "weight_decay", "eps"),
}


@register(
    "_fused_sgd_",
    "_fused_sgd_.tensor_lr",
    mutates=("self", "grads", "momentum_buffer_list"),
    lifted=("weight_decay", "momentum", "lr", "dampening"),
)
def fused_sgd(
    params: Arrays,
    grads: Arrays,
    momentum_buffer_list: Arrays,
    *,
    is_first_step: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
    **options: Any,
) -> list[jax.Array]:
    """`options` are those of `sgd_step`."""
    step = functools.partial(sgd_step, first=is_first_step, **options)
    if is_first_step:  # the buffers are uninitialized
        momentum_buffer_list = [jnp.zeros_like(buffer) for buffer in momentum_buffer_list]
    return _stepped(step, params, grads, [momentum_buffer_list], [()] * len(params), grad_scale, found_inf)


@register("_fused_adam_", "_fused_adam_.tensor_lr", **_ADAM)
def fused_adam(
    params: Arrays,
    grads: Arrays,
    exp_avgs: Arrays,
    exp_avg_sqs: Arrays,
    max_exp_avg_sqs: Arrays,
    state_steps: Arrays,
    *,
    amsgrad: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
    platform: str,
    **options: Any,
) -> list[jax.Array]:
    """`options` are those of `adam_step`."""
    step = functools.partial(adam_step, **options)
    rates = {name: options[name] for name in ("lr", "beta1", "beta2")}
    dtype = opmath(params[0].dtype) if params else None
    corrections = adam_corrections(state_steps, dtype, **rates, platform=platform)
    states = [exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else []]
    new = _stepped(step, params, grads, states, [(each,) for each in corrections], grad_scale, found_inf)
    return new if amsgrad else [*new, *max_exp_avg_sqs]  # maxima that are passed but unused stay unchanged


@register("_fused_adamw_", "_fused_adamw_.tensor_lr", **_ADAM)
def fused_adamw(*lists: Arrays, platform: str, **options: Any) -> list[jax.Array]:
    return fused_adam(*lists, decoupled=True, platform=platform, **options)


@register(
    "_fused_adagrad_",
    "_fused_adagrad_.tensor_lr",
    mutates=("self", "grads", "state_sums"),
    lifted=("lr", "lr_decay", "weight_decay", "eps"),
)
def fused_adagrad(
    params: Arrays,
    grads: Arrays,
    state_sums: Arrays,
    state_steps: Arrays,
    *,
    lr: Any,
    lr_decay: Any,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
    platform: str,
    **options: Any,
) -> list[jax.Array]:
    """`options` are those of `adagrad_step`."""
    dtype = opmath(params[0].dtype) if params else None
    rates = adagrad_rates(state_steps, dtype, lr=lr, lr_decay=lr_decay, platform=platform)
    step = functools.partial(adagrad_step, **options)
    return _stepped(step, params, grads, [state_sums], rates, grad_scale, found_inf)
