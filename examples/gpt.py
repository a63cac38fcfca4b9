"""Train a byte-level GPT on any text file, in float32, bfloat16 or float16, and generate text.

    python examples/gpt.py --precision bf16
    python examples/gpt.py --text shakespeare.txt --precision fp16 --policy gpu --steps 2000 --checkpoint gpt.pt

Without `--text` it learns the documentation strings of Python's standard library.  The whole step is captured
(`xla_amp.compile`): after three calls it is replayed without being recorded.  `--checkpoint` saves model, optimizer,
scaler and random state at the end, and resumes from the file if it exists.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from absl import app, flags
from torch import Tensor, nn
from tqdm import tqdm

import xla_amp
from xla_amp import GradScaler, autocast, syncfree, xla_device
from xla_amp import xla_model as xm

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
POLICY = flags.DEFINE_string("policy", None, "cast rules: tpu, gpu, ... or a TOML file; default: those of the device")
TEXT = flags.DEFINE_string("text", None, "text to learn; default: the documentation strings of the standard library")
STEPS = flags.DEFINE_integer("steps", 300, "training steps of this run", lower_bound=1)
BATCH = flags.DEFINE_integer("batch-size", 16, "sequences per step", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 128, "bytes per sequence", lower_bound=8)
LAYERS = flags.DEFINE_integer("layers", 4, "transformer blocks", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 128, "channels; a multiple of 32, the size of a head", lower_bound=32)
DROPOUT = flags.DEFINE_float("dropout", 0.1, "dropout probability", lower_bound=0.0, upper_bound=0.9)
LR = flags.DEFINE_float("lr", 1e-3, "highest learning rate")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights, batches and dropout")
CHECKPOINT = flags.DEFINE_string("checkpoint", None, "file to resume from, if it exists, and to save to")
LOG_STEPS = flags.DEFINE_integer("log-steps", 20, "steps between two readings of the loss", lower_bound=1)
LOG_DIR = flags.DEFINE_string("log-dir", None, "write losses, learning rates and loss scales here (TensorBoard, CSV)")
WRITE = flags.DEFINE_integer("write", 200, "bytes to generate at the end", lower_bound=0)
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

LOW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = 32
WARM_UP = 8  # steps before timing starts: the first ones compile
HELD_OUT = 0.1  # fraction of the text, at its end, that is not trained on


# ---- data ------------------------------------------------------------------------------------------------------------


def load_text(path: str | None) -> Tensor:
    """The text as uint8 [bytes]."""
    return torch.frombuffer(bytearray(common.load_text(path)), dtype=torch.uint8)


def batches(text: Tensor, device: torch.device, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless random pieces of the text on the device, int64 [batch, context + 1]."""
    window = torch.arange(CONTEXT.value + 1)
    while True:
        starts = torch.randint(len(text) - CONTEXT.value - 1, (BATCH.value, 1), generator=generator)
        yield text[starts + window].long().to(device)


# ---- model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron, each after a norm (Radford et al. 2019)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class GPT(nn.Module):
    """Bytes int64 [batch, length] -> logits of the next byte [batch, length, 256]."""

    def __init__(self, context: int, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # tied, as in GPT-2
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** (0.5 * name.endswith("out.weight")))

    def forward(self, bytes_: Tensor) -> Tensor:
        positions = torch.arange(bytes_.shape[1], device=bytes_.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(bytes_) + self.position(positions))))
        return logits


@torch.no_grad()
def write(model: GPT, amp: autocast, device: torch.device, count: int) -> str:
    """`count` bytes sampled from the model, each from the window before it; the window keeps its shape."""
    model.eval()
    window = torch.full((1, model.context), ord("\n"), device=device)

    @xla_amp.compile
    def draw(window: Tensor) -> Tensor:
        with amp:
            logits = model(window)[:, -1]
        drawn = torch.multinomial(torch.softmax(logits.float(), -1), 1)
        return torch.cat([window[:, 1:], drawn], dim=1)

    written = []
    for _ in range(count):
        window = draw(window)
        written.append(window[0, -1])
    return bytes(torch.stack(written).tolist() if written else []).decode(errors="replace")


