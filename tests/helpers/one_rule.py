"""One policy file, one GPT in four forms: PyTorch, exported from PyTorch, Flax, and StableHLO text of the Flax one.

python tests/helpers/one_rule.py                 # the four tables side by side
python tests/helpers/one_rule.py --write         # the same into docs/lists/one_rule.md
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

import xla_amp
import xla_amp.jax
from xla_amp import stablehlo

POLICY: Final = """\
extends = "tpu"

[[rule]]
operations = ["bmm"]  # attention scores and their product with the values
cast = "fp32"

[[rule]]
operations = ["layer_norm"]
cast = "low"

[[rule]]
operations = ["silu", "module:*.head"]
cast = "fp32"
"""
PAGE: Final = Path(__file__).parents[2] / "docs" / "lists" / "one_rule.md"
LAYERS, HEADS, WIDTH, VOCABULARY = 2, 2, 8, 16
IDS: Final = (2, 4)
"""Batch and length."""


class TorchAttention(torch.nn.Module):
    """Attention without a mask: x (batch, length, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH)."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = heads.reshape(3, batch * HEADS, length, WIDTH // HEADS).unbind()
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(WIDTH // HEADS)
        mixed = torch.bmm(torch.softmax(scores, -1), v).view(batch, HEADS, length, WIDTH // HEADS)
        y: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return y


class TorchBlock(torch.nn.Module):
    """A pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = torch.nn.LayerNorm(WIDTH), TorchAttention(), torch.nn.LayerNorm(WIDTH)
        self.fc, self.proj = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH)."""
        x = x + self.attn(self.ln_1(x))
        y: torch.Tensor = self.proj(torch.nn.functional.silu(self.fc(self.ln_2(x))))
        return x + y


class TorchGPT(torch.nn.Module):
    """Logits (batch, length, VOCABULARY) of ids (batch, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.ln_f, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, length, VOCABULARY)."""
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln_f(x))
        return logits


class FlaxAttention(nn.Module):
    """`TorchAttention` in Flax."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """(batch, length, WIDTH)."""
        batch, length, _ = x.shape
        heads = nn.Dense(3 * WIDTH, name="qkv")(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.transpose(2, 0, 3, 1, 4).reshape(3, batch * HEADS, length, WIDTH // HEADS)
        scores = jax.lax.batch_matmul(q, k.transpose(0, 2, 1)) / math.sqrt(WIDTH // HEADS)
        mixed = jax.lax.batch_matmul(nn.softmax(scores), v).reshape(batch, HEADS, length, WIDTH // HEADS)
        return nn.Dense(WIDTH, name="proj")(mixed.transpose(0, 2, 1, 3).reshape(batch, length, WIDTH))


class FlaxBlock(nn.Module):
    """`TorchBlock` in Flax."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """(batch, length, WIDTH)."""
        x = x + FlaxAttention(name="attn")(nn.LayerNorm(name="ln_1")(x))
        hidden = nn.silu(nn.Dense(4 * WIDTH, name="fc")(nn.LayerNorm(name="ln_2")(x)))
        return x + nn.Dense(WIDTH, name="proj")(hidden)


class GPT(nn.Module):
    """`TorchGPT` in Flax."""

    def setup(self) -> None:
        """Makes the parts."""
        self.wte = nn.Embed(VOCABULARY, WIDTH)
        self.blocks = [FlaxBlock() for _ in range(LAYERS)]
        self.ln_f, self.head = nn.LayerNorm(), nn.Dense(VOCABULARY)

    def __call__(self, ids: Any) -> Any:
        """(batch, length, VOCABULARY)."""
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Row(NamedTuple):
    """The decision about one operation."""

    module: str
    """As the front's report shows it."""
    operation: str
    dtype: str
    """That it computes in, or for a function in parts that of its operands and results."""
    layer: str


_NAMES: Final = {
    "addmm": "linear", "matmul": "linear", "dot_general": "linear", "softmax.int": "softmax"
}  # fmt: skip
_SHOWN: Final = ("linear", "bmm", "layer_norm", "silu")  # softmax has no name in StableHLO text of JAX


def pytorch(policy: Path) -> list[Row]:
    """On the lazy device, under `xla_amp.autocast`."""
    device = xla_amp.xla_device()
    model, ids = TorchGPT().to(device), torch.zeros(IDS, dtype=torch.long, device=device)
    with xla_amp.explain() as report, xla_amp.autocast(device, policy=policy, strict=True):
        model(ids)
    return _records(report)


def exported(policy: Path) -> list[Row]:
    """`xla_amp.export` of the float32 model, converted by `xla_amp.stablehlo.autocast`."""
    device = xla_amp.xla_device()
    with torch.no_grad():
        program = xla_amp.export(TorchGPT().to(device), torch.zeros(IDS, dtype=torch.long, device=device))
    return _operations(program, policy)


def _flax() -> tuple[Callable[..., Any], Any, Any]:
    model, ids = GPT(), jnp.zeros(IDS, jnp.int32)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), ids), ids


