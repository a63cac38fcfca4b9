"""Train a byte-level GPT in several processes with torch.distributed: a script for CUDA with two lines changed.

    torchrun --nproc-per-node 2 examples/gpt_ddp.py --precision fp16
    python examples/gpt_ddp.py --text shakespeare.txt --checkpoint gpt.pt

The two lines are those of the backend and the device, in `main`; the line for CUDA is beside each.  Everything else is
torch's: torchrun's variables, `DistributedDataParallel`, `DistributedSampler`, `torch.autocast`, `GradScaler`.
A step is one executable, with the average of the gradients inside.  Rank 0 writes the checkpoint, all ranks load it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = 16


class Block(nn.Module):
    """Attention and a perceptron, each after a norm (Radford et al. 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Bytes int64 [batch, length] -> logits of the next byte [batch, length, 256]."""

    def __init__(self, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # tied, as in GPT-2
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))
        return logits


def sequences(path: str | None, context: int, most: int) -> Tensor:
    """At most `most` pieces of a text, int64 [pieces, context + 1]; without a path, of documentation strings."""
    if path is None:
        tree = ast.parse(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        text = "\n\n".join(filter(None, map(ast.get_docstring, nodes))).encode()
    else:
        text = Path(path).read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) // (context + 1) * (context + 1)].view(-1, context + 1)[:most]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="text to learn; default: documentation strings of the standard library")
    parser.add_argument("--precision", choices=list(LOW), default="fp16", help="what the forward pass computes in")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step and process")
    parser.add_argument("--context", type=int, default=32, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--width", type=int, default=64, help="channels, a multiple of 16")
    parser.add_argument("--sequences", type=int, default=100, help="of the text that are used")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--overflow-at", type=int, default=-1, help="step in which the last rank's loss is infinite")
    parser.add_argument("--checkpoint", help="file to resume from, if it exists, and to save to")
    parser.add_argument("--json", action="store_true", help="print what each process has in the end")
    args = parser.parse_args()

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    dist.init_process_group("xla_amp")  # "nccl"
    device = torch.device("jax")  # torch.device("cuda", local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()

    data = sequences(args.text, args.context, args.sequences)
    split = len(data) * 9 // 10
    dataset, held_out = TensorDataset(data[:split]), TensorDataset(data[split:])
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)  # the last batch is smaller

    torch.manual_seed(rank)  # other weights on each rank, until DistributedDataParallel copies those of rank 0
    module = GPT(args.context, args.layers, args.width).to(device)
    model = DistributedDataParallel(module, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    low = LOW[args.precision]
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    first = 0
    if args.checkpoint and Path(args.checkpoint).exists():
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        first = state["epoch"]

    amp = torch.autocast(device.type, low) if low is not None else contextlib.nullcontext()
    losses, number = [], 0
    for epoch in range(first, first + args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (tokens,) in loader:
            tokens = tokens.to(device, non_blocking=True)
            optimizer.zero_grad()
            with amp:
                loss = loss_of(model, tokens)
                overflows = number == args.overflow_at and rank == world - 1
                loss = loss * torch.tensor(float("inf") if overflows else 1.0, device=device)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
            if rank == 0 and number % 5 == 0:
                print(f"step {number}: loss {loss.item():.4f}")
            number += 1

        model.eval()
        total = torch.zeros(2, device=device)
        with torch.no_grad(), amp:
            for (tokens,) in DataLoader(held_out, args.batch_size, sampler=DistributedSampler(held_out, shuffle=False)):
                total += torch.stack([loss_of(model, tokens.to(device)), torch.ones((), device=device)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: held-out loss {(total[0] / total[1]).item():.4f}")

    if args.checkpoint and rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save({**states, "epoch": first + args.epochs}, args.checkpoint)
    dist.barrier()
    if args.json:
        mean = torch.stack(losses).float()
        dist.all_reduce(mean)
        weights = [parameter.detach().cpu().numpy() for parameter in model.parameters()]
        result = {
            "rank": rank,
            "weights": hashlib.sha256(b"".join(part.tobytes() for part in weights)).hexdigest(),
            "sum": sum(float(abs(part).sum(dtype="float64")) for part in weights),
            "losses": (mean / world).tolist(),
            "held_out": (total[0] / total[1]).item(),
            "scale": scaler.get_scale(),
        }
        print("result " + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
