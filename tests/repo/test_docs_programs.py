"""Every block of Python in docs/ runs: what a page leaves to the reader's program is in `SETUPS` here."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import forked
import pytest
from source_tree import ROOT

ELSEWHERE = {
    "install": "test_docs_pages",
    "migration": "test_docs_pages",
    "pytorch": "test_docs_pages",
    "recipes": "test_recipes",
    "tutorial": "test_docs_pages",
}
"""Page -> test that runs its blocks and compares what they print."""

TORCH = """
import torch, xla_amp
device = xla_amp.xla_device()
model = torch.nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = torch.nn.functional.cross_entropy
loader = [(torch.ones(8, 8).to(device), torch.zeros(8, dtype=torch.int64).to(device)) for _ in range(3)]
"""
SETUPS: dict[str, str] = {
    "compile": TORCH + "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
    "distributed": TORCH
    + """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
from xla_amp import GradScaler, xla_model as xm
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.embedding = torch.nn.Linear(8, 8), torch.nn.Embedding(8, 8)
scaler, step = GradScaler(device), 0
local_loader = [(images.cpu(), labels.cpu()) for images, labels in loader]
""",
    "jax": """
import jax, jax.numpy as jnp, xla_amp
params, batch = jnp.ones((8, 4)), jnp.ones((2, 8))
def loss(params, x): return jnp.mean((x @ params) ** 2)
model, x, train_step = jnp.tanh, batch, jax.grad(loss)
""",
    "../lowering/README": "",
    "tools": "",
    "policy": TORCH,
    "stablehlo": "",
    "frameworks": TORCH  # last: it changes the frameworks for the whole process
    + """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
    def training_step(self, batch, index): return loss_fn(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, index): self.log("loss", self.training_step(batch, index))
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_epoch_end(self): self.trainer.should_stop = True
model = Module()
rows = [{"x": torch.ones(8)}]
train_loader = validation_loader = torch.utils.data.DataLoader([(torch.ones(8), 0)] * 4, batch_size=2)
""",
}
"""Page -> the reader's program around its blocks."""

PROGRAM = """
import json, os, sys
pages = json.loads(sys.argv[1])
os.chdir(sys.argv[2])
for page, (setup, *blocks) in pages.items():
    scope = {"__name__": "page"}
    exec(compile(setup, f"setup of {page}", "exec"), scope)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}.md, block {number}", "exec"), scope)
    print("ran", page, len(blocks))
"""
RULES = 'extends = "tpu"\n\n[[rule]]\ncast = "fp32"\nwhy = "An example."\nsource = "a test"\noperations = ["tanh"]\n'


def blocks(page: str) -> list[str]:
    """The programs of a page, also those that a diff makes; what a reader replaces is marked ``title="before"``."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.findall(r"^```(python(?! title=\"before\")[^\n]*|diff)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [_after(block) if kind == "diff" else block for kind, block in found]


def _after(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-")) + "\n"


def ran(pages: list[str], folder: Path, **environment: str) -> dict[str, int]:
    """Page -> number of its blocks that ran, all in one process in `folder`."""
    for name in ("mine.toml", "rules.toml"):
        (folder / name).write_text(RULES)
    given = {page: [SETUPS[page], *blocks(page)] for page in pages}
    done = forked.run(json.dumps(given), folder, program=PROGRAM, environment={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return {page: int(count) for page, count in re.findall(r"^ran (\S+) (\d+)$", done.stdout, re.MULTILINE)}


def test_every_page_with_python_is_run():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"../lowering/README"}
    assert {page for page in pages if blocks(page)} == set(SETUPS) | set(ELSEWHERE)


@pytest.mark.full
def test_on_one_device(tmp_path):
    pages = [page for page in SETUPS if page != "distributed"]
    assert ran(pages, tmp_path) == {page: len(blocks(page)) for page in pages}


@pytest.mark.full
def test_on_eight_devices(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    assert ran(["distributed"], tmp_path, XLA_FLAGS=flags) == {"distributed": 6}
