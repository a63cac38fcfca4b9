"""A training step and collectives in several processes: scenarios of test_processes.py."""

from __future__ import annotations

import atexit
import random
import re
import time

import torch
import torch.nn.functional as F
from cluster_program import listening
from torch import nn

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.errors import XlaAmpError
from xla_amp.lazy.programs import execute
from xla_amp.testing import counts

STEPS = 24


def train(rank, world, overflow):
    """`overflow`: "none", "one" (on one process, at random steps), "unreduced" (the same, with its own gradients)."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
    data, chance = torch.Generator().manual_seed(1), random.Random(7)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 16, generator=data), torch.randint(4, (8,), generator=data)
        bad = chance.random() < 0.25 and overflow != "none"
        where = chance.randrange(world)
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        x, y = x[part].to(device), y[part].to(device)
        if bad and where == rank:
            x[0, 0] = float("inf")
        xla_amp.sync()
        with counts() as steady:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if overflow != "unreduced":
                xm.reduce_gradients(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses.append(xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / world))
            xla_amp.sync()
    return {
        "losses": torch.stack(losses).tolist(),
        "weights": [p.detach().cpu().numpy().tobytes().hex() for p in model.parameters()],
        "sum": sum(p.detach().double().sum().item() for p in model.parameters()),
        "scale": scaler.get_scale(),
        "skipped": int(scaler.skipped_steps()),
        "steady": [steady.executions, steady.compilations, steady.host_syncs],
        "ordinal": [xm.get_ordinal(), xm.xrt_world_size()],
        "met": [part.decode() for part in xm.rendezvous("end", str(rank).encode())],
        "listening": listening(),
        "most": xm.mesh_reduce("most", rank, max),
    }


GROUPS = [[0, 1], [2, 3]]
SENT = torch.float32, torch.bfloat16, torch.int64, torch.bool


def own(rank, dtype=torch.float32):
    """What a process brings to the collectives; [4, 2], small whole numbers that every dtype has."""
    return (torch.arange(8).reshape(4, 2) + rank * 3 - 4).to(dtype)


def collect(rank, world):
    """Every collective once, all of them in one program."""
    device = xla_amp.xla_device()
    x = own(rank).to(device)
    each = {
        f"all_reduce {kind}": xm.all_reduce(kind, own(rank, torch.int32).to(device), groups=groups)
        for kind in xm.REDUCE_TYPES
        for groups in ([None] if world == 2 else [GROUPS])
    }
    groups = None if world == 2 else GROUPS
    each |= {
        "all_gather": xm.all_gather(x),
        "all_gather 1 grouped": xm.all_gather(x, dim=1, groups=groups),
        "reduce_scatter": xm.reduce_scatter(xm.REDUCE_SUM, x, 0.5, 0, world),
        "reduce_scatter max grouped": xm.reduce_scatter(xm.REDUCE_MAX, x, 1.0, -1, 2, groups),
    }
    sent = [own(rank, dtype).to(device) for dtype in SENT]
    sent.append(torch.full((2,), -0.0 if rank == 1 else 1.0).to(device))  # -0.0 arrives with its sign
    xm.collective_broadcast(sent, root_ordinal=1)
    xla_amp.sync()
    with counts() as reading:
        result = {name: value.tolist() for name, value in each.items()}
        result["collective_broadcast"] = [str(value.cpu().tolist()) for value in sent]
    result["programs"] = reading.executions
    torch.manual_seed(rank)
    model = nn.BatchNorm1d(3).to(device)
    nn.init.normal_(model.weight)
    xm.broadcast_master_param(model)
    result["weight"] = model.weight.tolist()
    return result


def low(rank, world):
    """Gradients that are finite everywhere, and whose sum is not finite in float16."""
    device = xla_amp.xla_device()
    result = {}
    for dtype in (None, torch.bfloat16, torch.float16):
        weight = nn.Parameter(torch.zeros(2, device=device))
        optimizer = xla_amp.syncfree.SGD([weight], lr=1.0)
        scaler = xla_amp.GradScaler(device, init_scale=1.0)
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(80000.0 / world)
        weight.grad[1] = rank + 1.0
        xm.reduce_gradients(optimizer, dtype=dtype)
        scaler.step(optimizer)
        scaler.update()
        result[str(dtype)] = [int(scaler.skipped_steps()), weight.tolist(), str(weight.grad.dtype)]
    for dtype in (None, torch.bfloat16):  # finite in float16, as their mean is; their sum is not
        weight = nn.Parameter(torch.zeros(2, device=device, dtype=torch.float16))
        weight.grad = torch.full_like(weight, 40000.0)
        xm.reduce_gradients(torch.optim.SGD([weight]), dtype=dtype)
        xla_amp.sync()
        text = execute.programs()[-1].lower().as_text()
        reductions = re.findall(r"stablehlo\.all_reduce.*?\}\) : \(tensor<2x(\w+)>", text, re.DOTALL)
        result[f"half {dtype}"] = [weight.grad.tolist(), str(weight.grad.dtype), reductions]
    return result


def graph(rank, world):
    """What is said when a process goes another way, with another operation or in another policy."""
    device = xla_amp.xla_device()
    result = {}
    last = rank == world - 1
    weight, x = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    for name in ("operation", "policy", "results"):
        kept = []
        try:
            rule = "fp32" if last and name == "policy" else "low"
            with xla_amp.policy.override(matmul=rule), xla_amp.autocast(device):
                product = weight @ x
            if last and name == "operation":
                product = product.sin()
            if last and name == "results":
                kept.append(product * 2)
            elif name == "results":
                product * 2
            xm.all_reduce(xm.REDUCE_SUM, product)
            xla_amp.sync()
        except XlaAmpError as error:
            result[name] = f"{type(error).__name__}: {error}"
        weight, x = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    return result


FLAGGED = {
    "SGD": lambda p: xla_amp.syncfree.SGD(p, lr=0.5),
    "RMSprop": lambda p: xla_amp.syncfree.wrap(torch.optim.RMSprop(p, lr=0.5)),
}


def flag(rank, world):
    """A weight after steps with a flag, on the device or the CPU, that only one process sets."""
    device = xla_amp.xla_device()
    seen = {}
    for name, make in FLAGGED.items():
        for where in (device, "cpu"):
            weight = nn.Parameter(torch.ones(3).to(device))
            optimizer = make([weight])
            values = []
            for bad in (None, 1, None, 0):  # in which process the flag is set
                weight.grad = torch.ones(3).to(device)
                optimizer.step(found_inf=torch.tensor(float(bad == rank)).to(where))
                values.append(weight.detach()[0].clone())
                xla_amp.sync()
            seen[f"{name} {where}"] = [value.item() for value in values]
    return seen


def end(rank, world):
    """Process 1 raises an error while the other waits for it."""
    device = xla_amp.xla_device()
    if rank == 1:
        raise RuntimeError("this one has had enough")
    torch.ones(2, device=device).sum().item()
    xm.rendezvous("never")


def late(rank, world):
    """Process 1 ends after the other, in a child without its parent's exit handlers, as Python 3.13 forks it."""
    atexit._clear()
    device = xla_amp.xla_device()
    if rank == 1:
        atexit.register(time.sleep, 2)
    return xm.all_reduce("sum", torch.ones(2, device=device)).tolist()
