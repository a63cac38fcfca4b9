"""What a script for torch.distributed finds in a process group of the backend "xla_amp": scenarios.

Collectives, DistributedDataParallel with its buffers, `xla_model.reduce_gradients`, and what is refused.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.errors import RecompileWarning
from xla_amp.testing import counts as counted

DEVICE = "jax"
STEPS = 7
OVERFLOW = 4
MODES = ("plain", "accumulated", "captured", "accumulated in a group of gloo")
"""Of training with buffers."""


def own(rank, dtype=torch.float32):
    """What a process brings to the collectives, [4]."""
    return (torch.arange(4) + 3 * rank - 2).to(dtype)


def collectives(rank, world):
    found, device = {"backend": dist.get_backend()}, DEVICE
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        x = own(rank).to(device)
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        found[f"all_reduce {name}"] = x.tolist()
    x = own(rank).to(device)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    assert work.is_completed()
    found["async"] = x.tolist()
    x = own(rank).to(device)
    dist.broadcast(x, 1)
    found["broadcast"] = x.tolist()
    parts, whole = [torch.empty(4, device=device) for _ in range(world)], torch.empty(4 * world, device=device)
    dist.all_gather(parts, own(rank).to(device))
    found["all_gather"] = [part.tolist() for part in parts]
    group = dist.group.WORLD
    group._allgather_base(whole, own(rank).to(device)).wait()
    found["all_gather_into_tensor"] = whole.tolist()
    part = torch.empty(2, device=device)
    dist.reduce_scatter(part, list(own(rank).to(device).chunk(2)))
    found["reduce_scatter"] = part.tolist()
    group._reduce_scatter_base(part, own(rank).to(device)).wait()
    found["reduce_scatter_tensor"] = part.tolist()
    received = [torch.empty(2, device=device) for _ in range(world)]
    dist.all_to_all(received, list(own(rank).to(device).chunk(2)))
    found["all_to_all"] = [each.tolist() for each in received]
    exchanged = torch.empty(4, device=device)
    dist.all_to_all_single(exchanged, own(rank).to(device))
    found["all_to_all_single"] = exchanged.tolist()
    on_host = own(rank)
    dist.all_reduce(on_host)
    found["of the CPU"] = on_host.tolist()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, 1: (2.5, torch.arange(2))})
    found["objects"] = [[each["rank"], each[1][0], each[1][1].tolist()] for each in objects]
    sent = [{"seed": 3}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent)
    found["broadcast objects"] = sent
    dist.barrier(device_ids=[0])
    from torch.distributed import _functional_collectives as functional

    found["functional"] = functional.all_reduce(own(rank).to(device), "sum", group).tolist()
    pair = dist.new_group([rank])  # a group of one, which every process has
    x = own(rank).to(device)
    dist.all_reduce(x, group=pair)
    found["alone"] = x.tolist()
    return found


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(rank, world):
    """torch's class in float16, with an overflow on the last rank; rank 0 alone reads, in every step."""
    device = DEVICE
    torch.manual_seed(rank)
    model = DistributedDataParallel(layers().to(device), device_ids=[int(os.environ["LOCAL_RANK"])])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
    data, counts = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        x = torch.randn(8 * world, 8, generator=data)[rank::world]
        if step == OVERFLOW and rank == world - 1:
            x[0] = float("inf")
        with counted() as spent:
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = model(x.to(device)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if rank == 0:
                print(step, loss.item(), [float(p.detach().sum()) for p in model.parameters()][:1])
        counts.append([spent.executions, spent.compilations, spent.host_syncs])
    state = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return {
        "counts": counts,
        "scale": scaler.get_scale(),
        "names": list(state),
        "weights": [value.numpy().tobytes().hex() for value in state.values()],
    }


class Partly(nn.Module):
    """A table with sparse gradients, and a layer that is used in the last step only."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.other = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens, both):
        x = self.table(tokens)
        return self.layer(x) + self.other(x) if both else self.layer(x)


def unused(rank, world):
    """`xm.reduce_gradients`: parameters without gradients, sparse gradients, accumulation."""
    torch.manual_seed(rank)
    device = DEVICE
    model = Partly().to(device)
    xm.broadcast_master_param(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    xla_amp.sync()
    for step in range(3):
        optimizer.zero_grad()
        with counted() as spent:
            for part in range(2):
                model(tokens_of(step, rank, part).to(device), step == 2).square().sum().backward()
            xm.reduce_gradients(optimizer)
            optimizer.step()
        found.append([spent.executions, model.other.weight.grad is None])
    return {"steps": found, "weights": [p.tolist() for p in model.parameters()]}


def tokens_of(step, rank, part):
    return (torch.arange(3) + step + 2 * rank + part) % 10


def refusals(rank, world):
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.tensor import distribute_tensor

    device = DEVICE
    layer, model = nn.Linear(4, 4).to(device), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    calls = {
        "fully_shard": lambda: fully_shard(layer),
        "FSDP": lambda: FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
        "FSDP of the CPU": lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=device),
        "distribute_tensor": lambda: distribute_tensor(layer.weight, dist.init_device_mesh("jax", (world,))),
        "find_unused_parameters": lambda: DistributedDataParallel(layer, find_unused_parameters=True),
        "device_ids": lambda: DistributedDataParallel(layer, device_ids=[5]),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    with_pickle = dist.new_group(backend="gloo")
    saved = {"weight": torch.full((2,), 3.0, device=device)}
    folder = Path("distcp")
    checkpoint.save(saved, checkpoint_id=folder, process_group=with_pickle)
    loaded = {"weight": torch.zeros(2, device=device)}
    checkpoint.load(loaded, checkpoint_id=folder, process_group=with_pickle)
    found["loaded"] = loaded["weight"].tolist()
    return found


class Buffers(nn.Module):
    """Batch normalization, a count, and a buffer of 16 bits."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.register_buffer("largest", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor([True, False]))

    def forward(self, x):
        if self.training:
            self.largest.copy_(x[:3, 0])
        return self.layers(x)


def rows(step, rank, part):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + part))


def trained(device, rank, mode):
    """The state after some steps on rows of this process, what rank 0 alone reads of an evaluation, and the costs."""
    torch.manual_seed(rank)  # rank 0's weights and buffers count
    options = {"process_group": dist.new_group(backend="gloo")} if "gloo" in mode else {}
    model = DistributedDataParallel(Buffers().to(device), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        if "accumulated" in mode:
            with model.no_sync():
                model(y).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()

    captured = xla_amp.compile if mode == "captured" and device == DEVICE else lambda function: function
    run, counts = captured(step), []
    for index in range(4):
        batch = [rows(index, rank, part).to(device) for part in (0, 1)]
        with counted() as spent:
            run(*batch)
            xla_amp.sync()
        counts.append([spent.executions, spent.compilations, spent.host_syncs])
    model.eval()
    evaluate = captured(model)
    with torch.no_grad():
        evaluated = [evaluate(rows(STEPS, part, 0).to(device)).sum() for part in range(3)][-1]
    read = [evaluated.item()] if rank == 0 else []
    xla_amp.sync()
    return {name: value.cpu().double().tolist() for name, value in model.module.state_dict().items()}, read, counts


def buffers(rank, world):
    """On the device and on the CPU, by mode."""
    warnings.simplefilter("ignore", RecompileWarning)  # of torch's buckets, in the second step
    return {mode: [trained(device, rank, mode) for device in (DEVICE, "cpu")] for mode in MODES}
