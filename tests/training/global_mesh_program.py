"""Trains a small GPT-2 of transformers over the devices of several processes, in layouts by name.

In a step one row of one process's part overflows in float16.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, logging

import xla_amp
from xla_amp.errors import XlaAmpError
from xla_amp.lazy.programs import execute
from xla_amp.lazy.tensors import tensor_io
from xla_amp.testing import counts

ROWS, TOKENS, WORDS = 8, 16, 65
"""Of a batch; the vocabulary divides by no number of devices."""
OVERFLOWS = (2, 5)
"""Steps in which the last row, which only the last process has, overflows."""
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def gpt2(words: int = WORDS) -> Any:
    """A GPT-2 of transformers with dropout and a plan."""
    logging.set_verbosity_error()
    config = GPT2Config(
        n_layer=1, n_embd=64, n_head=4, vocab_size=words, n_positions=TOKENS, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).train()
    model.tp_plan = {
        "transformer.wte": "embedding_rowwise",
        **{f"transformer.h.*.{name}": "colwise" for name in ("attn.c_attn", "mlp.c_fc")},
        **{f"transformer.h.*.{name}": "rowwise" for name in ("attn.c_proj", "mlp.c_proj")},
    }
    return model


def made(device: torch.device, mesh: Any, recipe: str, seed: int) -> tuple[dict[str, Any], Any]:
    """What is trained, and the layout of its batches."""
    torch.manual_seed(seed)
    model = gpt2()
    layout = xla_amp.shard(model, mesh, recipe) if mesh else None
    optimizer = xla_amp.syncfree.AdamW(model.to(device).parameters(), lr=1e-3)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10)
    return {"model": model, "optimizer": optimizer, "scaler": scaler}, layout


def train(
    device: torch.device,
    mesh: Any,
    layout: Any,
    state: dict[str, Any],
    steps: Iterable[int],
    rank: int,
    transform: Callable[[Any], Any] = lambda step: step,
) -> dict[str, Any]:
    """Losses of some steps, and what the last one cost."""
    model, optimizer, scaler = state.values()

    @transform
    def step(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            logits = model(tokens).logits
        each = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
        loss = (each * weights).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    torch.manual_seed(5)
    losses = []
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
        weights = torch.ones(ROWS)
        if number in OVERFLOWS:
            weights[-1] = 1e30  # its gradients do not fit into float16
        if layout is None:
            tokens, weights = tokens.to(device), weights.to(device)
        else:
            mine = rows_of(mesh, rank)
            tokens = xla_amp.global_batch(tokens[mine], mesh, layout.batch)
            weights = xla_amp.global_batch(weights[mine], mesh, layout.batch[:1])
        xla_amp.sync()
        with counts() as seen:
            losses.append(step(tokens, weights))
            xla_amp.sync()
    return {
        "steady": [seen.executions, seen.compilations, seen.host_syncs],
        "collectives": collections.Counter(COLLECTIVE.findall(execute.programs()[-1].optimized_hlo())),
        "losses": torch.stack(losses).tolist(),
        "replays": getattr(step, "replays", 0),
    }


def held(state: dict[str, Any]) -> dict[str, Any]:
    """What a process holds after some steps."""
    model, optimizer, scaler = state.values()
    parameters = list(model.parameters())
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    xla_amp.sync()
    return {
        "scale": scaler.get_scale(),
        "skipped": int(scaler.skipped_steps()),
        "shares": [share(parameters), share(moments)],
        "parts": [parts_of(tensor) for tensor in (*parameters, *moments)],
        "norm": math.sqrt(sum(float(value.double().square().sum()) for value in whole(model))),
    }


def rows_of(mesh: Any, rank: int) -> slice:
    """The rows of a batch that the devices of a process have: all without an axis "data"."""
    if "data" not in mesh.axis_names:
        return slice(ROWS)
    axis, each = mesh.axis_names.index("data"), ROWS // mesh.shape["data"]
    places = [index[axis] for index, device in np.ndenumerate(mesh.devices) if device.process_index == rank]
    return slice(each * min(places), each * (max(places) + 1))


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters on the CPU."""
    return [value.cpu() for value in list(map(xla_amp.full_tensor, model.parameters()))]


