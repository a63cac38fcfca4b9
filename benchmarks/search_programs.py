"""What `xla_amp.search` finds on twelve programs, and how far it is from the best of many random plans.

    python benchmarks/search_programs.py [--programs "batch norm" GPT-2] [--random 200] [--target h100]

Each program runs on torch's CPU at a tiny size.  The search sees eight batches, two of them held out.  Its plan is then
measured on four batches that it has not seen.  The column `to best` compares its estimated time with the shortest among
the plan and the random plans that are within the budget by the same bound; each random plan draws the share of
candidates that run low.  Times are estimates for the target: they say how good the search is, not how fast a program.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from models import Bottleneck
from results import write_json, write_markdown
from torch import Tensor, nn
from workloads import Workload, language, resnet, vit

from xla_amp import plan_search
from xla_amp.diagnose.torch_search import TorchProgram
from xla_amp.plan_search import Plan, measurements

SEARCHED, UNSEEN = 8, 4
"""Batches that the search has, and batches that check its plan."""


class NearlyEqual(nn.Module):
    """The difference of two products that are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.b.weight.data = self.a.weight.data * 1.01

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.a(x) - self.b(x)).square().mean()


class LargeMeans(nn.Module):
    """Batch norms of values whose mean is large beside their deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.middle = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)
        self.second, self.leave = nn.BatchNorm2d(16), nn.Linear(16, 10)
        nn.init.constant_(self.enter.bias, 100.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm(self.enter(x)))
        return F.cross_entropy(self.leave(F.relu(self.second(self.middle(x))).mean((2, 3))), y)


class Positions(nn.Module):
    """The angles of rotary positions, of which a low dtype has only some."""

    def forward(self, at: Tensor, rates: Tensor) -> Tensor:
        return at[:, None] @ rates[None]


class Rotary(nn.Module):
    """Attention with rotary positions up to 4096."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.positions = Positions()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angles = self.positions(at, self.rates)
        cos, sin = angles.cos(), angles.sin()

        def turned(values: Tensor) -> Tensor:
            even, odd = values[..., ::2], values[..., 1::2]
            return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)

        attended = F.scaled_dot_product_attention(turned(self.query(x)) * 4, turned(self.key(x)), self.value(x))
        return self.out(attended).square().mean()


class Head(nn.Module):
    """A large head whose loss is a log-sum-exp."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = 8 * self.head(F.gelu(self.hidden(self.embed(x))))
        chosen = logits.gather(-1, y[:, None]).squeeze(-1)
        return (torch.logsumexp(logits, -1) - chosen).mean() + 1e-4 * torch.logsumexp(logits, -1).square().mean()


class Expert(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """A mixture of experts: a rounded router chooses others."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.enter, self.router, self.leave = nn.Linear(width, width), nn.Linear(width, experts), nn.Linear(width, 10)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        share, chosen = torch.softmax(self.router(x), -1).topk(2)
        weights = torch.zeros_like(x[:, : len(self.experts)]).scatter(-1, chosen, share.to(x.dtype))
        mixed = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return F.cross_entropy(self.leave(x + mixed), y)


class UNet(nn.Module):
    """A denoiser with one level, a time embedding and a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time, self.enter = nn.Linear(16, width), nn.Conv2d(3, width, 3, padding=1)
        self.norm, self.down = nn.GroupNorm(4, width), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle, self.middle_norm = nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.GroupNorm(4, 2 * width)
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        angles = at[:, None] * torch.arange(1, 9)
        time = self.time(torch.cat((angles.sin(), angles.cos()), -1))[:, :, None, None]
        mixed = at.cos()[:, None, None, None] * x + at.sin()[:, None, None, None] * noise
        high = F.silu(self.norm(self.enter(mixed) + time))
        deep = F.silu(self.middle_norm(self.middle(self.down(high))))
        return F.mse_loss(self.leave(torch.cat((high, self.up(deep)), 1)), noise)


class Overflow(nn.Module):
    """A product outside of the range of float16, between products inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.large, self.small, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.large.weight.data *= 3e5
        self.small.weight.data *= 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.small(self.large(self.first(x))))).square().mean()


