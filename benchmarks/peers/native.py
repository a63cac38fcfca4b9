"""PyTorch itself: "fp32", "amp" (`torch.autocast`, bfloat16), or "compile" (the same under `torch.compile`)."""

from __future__ import annotations

import torch
from peer import Trainer
from workloads import Workload


def make(workload: Workload, option: str) -> Trainer:
    """On the GPU if there is one, otherwise on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = workload.torch_model().to(device)
    batch = [tensor.to(device) for tensor in workload.torch_batch()]
    if workload.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if option == "compile" else model

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=option != "fp32"):
            loss = run(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wait(loss: torch.Tensor) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    return Trainer(step=step, wait=wait, asynchronous=device.type == "cuda")