def digest_of(state: dict[str, Any]) -> str:
    """Of all that a checkpoint holds: parameters, the optimizer's state, the scale."""
    model, optimizer = state["model"], state["optimizer"]
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    values = [*whole(model), *(value.cpu() for value in list(map(xla_amp.full_tensor, moments)))]
    found = hashlib.sha256(str(state["scaler"].get_scale()).encode())
    for value in values:
        found.update(value.detach().numpy().tobytes())
    return found.hexdigest()


def share(tensors: Sequence[torch.Tensor]) -> float:
    """Part of the elements that the first device of this process holds."""
    arrays = [tensor_io.array_of(tensor) for tensor in tensors]
    held: int = sum(array.addressable_shards[0].data.size for array in arrays)
    return held / sum(array.size for array in arrays)


def parts_of(tensor: torch.Tensor) -> dict[str, str]:
    """Digest by part of a tensor that this process holds; raises if two of its devices differ."""
    found: dict[str, str] = {}
    for shard in tensor_io.array_of(tensor).addressable_shards:
        digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
        if found.setdefault(str(shard.index), digest) != digest:
            raise SystemExit("two devices of one process hold different bits of the same part")
    return found


def refused(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except (XlaAmpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def form(rank: int, world: int, text: str, recipe: str) -> dict[str, Any]:
    """Steps over a mesh (JSON of its axes), a checkpoint, and what is refused."""
    axes, device = json.loads(text), xla_amp.xla_device()
    found: dict[str, Any] = {}
    mesh = xla_amp.make_mesh(axes) if axes else None
    if mesh is not None:
        xla_amp.mark_sharding(torch.zeros(mesh.size).to(device), mesh, mesh.axis_names[:1])
        found["own numbers"] = refused(lambda: (torch.ones(3).to(device) * (rank + 2.5)).cpu())
    state, layout = made(device, mesh, recipe, rank)  # `shard` takes what process 0 has
    found |= train(device, mesh, layout, state, range(4), rank) | held(state)
    if mesh is not None:
        weight = state["model"].transformer.h[0].mlp.c_fc.weight
        other = torch.full((mesh.size, 2), float(rank)).to(device)
        found["refused"] = {
            "read": refused(weight.cpu),
            "own numbers again": refused(lambda: (torch.ones(3).to(device) * (rank + 2.5)).cpu()),
            "own values": refused(lambda: xla_amp.mark_sharding(other, mesh, mesh.axis_names[:1])),
            "collective": refused(lambda: xla_amp.xla_model.all_reduce("sum", other)),
        }
        written = digest_of(state)
        saving = xla_amp.checkpoint.save_async({**state, "digest": written}, Path("checkpoint"))
        with torch.no_grad():
            weight.add_(1)  # the next step, while the file system writes
        xla_amp.sync()
        saving.result()
        found |= loaded(device, mesh, layout, state, rank)
    for transform in (None, functools.partial(xla_amp.compile, strict=True)) if world == 1 and mesh else ():
        state, layout = made(device, mesh, recipe, rank)
        steps = train(device, mesh, layout, state, range(7), rank, transform or (lambda step: step))
        found["captured" if transform else "recorded"] = steps | held(state)
    return found


def again(rank: int, world: int, text: str, recipe: str) -> dict[str, Any]:
    """Steps that go on from the checkpoint of `form`, over another mesh."""
    axes, device = json.loads(text), xla_amp.xla_device()
    mesh = xla_amp.make_mesh(axes) if axes else None
    state, layout = made(device, mesh, recipe, 1)
    return loaded(device, mesh, layout, state, rank) | held(state)


def loaded(device: torch.device, mesh: Any, layout: Any, state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Digests of what was saved and of what is loaded, and the losses of two steps more."""
    rest = xla_amp.checkpoint.load(state, Path("checkpoint"))
    digests = [rest["digest"], digest_of(state)]
    return {"loaded": digests, "later": train(device, mesh, layout, state, (4, 5), rank)["losses"]}
