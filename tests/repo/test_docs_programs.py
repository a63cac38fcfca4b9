"""The Python of README, CONTRIBUTING.md and docs/ runs: what a page leaves to the reader is in `SETUPS` here."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import docs_figures
import forked
import pytest
from source_tree import ROOT

TORCH = """
import torch, xla_amp
device = xla_amp.xla_device()
model = torch.nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = torch.nn.functional.cross_entropy
loader = [(torch.ones(8, 8).to(device), torch.zeros(8, dtype=torch.int64).to(device)) for _ in range(3)]
"""
SETUPS: dict[str, str] = {
    "install": "",
    "pytorch": TORCH,
    "recipes": "",
    "migration": TORCH
    + """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
x = torch.randn(2, 8)
loader = [(x, torch.tensor([1, 3]))]
__name__ = "docs"  # only defines what processes would run
""",
    "tutorial": "",
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

COUNTED = """
counting = xla_amp.testing.counts()
seen = counting.__enter__()
---
counting.__exit__(None, None, None)
xla_amp.sync(wait=True)
"""

CHECKS = {
    "recipes: Clip gradients": "---\nassert sum(p.grad.square().sum().item() for p in model.parameters()) <= 1.001",
    "recipes: Accumulate gradients": COUNTED + "assert seen.host_syncs == 0 and seen.executions <= 2",
    "recipes: Gradient penalty": COUNTED + "assert seen.host_syncs == 0\nassert (norm > 0).item()",
    "recipes: Several models, losses and optimizers": COUNTED + "assert seen.host_syncs == 0",
    "recipes: Custom autograd functions": """---
product.sum().backward()
assert x.grad.dtype == weight.grad.dtype == torch.float32 and weight.grad.abs().sum().item() > 0
""",
    "recipes: Save and resume": """
dropped = nn.Dropout(0.5)
---
def steps():
    for x, y in loader:
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = cross_entropy(model(dropped(x)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().cpu() for p in model.parameters()]
went_on = steps()
for where in ("cpu", device):
    state = torch.load("last.pt", map_location=where)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-3)
    scaler = xla_amp.GradScaler(device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    torch.jax.set_rng_state(state["random"][1].cpu())
    assert all(map(torch.equal, went_on, steps()))
""",
    "recipes: Learning-rate schedules": COUNTED
    + """
assert seen.host_syncs == 0
with xla_amp.testing.counts() as again:
    for x, y in loader:
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    xla_amp.sync(wait=True)
assert again.compilations == 0 and optimizer.param_groups[0]["lr"] < 1e-3
""",
    "recipes: Evaluation": """
xla_amp.sync(wait=True)
counting = xla_amp.testing.counts()
seen = counting.__enter__()
---
counting.__exit__(None, None, None)
assert seen.host_syncs == 1 and seen.compilations <= 2, seen
""",
    "recipes: Packed sequences": """---
assert output.shape == (3, 5, 16) and lengths.tolist() == [5, 2, 3]
xla_amp.sync(wait=True)
with xla_amp.testing.counts() as seen, xla_amp.autocast(device):
    packed = pack_padded_sequence(texts, torch.tensor([4, 5, 1]), batch_first=True, enforce_sorted=False)
    output, lengths = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=5)
    xla_amp.sync()
assert seen.compilations == 0 and seen.host_syncs == 0, seen
""",
    "recipes: Flax linen": "---\nassert loss.dtype == 'float32' and loss_scale.skipped <= 1",
    "recipes: Equinox": "---\nassert loss.dtype == 'float32'",
    "recipes: Gradient penalty in JAX": "---\nassert bool(finite) and grads.dtype == 'float32'",
    "recipes: Save and resume in JAX": """---
with open("last.pickle", "rb") as file:
    saved = pickle.load(file)
assert saved["loss_scale"].value == loss_scale.value
""",
    "migration: Gaudi": "---\nassert (y.dtype, weights.dtype) == (torch.bfloat16, 'float32') and loss.item() > 0",
}
"""Page and heading -> what runs around its blocks: before and after the line of dashes."""

PROGRAM = """
import json, os, sys
pages = json.loads(sys.argv[1])
os.chdir(sys.argv[2])
for page, (setup, blocks) in pages.items():
    scope = {"__name__": "page"}
    exec(compile(setup, f"setup of {page}", "exec"), scope)
    for heading, block, check in blocks:
        before, _, after = check.partition("---")
        exec(before, scope)
        exec(compile(block, f"{page}.md, {heading}", "exec"), scope)
        exec(after, scope)
    print("ran", page)
