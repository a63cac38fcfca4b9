"""torchax: PyTorch operations on JAX arrays, the step under `jax.jit`: "fp32", or "amp" with torchax's autocast."""

from __future__ import annotations

from typing import Any

import jax
import torch
from peer import Trainer, jax_kernels, jax_peak
from workloads import Workload


def make(workload: Workload, option: str) -> Trainer:
    """The weights, statistics and optimizer state are donated, as in its examples."""
    import torchax
    from flax_models import optimizer_of
    from torchax import interop
    from torchax.train import make_train_step

    env = torchax.default_env()
    model = workload.torch_model()
    module = interop.JittableModule(model)
    with env:
        weights = {name: value.to("jax") for name, value in module.params.items()}
        buffers = {name: value.to("jax") for name, value in module.buffers.items()}
        x, y = (tensor.to("jax") for tensor in workload.torch_batch())
    optimizer = optimizer_of(workload)
    state = interop.call_jax(optimizer.init, weights)

    def forward(weights: Any, buffers: Any, batch: Any) -> Any:
        if option != "amp":
            return module.functional_call("forward", weights, buffers, *batch)
        with torchax.amp.autocast("jax", torch.bfloat16, env):
            return module.functional_call("forward", weights, buffers, *batch)

    step_ = interop.jax_jit(
        make_train_step(forward, lambda loss, _: loss, optimizer), kwargs_for_jax_jit={"donate_argnums": (0, 2)}
    )
    holder = [weights, state]

    def step() -> Any:
        loss, holder[0], holder[1] = step_(holder[0], buffers, holder[1], (x, y), y)
        return loss

    return Trainer(
        step=step,
        wait=lambda loss: jax.block_until_ready(interop.jax_view((loss, holder))),
        peak=jax_peak,
        kernels=jax_kernels,
    )