def _workload(fields: Mapping[str, Any]) -> tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]:
    workload = Workload(name="", **fields)

    def data(generator: torch.Generator) -> Any:
        import numpy as np

        x, y = workload.data(np.random.default_rng(int(torch.randint(2**31, (), generator=generator))))
        return torch.from_numpy(x), torch.from_numpy(y)

    return workload.torch_model, data


def _residual_network() -> nn.Module:
    model = _workload(resnet(4, 32, width=8, classes=10, blocks=(1, 1, 1, 1)))[0]()
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.norm3.weight)  # otherwise the gradients of the first step are chaotic
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program."""

    make: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Any]
    budget: Mapping[str, float]
    low: Any = "bfloat16"


def _normal(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], Any]:
    return lambda generator: tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[torch.Generator], Any]:
    return lambda g: (torch.randn(shape, generator=g), torch.randint(classes, shape[:1], generator=g))


def _tokens(number: int) -> Callable[[torch.Generator], Any]:
    return lambda g: tuple(torch.randint(512, (number,), generator=g) for _ in range(2))


def _rotary(generator: torch.Generator) -> Any:
    at = torch.randperm(4096, generator=generator)[:64].sort().values.float()
    return torch.randn(4, 64, 32, generator=generator), at


def _noised(generator: torch.Generator) -> Any:
    images = (torch.randn(4, 3, 16, 16, generator=generator) for _ in range(2))
    return *images, torch.rand(4, generator=generator) * 1.5


_SIZE: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4}
_GPT = _workload(language(2, 32, vocabulary=256, context=32, **_SIZE))
_BERT = _workload(language(2, 32, "BERT", vocabulary=256, context=32, **_SIZE))
_VIT = _workload(vit(2, side=64, classes=10, **_SIZE))
_LSTM = _workload(language(4, 16, "LSTM", vocabulary=128, width=32))
_RESNET = _workload(resnet(4, 32, width=8, classes=10, blocks=(1, 1, 1, 1)))

PROGRAMS: dict[str, Row] = {
    "nearly equal": Row(make=NearlyEqual, data=_normal((16, 64)), budget={"loss": 2e-2, "gradients": 2e-2}),
    "batch norm": Row(make=LargeMeans, data=_labelled((8, 3, 16, 16), 10), budget={"loss": 2e-2, "gradients": 5e-2}),
    "RoPE": Row(make=Rotary, data=_rotary, budget={"loss": 2e-2, "gradients": 2e-2}),
    "log-sum-exp": Row(make=Head, data=_tokens(64), budget={"loss": 1e-3, "gradients": 3.5e-3}),
    "LSTM": Row(make=_LSTM[0], data=_LSTM[1], budget={"loss": 1e-3, "gradients": 2.5e-3}),
    "MoE": Row(make=Mixture, data=_labelled((64, 32), 10), budget={"loss": 5e-3, "gradients": 2e-2}),
    "GPT-2": Row(make=_GPT[0], data=_GPT[1], budget={"loss": 1e-3, "gradients": 5e-3}),
    "ResNet": Row(make=_residual_network, data=_RESNET[1], budget={"loss": 1e-2, "gradients": 3e-2}),
    "ViT": Row(make=_VIT[0], data=_VIT[1], budget={"loss": 5e-3, "gradients": 6e-3}),
    "BERT": Row(make=_BERT[0], data=_BERT[1], budget={"loss": 1e-3, "gradients": 4e-3}),
    "UNet": Row(make=UNet, data=_noised, budget={"loss": 1e-3, "gradients": 3.5e-3}),
    "overflow": Row(make=Overflow, data=_normal((16, 32)), budget={"loss": 2e-2, "gradients": 2e-2}, low="float16"),
}


class _Searched:
    """A program with only its first batches."""

    def __init__(self, program: TorchProgram) -> None:
        self.candidates, self.fingerprint, self.batches = program.candidates, program.fingerprint, SEARCHED
        self.evaluate, self.noise = program.evaluate, program.noise


def measure(name: str, target: str, plans: int) -> dict[str, Any]:
    """Searches one program, and draws `plans` random ones."""
    row = PROGRAMS[name]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = [row.data(generator) for _ in range(SEARCHED + UNSEEN)]
    program = TorchProgram(row.make(), data, ())
    program.look(plan_search.rates(target), row.low)
    with program.prepared():
        start = time.perf_counter()
        found = plan_search.search(_Searched(program), budget=row.budget)
        took = time.perf_counter() - start
        unseen = [program.evaluate(found.plan, batch) for batch in range(SEARCHED, SEARCHED + UNSEEN)]
        best = max([found.seconds, *_random(program, row.budget, plans)])
    wide = program.estimate(Plan(), plan_search.rates(target))
    return {
        "program": name,
        "candidates": len(program.candidates),
        "low": len(found.plan),
        "measured": len(found.tried),
        "seconds": took,
        "budget": dict(row.budget),
        "errors": dict(found.errors),
        "unseen": {key: max(each[key] for each in unseen) for key in row.budget},
        "all_low": max((each.load for each in found.tried if len(each.plan) == len(program.candidates)), default=0.0),
        "met": found.met,
        "time": (wide - found.seconds) / wide,
        "all_low_time": (wide - sum(max(0.0, each.seconds) for each in program.candidates)) / wide,
        "to_best": (wide - found.seconds) / (wide - best),
    }


def _random(program: TorchProgram, budget: Mapping[str, float], plans: int) -> list[float]:
    """Savings of the random plans that are within the budget by the bound of the search."""
    draw, names = random.Random(0), [each.name for each in program.candidates]
    known = measurements.Measurements(program)
    used = SEARCHED - SEARCHED // 4
    found = []
    for _ in range(plans):
        share = draw.random()
        plan = frozenset(name for name in names if draw.random() < share)
        measured = []
        for batch in range(used):
            measured.append(known.errors(plan, batch))
            if any(measured[-1][key] > limit for key, limit in budget.items()):
                break
        bounds = {key: measurements.bound([each[key] for each in measured], 0.99) for key in budget}
        finite = all(math.isfinite(value) for each in measured for value in each.values())
        if len(measured) == used and finite and all(bounds[key] <= limit for key, limit in budget.items()):
            found.append(sum(each.seconds for each in program.candidates if each.name in plan))
    return found


HEADINGS = ("program", "low", "plans", "budget", "achieved", "unseen", "time", "all low", "to best")


def main() -> None:
    """Measures, prints and writes ``results/search_programs``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS))
    parser.add_argument("--random", type=int, default=200, help="random plans for each program")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--print-only", action="store_true", help="do not write the results")
    options = parser.parse_args()
    rows = []
    for name in options.programs:
        rows.append(measure(name, options.target, options.random))
        print(rows[-1], flush=True)
    if not options.print_only:
        write_json("search_programs", {"target": options.target, "random": options.random, "rows": rows})
        write_markdown("search_programs", HEADINGS, table(rows), f"Search within a budget, for {options.target}")


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text; errors are those of loss and gradients, times shares of float32's."""

    def errors(found: Mapping[str, float]) -> str:
        return ", ".join(f"{value:.1e}" for value in found.values())

    return [
        (
            row["program"], f"{row['low']} of {row['candidates']}", str(row["measured"]), errors(row["budget"]),
            errors(row["errors"]), errors(row["unseen"]), f"{row['time']:.2f}", f"{row['all_low_time']:.2f}",
            f"{row['to_best']:.3f}",
        )
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    main()