# ---- training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """Everything that a checkpoint holds."""

    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: GradScaler
    generator: torch.Generator
    steps: int = 0

    def save(self, path: str) -> None:
        """Write the checkpoint atomically."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule", "scaler")}
        state = {**parts, "steps": self.steps, "batches": self.generator.get_state(), "random": xm.get_rng_state()}
        temporary = Path(f"{path}.part")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: str) -> None:
        """Resume from a checkpoint."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.steps = state["steps"]
        self.generator.set_state(state["batches"])
        xm.set_rng_state(state["random"])


def train(run: Run, text: Tensor, amp: autocast, device: torch.device) -> dict[str, float | None]:
    """Train for `--steps` steps; return losses and cost per step."""
    model, optimizer, scaler = run.model, run.optimizer, run.scaler

    @xla_amp.compile
    def step(data: Tensor) -> Tensor:
        optimizer.zero_grad()
        with amp:
            loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    model.train()
    losses: list[Tensor] = []
    before, began = xla_amp.metrics(), time.perf_counter()
    source = batches(text, device, run.generator)
    log, bar = common.Log(LOG_DIR.value), tqdm(range(STEPS.value), unit="step")
    for number in bar:
        if number == WARM_UP:
            xla_amp.sync(wait=True)
            before, began = xla_amp.metrics(), time.perf_counter()
        lr = run.schedule.get_last_lr()[0]
        losses.append(step(next(source)))
        run.schedule.step()
        run.steps += 1
        if run.steps % LOG_STEPS.value == 0 or number == STEPS.value - 1:
            log.add(run.steps, {"loss": losses[-1], "lr": lr, "loss_scale": scaler.get_scale()}, bar)
    log.close()
    xla_amp.sync(wait=True)
    after, measured = xla_amp.metrics(), max(STEPS.value - WARM_UP, 0)
    seconds = time.perf_counter() - began
    return {
        "first_loss": losses[0].item(),
        "last_loss": torch.stack(losses[-20:]).mean().item(),
        "seconds_per_step": seconds / measured if measured else None,
        "executions_per_step": (after["executions"] - before["executions"]) / measured if measured else None,
        "replayed_steps": step.replays,
    }


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, amp: autocast, device: torch.device) -> float:
    """Mean loss in nats per byte on eight batches of text that was not trained on."""
    model.eval()
    source = batches(text, device, torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        data = next(source)
        with amp:
            losses.append(F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()))
    return torch.stack(losses).mean().item()


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    if WIDTH.value % HEAD:
        raise app.UsageError(f"--width={WIDTH.value} must be a multiple of {HEAD}, the size of a head")
    text = load_text(TEXT.value)
    split = int(len(text) * (1 - HELD_OUT))
    if len(text) - split < 2 * CONTEXT.value:
        raise app.UsageError(f"--text has {len(text)} bytes; expected at least {20 * CONTEXT.value} for this --context")
    torch.manual_seed(SEED.value)
    device = xla_device()
    model = GPT(CONTEXT.value, LAYERS.value, WIDTH.value, DROPOUT.value).to(device)
    optimizer = syncfree.AdamW(model.parameters(), lr=LR.value, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    low = LOW[PRECISION.value]
    amp = autocast(device, dtype=low, enabled=low is not None, policy=POLICY.value)
    scaler = GradScaler(device.type, enabled=PRECISION.value == "fp16")
    run = Run(model, optimizer, schedule, scaler, torch.Generator().manual_seed(SEED.value))
    if CHECKPOINT.value is not None and Path(CHECKPOINT.value).exists():
        run.load(CHECKPOINT.value)
    results: dict[str, Any] = {"precision": PRECISION.value, **train(run, text[:split], amp, device)}
    results["held_out_loss"] = held_out_loss(model, text[split:], amp, device)
    if CHECKPOINT.value is not None:
        run.save(CHECKPOINT.value)
    if WRITE.value:
        print(write(model, amp, device, WRITE.value))
    kind = f"{device} ({xm.xla_device_hw(device)})"
    common.show(f"GPT on {len(text):,} bytes, {run.steps} steps, {kind}", results, JSON.value)


if __name__ == "__main__":
    common.run(main)