"""
RULES = 'extends = "tpu"\n\n[[rule]]\ncast = "fp32"\nwhy = "An example."\nsource = "a test"\noperations = ["tanh"]\n'
PROSE = ("jax", "tools")
"""Pages whose comments at prints are words about the output, not its start."""
WHOLE = ("../README", "../CONTRIBUTING")
"""Pages whose blocks are whole programs."""
PARTS = re.compile(r"^#+ ([^\n]+)$|^```(python(?! title=\"before\")[^\n]*|diff)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(heading, program, check) of a page's blocks, also those that a diff makes, but what a reader replaces."""
    found, heading = [], ""
    for title, kind, block in PARTS.findall((ROOT / "docs" / f"{page}.md").read_text()):
        heading = title or heading
        if block:
            found.append((heading, _after(block) if kind == "diff" else block, CHECKS.get(f"{page}: {heading}", "")))
    return found


def _after(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-")) + "\n"


def run(folder: Path, *pages: str, devices: int = 1) -> str:
    """What the blocks of pages print, all in one process in `folder`: also what their comments say."""
    for name in ("mine.toml", "rules.toml"):
        (folder / name).write_text(RULES)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    given = {page: [SETUPS[page], blocks(page)] for page in pages}
    done = forked.run(json.dumps(given), folder, program=PROGRAM, XLA_FLAGS=flags)
    printed = re.split(r"^ran .+\n", done.stdout, flags=re.MULTILINE)
    for page, text in zip(pages, printed[:-1], strict=True):
        if page in PROSE:
            continue
        program = "".join(block for _, block, _ in blocks(page))
        comments = re.findall(r"^ *print\(.*\)  # (?!the )([\w.]+)", program, re.MULTILINE)
        assert [word for word in comments if not re.search(rf"^{re.escape(word)}", text, re.MULTILINE)] == [], page
    return done.stdout


@pytest.mark.parametrize("program", [program for page in WHOLE for _, program, _ in blocks(page)])
def test_a_whole_program_runs_as_printed(program):
    """README's steps are replayed, an executable each; Python waits for what it prints only."""
    if "optax" in program:
        pytest.importorskip("optax")
    if "xla_amp.compile(step)" in program:
        program += "seen = xla_amp.metrics()\nassert (seen['executions'], seen['host_syncs']) == (100, 1), seen\n"
        program += "assert step.replays > 90, step.reasons\n"
    done = forked.run(program=program, warnings="error")
    assert ("print(" in program) == bool(done.stdout)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}.md" for page in SETUPS)])
def test_a_line_that_a_reader_copies_fits_beside_the_navigation(page):
    copied = re.findall(
        r"^```(?:python|bash|sh|toml|diff)[^\n]*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.M
    )
    assert [line for block in copied for line in block.splitlines() if len(line) > 88] == []


def test_every_page_with_python_is_run():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"../lowering/README"}
    assert {page for page in pages if blocks(page)} == set(SETUPS)
    headings = {f"{page}: {heading}" for page in SETUPS for heading, _, _ in blocks(page)}
    assert set(CHECKS) - headings == set()


@pytest.mark.full
def test_on_one_device(tmp_path):
    run(tmp_path, *(page for page in SETUPS if page not in ("distributed", "tutorial")))


@pytest.mark.full
def test_on_eight_devices(tmp_path):
    run(tmp_path, "distributed", devices=8)


@pytest.mark.full
def test_the_tutorial_trains_in_every_step(tmp_path):
    printed = run(tmp_path, "tutorial", devices=2)
    rows = re.findall(r"^(.+): (\d.+) to ([\d.]+)", printed, re.MULTILINE)
    losses = {name: (float(first), float(last)) for name, first, last in rows}
    assert list(losses) == ["float32", "bfloat16", "float16", "recorded", "2 devices"]
    first, last = losses["float32"]
    for start, end in losses.values():
        assert start == pytest.approx(first, rel=0.01)
        assert end == pytest.approx(last, rel=0.1)
        assert end < start
    assert losses["recorded"] == losses["bfloat16"]  # whose last steps were replayed
    shown = "".join(re.findall(r"^```text\n(.*?)^```", docs_figures.TUTORIAL.read_text(), re.DOTALL | re.MULTILINE))
    number = r"\d+\.\d+"
    for line in shown.splitlines():
        (found,) = (each for each in printed.splitlines() if re.sub(number, "", each) == re.sub(number, "", line))
        assert [*map(float, re.findall(number, line))] == pytest.approx(
            [*map(float, re.findall(number, found))], rel=1e-3
        )


def test_every_step_of_the_tutorial_has_a_figure():
    figures = docs_figures.TUTORIAL.read_text().partition("<!-- figures")[2]
    assert re.findall(r"^\| (.+?) \| [\d.]+ \| [\d.]+ \|$", figures, re.MULTILINE) == list(docs_figures.TUTORIAL_STEPS)
