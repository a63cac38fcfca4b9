"""PyTorch itself: "fp32", "amp" (`torch.autocast`, bfloat16), or "compile" (the same under `torch.compile`)."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from peer import Trainer
from workloads import Workload


def _kernels(run: Callable[[], None]) -> Iterable[tuple[str, float]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
    for each in profiler.key_averages():
        if each.device_time_total:
            yield from [(each.key, 1e-6 * each.device_time_total / each.count)] * each.count


def make(workload: Workload, option: str) -> Trainer:
    """On the GPU if there is one, images there in channels_last; otherwise on the CPU."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model = workload.torch_model().to(device)
    batch = [tensor.to(device) for tensor in workload.torch_batch()]
    if cuda and batch[0].dim() == 4:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch[0] = batch[0].to(memory_format=torch.channels_last)
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
        if cuda:
            torch.cuda.synchronize()

    def memory() -> int:
        """What is there before the step, and the most that the profiler sees it add."""
        kept = [*model.parameters(), *model.buffers(), *batch]
        kept += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        kept += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        activity = torch.profiler.ProfilerActivity.CPU
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with torch.profiler.profile(activities=[activity], profile_memory=True) as profiler:
                wait(step())
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
        return sum(tensor.nbytes for tensor in kept) + max(itertools.accumulate(size for _, size in changes))

    return Trainer(
        step=step,
        wait=wait,
        asynchronous=cuda,
        memory=None if cuda else memory,
        peak=torch.cuda.max_memory_allocated if cuda else None,
        kernels=_kernels if cuda else None,
    )
