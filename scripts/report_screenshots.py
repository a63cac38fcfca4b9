"""Make each report of a small GPT and write its screenshots for docs/tools.md, with a Chromium that is installed.

    python scripts/report_screenshots.py            # writes docs/reports/*.png
    python scripts/report_screenshots.py --pages DIRECTORY   # keeps the pages, too

The pages are opened from files. Chromium loads nothing else: they forbid it themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch
from PIL import Image

import xla_amp
from xla_amp import cli

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURES: Final = ROOT / "docs" / "reports"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH: Final = 32
"""Width of the model."""


@dataclasses.dataclass(frozen=True)
class Shot:
    """One screenshot: of the page of a report, at a size, in a colour scheme."""

    report: str
    name: str
    width: int
    height: int
    dark: bool = False


SHOTS: Final = (
    Shot("explain", "explain", 1280, 860),
    Shot("explain", "explain_phone_dark", 500, 900, dark=True),
    Shot("monitor", "monitor", 1280, 1000),
    Shot("find_overflow", "find_overflow", 1280, 800),
    Shot("inspect", "inspect", 1280, 1960),
    Shot("convert", "convert_dark", 1280, 1100, dark=True),
    Shot("compare", "compare", 1280, 1000),
)


class Attention(torch.nn.Module):
    """Self-attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.proj(torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, -1) @ value)


class Block(torch.nn.Module):
    """One layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = torch.nn.LayerNorm(WIDTH), Attention(), torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(torch.nn.Module):
    """A small GPT."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.wte, self.h = torch.nn.Embedding(64, WIDTH), torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x)


def explain(page: Path) -> None:
    """A forward pass with a layer that a rule keeps in float32."""
    device = xla_amp.xla_device()
    model, tokens = GPT().to(device), torch.randint(0, 64, (4, 16)).to(device)
    rules: dict[str, Any] = {"module:h.1.mlp": "fp32", "module:h.2.attn.softmax": "low"}
    with xla_amp.explain() as report, xla_amp.autocast(device, rules=rules):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    report.to_html(page)


def monitor(page: Path) -> None:
    """Sixty steps in float16, in which the scores of one layer grow until they overflow."""
    torch.manual_seed(0)
    device = xla_amp.xla_device()
    model, tokens = GPT().to(device), torch.randint(0, 64, (4, 16)).to(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), xla_amp.GradScaler(device)
    recorder = xla_amp.monitor(model, optimizer, scaler, layers=["h.*.attn", "h.*.mlp", "head"])
    for _ in range(60):
        with recorder.step(tokens) as step:
            optimizer.zero_grad()
            with xla_amp.autocast(device, dtype=torch.float16):
                step.loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            scaler.scale(step.loss).backward()
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            model.h[2].attn.proj.weight.mul_(1.2)  # type: ignore[union-attr,operator]
    recorder.read()
    recorder.history.to_html(page)
    recorder.close()


def find_overflow(page: Path) -> None:
    """A step whose activations overflow float16 in one layer."""
    torch.manual_seed(0)
    device = xla_amp.xla_device()
    model, tokens = GPT().to(device), torch.randint(0, 64, (4, 16)).to(device)
    with torch.no_grad():
        model.h[2].mlp[2].weight.mul_(1e6)  # type: ignore[index,union-attr]

    def step(tokens: torch.Tensor) -> None:
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()

    xla_amp.find_overflow(step, tokens).to_html(page)


def _norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _loss(params: Any, tokens: jax.Array) -> jax.Array:
    with jax.named_scope("wte"):
        x = params["wte"][tokens]
    for index, layer in enumerate(params["h"]):
        with jax.named_scope(f"h.{index}"):
            with jax.named_scope("attn"):
                query, key, value = jnp.split(_norm(x) @ layer["qkv"], 3, -1)
                x = x + jax.nn.softmax(query @ key.T / WIDTH**0.5) @ value @ layer["proj"]
            with jax.named_scope("mlp"):
                x = x + jax.nn.gelu(_norm(x) @ layer["up"]) @ layer["down"]
    with jax.named_scope("head"):
        return -jax.nn.log_softmax(x @ params["wte"].T).mean()


def _programs() -> tuple[str, str]:
    """Writes a training step in JAX, and the same in mixed precision; the names of their files."""
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "proj": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def made(seed: int, shape: tuple[int, int]) -> jax.Array:
        return 0.1 * jax.random.normal(jax.random.key(seed), shape)

    layers = [{name: made(10 * at + len(name), shape) for name, shape in sizes.items()} for at in range(3)]
    params = {"wte": made(99, (64, WIDTH)), "h": layers}

    def step(params: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(params, tokens)
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), loss

    Path("step.mlir").write_text(jax.jit(step).lower(params, jnp.arange(16)).as_text(debug_info=True))
    cli.main(["convert", "step.mlir", "-o", "low.mlirbc"])
    return "step.mlir", "low.mlirbc"


def inspect(page: Path) -> None:
    """A training step in float32."""
    cli.main(["inspect", _programs()[0], "--report", str(page)])


def convert(page: Path) -> None:
    """A training step with one rule."""
    cli.main(["convert", _programs()[0], "-o", "low.mlirbc", "--rule", "module:h.0.mlp=fp32", "--report", str(page)])


def compare(page: Path) -> None:
    """A training step and the same in mixed precision."""
    cli.main(["compare", *_programs(), "--report", str(page)])


REPORTS: Final[dict[str, Callable[[Path], None]]] = {
    each.__name__: each for each in (explain, monitor, find_overflow, inspect, convert, compare)
}


def picture(browser: str, page: Path, shot: Shot, file: Path) -> None:
    """Writes one screenshot as a small PNG."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-quic",
                "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={profile}", f"--window-size={shot.width},{shot.height}",
                f"--blink-settings=preferredColorScheme={0 if shot.dark else 1}", f"--screenshot={file}", page.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    with Image.open(file) as image:
        image.convert("RGB").quantize(256).save(file, optimize=True)


def main() -> None:
    """Makes the pages and their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, help="keep the pages in this folder")
    parser.add_argument("--only", choices=[*REPORTS], help="only this report")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: expected one of {', '.join(BROWSERS)} on the path")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        pages = arguments.pages.absolute() if arguments.pages else Path(folder)
        pages.mkdir(parents=True, exist_ok=True)
        for name, make in REPORTS.items():
            if arguments.only in (None, name):
                page = pages / f"{name}.html"
                with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                    make(page)
                page.write_text(page.read_text().replace(f"{ROOT}/", ""))  # this machine's folder says nothing
                for shot in (each for each in SHOTS if each.report == name):
                    file = PICTURES / f"{shot.name}.png"
                    picture(browser, page, shot, file)
                    print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