def flax(policy: Path) -> list[Row]:
    """The Flax model under `xla_amp.jax.autocast`."""
    apply, params, ids = _flax()
    with xla_amp.explain() as report:
        jax.eval_shape(xla_amp.jax.autocast(apply, policy=policy, strict=True), params, ids)
    return _records(report)


def text(policy: Path) -> list[Row]:
    """StableHLO text of ``jax.export`` of the Flax model."""
    apply, params, ids = _flax()
    return _operations(jax.export.export(jax.jit(apply))(params, ids).mlir_module(), policy)


def _records(report: Any) -> list[Row]:
    rows = []
    for each in report.records:
        name = _NAMES.get(each.operation, each.operation.partition(".")[0])
        if name in _SHOWN:
            rows.append(Row(each.module, name, each.used[0], each.layer))
    return rows


def _operations(program: Any, policy: Path) -> list[Row]:
    rows: list[Row] = []
    for each in stablehlo.autocast(program, policy=policy, strict=True).report.operations:
        name = "bmm" if each.aten == "bmm" else _NAMES.get(each.operation, each.operation)
        row = Row(each.module, name, each.after, each.layer)
        if name in _SHOWN and (name in ("linear", "bmm") or row not in rows):  # a function in parts has several edges
            rows.append(row)
    return rows


FORMS: Final[dict[str, Callable[[Path], list[Row]]]] = {
    "PyTorch": pytorch,
    "exported from PyTorch": exported,
    "Flax": flax,
    "StableHLO text": text,
}


def place(module: str) -> str:
    """A path as torch writes it: Flax has the outermost class first, and ``blocks_0`` for ``blocks.0``."""
    return re.sub(r"blocks_(\d+)", r"blocks.\1", module.removeprefix("GPT."))


def tables() -> dict[str, list[Row]]:
    """The rows of each form."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "gpt.toml"
        policy.write_text(POLICY)
        return {name: form(policy) for name, form in FORMS.items()}


def page(found: dict[str, list[Row]]) -> str:
    """The tables side by side, as Markdown."""
    keys = dict.fromkeys((place(row.module), row.operation) for rows in found.values() for row in rows)
    lines = [
        "# One policy file on four fronts",
        "",
        "`tests/helpers/one_rule.py` makes this list. The file",
        "",
        f"```toml\n{POLICY}```",
        "",
        "gives these dtypes to one GPT in four forms, by `xla_amp.explain` and by the reports of",
        "`xla_amp.stablehlo.autocast`. Bold: a rule of the file decided. Flax writes `GPT.blocks_0` for `blocks.0`.",
        "",
        f"| module | operation | {' | '.join(found)} |",
        f"|---|---|{'---|' * len(found)}",
    ]
    for module, operation in keys:
        cells = []
        for rows in found.values():
            same = dict.fromkeys(r[2:] for r in rows if (place(r.module), r.operation) == (module, operation))
            cells.append(", ".join(f"**{dtype}**" if layer != "builtin" else dtype for dtype, layer in same) or "-")
        lines.append(f"| `{module}` | {operation} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[1])}")
    written = page(tables())
    if parser.parse_args().write:
        PAGE.write_text(written)
    else:
        print(written)


if __name__ == "__main__":
    main()
