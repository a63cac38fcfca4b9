"""Flax and optax, jitted: "fp32", "bf16" (Flax's `dtype`), "jmp", "mpx", or "autocast" (`xla_amp.jax`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax_models import initial, loss_of, optimizer_of, step_of
from peer import Trainer, jax_kernels, jax_peak, program_bytes
from workloads import Workload

import xla_amp.jax  # before the first `jit`: inside of a traced function it compiles everything twice

Update = Callable[..., tuple[Any, Any, Any, Any]]


def _with(workload: Workload, gradients: Callable[..., Any]) -> tuple[Any, Any]:
    """A step whose value, statistics and gradients come from ``gradients(loss, params, rest, x, y)``."""
    model, optimizer = workload.flax_model(), optimizer_of(workload)
    start = initial(workload, model)
    loss = loss_of(model, list(start[1]))

    def step(params: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        (value, rest), grads = gradients(loss, params, rest, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    return jax.jit(step, donate_argnums=(0, 1, 2)), start


def _jmp(loss: Any, params: Any, rest: Any, x: Any, y: Any) -> Any:
    import jmp

    policy = jmp.get_policy("p=f32,c=bf16,o=f32")

    def low(params: Any) -> Any:
        value, new = loss(policy.cast_to_compute(params), rest, policy.cast_to_compute(x), y)
        return policy.cast_to_output(value), policy.cast_to_param(new)

    return jax.value_and_grad(low, has_aux=True)(params)


def _mpx(loss: Any, params: Any, rest: Any, x: Any, y: Any) -> Any:
    import mpx

    mpx.set_half_precision_datatype(jnp.bfloat16)
    scaling = mpx.DynamicLossScaling(jnp.float32(1.0), jnp.float32(1.0))
    found = mpx.filter_value_and_grad(loss, scaling, has_aux=True)(params, rest, x, y)
    (value, new), grads = found[0], found[-1]
    return (value, mpx.cast_to_float32(new)), grads


def _autocast(loss: Any, params: Any, rest: Any, x: Any, y: Any) -> Any:
    return jax.value_and_grad(xla_amp.jax.autocast(loss), has_aux=True)(params, rest, x, y)


_GRADIENTS: dict[str, Callable[..., Any]] = {"jmp": _jmp, "mpx": _mpx, "autocast": _autocast}


def make(workload: Workload, option: str) -> Trainer:
    """State is donated."""
    if option in _GRADIENTS:
        run, start = _with(workload, _GRADIENTS[option])
    else:
        run, start = step_of(workload, jnp.float32 if option == "fp32" else jnp.bfloat16)
    holder = list(start)
    batch = [jnp.asarray(x) for x in workload.flax_batch()]

    def step() -> Any:
        *holder[:], loss = run(*holder, *batch)
        return loss

    return Trainer(
        step=step,
        wait=lambda loss: jax.block_until_ready((loss, holder)),
        memory=lambda: program_bytes(run.lower(*holder, *batch).compile()),
        peak=jax_peak,
        kernels=jax_kernels,
    )
