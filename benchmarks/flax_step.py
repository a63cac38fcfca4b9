"""A training step of a workload in Flax and optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from workloads import Workload


def optimizer_of(workload: Workload) -> optax.GradientTransformation:
    """The optimizer of the PyTorch side, in optax."""
    return optax.sgd(1e-3, momentum=0.9) if workload.optimizer == "sgd" else optax.adamw(1e-4, weight_decay=1e-2)


def initial(workload: Workload, model: Any, abstract: bool = False) -> tuple[Any, Any, Any]:
    """Parameters, other collections (batch statistics) and optimizer state; only their shapes with `abstract`."""

    def make() -> tuple[Any, Any, Any]:
        variables = model.init(jax.random.key(0), *(jnp.asarray(x[:1]) for x in workload.flax_batch()))
        rest = {name: part for name, part in variables.items() if name != "params"}
        return variables["params"], rest, optimizer_of(workload).init(variables["params"])

    return jax.eval_shape(make) if abstract else jax.jit(make)()


def loss_of(model: Any, names: list[str]) -> Callable[..., Any]:
    """``loss(params, rest, x, y)`` to the loss and the new other collections."""

    def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
        return model.apply({"params": params, **rest}, x, y, mutable=names)

    return loss


def step_of(workload: Workload, dtype: Any, abstract: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Jitted ``step(params, rest, state, x, y) -> (params, rest, state, loss)``, and its initial state."""
    model, optimizer = workload.flax_model(dtype), optimizer_of(workload)
    start = initial(workload, model, abstract)
    loss = loss_of(model, list(start[1]))

    def step(params: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    return jax.jit(step, donate_argnums=(0, 1, 2)), start
