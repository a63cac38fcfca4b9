"""Two processes: buffers and a communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xla_amp
from xla_amp import policy
from xla_amp.errors import RecompileWarning

DEVICE = "jax"
STEPS = 4
MODES = ("plain", "accumulated", "captured", "accumulated in a group of gloo")


class Buffers(nn.Module):
    """Batch normalization, a count, and a buffer of 16 bits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("largest", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor([True, False]))

    def forward(self, x):
        if self.training:
            self.largest.copy_(x[:3, 0])
        return self.layers(x)


def rows(step, rank, part):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + part))


def trained(kind, device, rank, mode, counts=None):
    """The state after some steps on rows of this process, and what rank 0 alone reads of an evaluation."""
    torch.manual_seed(rank)  # rank 0's weights and buffers count
    options = {"process_group": dist.new_group(backend="gloo")} if "gloo" in mode else {}
    model = kind(Buffers().to(device), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        if "accumulated" in mode:
            with model.no_sync():
                model(y).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()

    run = xla_amp.compile(step) if mode == "captured" and counts is not None else step
    for index in range(STEPS):
        batch = [rows(index, rank, part).to(device) for part in (0, 1)]
        before = xla_amp.metrics()
        run(*batch)
        xla_amp.sync()
        after = xla_amp.metrics()
        if counts is not None:
            counts.append({name: after[name] - before[name] for name in ("executions", "compilations", "host_syncs")})
    model.eval()
    evaluate = xla_amp.compile(model) if mode == "captured" and counts is not None else model
    with torch.no_grad():
        evaluated = [evaluate(rows(STEPS, part, 0).to(device)).sum() for part in range(3)][-1]
    read = [evaluated.item()] if rank == 0 else []
    xla_amp.sync()
    return {name: value.cpu().double().tolist() for name, value in model.module.state_dict().items()}, read


def both_trained(device, rank, mode):
    """On the device and on the CPU."""
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompileWarning)  # of torch's buckets, in the second step
        got = trained(DistributedDataParallel, device, rank, mode, counts)
    expected = trained(DistributedDataParallel, torch.device("cpu"), rank, mode)
    return {"got": got, "expected": expected, "counts": counts}


def summed_by_a_hook(device, rank):
    """The mean of the gradients of a weight of float16 that a communication hook adds in float32, and executables."""

    def hook(state, bucket):
        wide = bucket.buffer().float()
        dist.all_reduce(wide)
        done = torch.futures.Future()
        done.set_result(bucket.buffer().copy_(wide / dist.get_world_size()))
        return done

    with policy.override(reduce_gradients="keep"):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False).half().to(device))
    model.register_comm_hook(None, hook)
    optimizer, counts = torch.optim.SGD(model.parameters(), 0.0), []
    for _ in range(STEPS):
        before = xla_amp.metrics()["executions"]
        optimizer.zero_grad()
        model(torch.tensor([[60000.0]]).half().to(device)).backward()
        optimizer.step()
        xla_amp.sync()
        counts.append(xla_amp.metrics()["executions"] - before)
    return {"gradient": model.module.weight.grad.item(), "counts": counts}


def buffers(rank, world):
    """By mode."""
    return {mode: both_trained(DEVICE, rank, mode) for mode in MODES}


def hook(rank, world):
    """See `summed_by_a_hook`."""
    return summed_by_a_hook(DEVICE, rank)
