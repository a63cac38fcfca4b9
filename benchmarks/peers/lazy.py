"""The lazy device: "fp32", "bf16", "captured" (bf16, `xla_amp.compile`), "plain" (bf16, odd products as they are)."""

from __future__ import annotations

import torch
from peer import Trainer, jax_kernels, jax_peak, program_bytes
from workloads import Workload

import xla_amp
from xla_amp.lazy.base import private_api
from xla_amp.lazy.programs import execute
from xla_amp.lowering import forms


def make(workload: Workload, option: str) -> Trainer:
    """Autocast, the scaler, and an optimizer of `xla_amp.syncfree`."""
    if option == "plain":
        forms.refused["padded"] = "this peer has plain products"
    device = xla_amp.xla_device()
    model = workload.torch_model().to(device)
    batch = [tensor.to(device) for tensor in workload.torch_batch()]
    if workload.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-4)
    low = option != "fp32"
    scaler = xla_amp.GradScaler(device.type, enabled=low)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.bfloat16, enabled=low):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    run = xla_amp.compile(step) if option == "captured" else step

    def dispatch() -> torch.Tensor:
        loss = run()
        xla_amp.sync()
        return loss

    def counts() -> dict[str, int]:
        seen = xla_amp.metrics()
        # The sync that waits for a step belongs to the benchmark, not to the step.
        return {"executions": seen["executions"], "host_syncs": seen["host_syncs"] - waits}

    waits = 0

    def wait(_: torch.Tensor) -> None:
        nonlocal waits
        xla_amp.sync(wait=True)
        waits += 1

    def memory() -> int:
        with private_api.x64():
            return max(program_bytes(program.lower().compile()) for program in execute.programs())

    return Trainer(step=dispatch, wait=wait, counts=counts, memory=memory, peak=jax_peak, kernels=jax_kernels)
