"""PyTorch/XLA: "fp32", or "amp" with its autocast, torch's GradScaler and its sync-free optimizers."""

from __future__ import annotations

from typing import Any

import torch
from peer import Trainer
from workloads import Workload


def make(workload: Workload, option: str) -> Trainer:
    """On the device that PJRT_DEVICE names."""
    import torch_xla
    import torch_xla.debug.metrics as met
    from torch_xla.amp import syncfree

    device = torch_xla.device()
    model = workload.torch_model().to(device)
    batch = [tensor.to(device) for tensor in workload.torch_batch()]
    if workload.optimizer == "sgd":
        optimizer: Any = syncfree.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = syncfree.AdamW(model.parameters(), lr=1e-4)
    low = option == "amp"
    scaler = torch.amp.GradScaler("xla", enabled=low)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        # torch_xla.amp.autocast does not support its CPU device; on a TPU it enters this.
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=low):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync()
        return loss.detach()

    def counts() -> dict[str, int]:
        def samples(name: str) -> int:
            data = met.metric_data(name)
            return data[0] if data else 0

        return {"executions": samples("ExecuteTime"), "host_syncs": samples("TransferFromDeviceTime")}

    return Trainer(step=step, wait=lambda _: torch_xla.sync(wait=True), counts=counts)
