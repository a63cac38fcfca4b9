"""docs/recipes.md: its blocks run, print what their comments say, and do what the lines above them claim."""

from __future__ import annotations

import json
import os
import re

import forked
import pytest
from source_tree import ROOT, python_blocks

CHECKED = """
import json, os, sys
pages, folder = json.loads(sys.argv[1]), sys.argv[2]
os.chdir(folder)
scope = {"__name__": "recipes"}
for title, block, check in pages:
    before, _, after = check.partition("---")
    exec(before, scope)
    exec(compile(block, f"recipes.md, {title}", "exec"), scope)
    exec(after, scope)
    print("ran", title)
"""

COUNTED = """
counting = xla_amp.testing.counts()
seen = counting.__enter__()
---
counting.__exit__(None, None, None)
xla_amp.sync(wait=True)
"""

CHECKS = {
    "Clip gradients": "---\nassert sum(p.grad.square().sum().item() for p in model.parameters()) <= 1.001",
    "Accumulate gradients": COUNTED + "assert seen.host_syncs == 0 and seen.executions <= 2",
    "Gradient penalty": COUNTED + "assert seen.host_syncs == 0\nassert (norm > 0).item()",
    "Several models, losses and optimizers": COUNTED + "assert seen.host_syncs == 0",
    "Custom autograd functions": """---
product.sum().backward()
assert x.grad.dtype == weight.grad.dtype == torch.float32 and weight.grad.abs().sum().item() > 0
""",
    "Save and resume": """
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
    "Learning-rate schedules": COUNTED
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
    "Evaluation": """
xla_amp.sync(wait=True)
counting = xla_amp.testing.counts()
seen = counting.__enter__()
---
counting.__exit__(None, None, None)
assert seen.host_syncs == 1 and seen.compilations <= 2, seen
""",
    "Packed sequences": """---
assert output.shape == (3, 5, 16) and lengths.tolist() == [5, 2, 3]
xla_amp.sync(wait=True)
with xla_amp.testing.counts() as seen, xla_amp.autocast(device):
    packed = pack_padded_sequence(texts, torch.tensor([4, 5, 1]), batch_first=True, enforce_sorted=False)
    output, lengths = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=5)
    xla_amp.sync()
assert seen.compilations == 0 and seen.host_syncs == 0, seen
""",
    "Flax linen": "---\nassert loss.dtype == 'float32' and loss_scale.skipped <= 1",
    "Equinox": "---\nassert loss.dtype == 'float32'",
    "Gradient penalty in JAX": "---\nassert bool(finite) and grads.dtype == 'float32'",
    "Save and resume in JAX": """---
with open("last.pickle", "rb") as file:
    saved = pickle.load(file)
assert saved["loss_scale"].value == loss_scale.value
""",
}
"""Heading -> what runs around its blocks: before and after the line of dashes."""


@pytest.mark.full  # as the blocks of other pages
def test_each_recipe_runs_and_does_what_it_says(tmp_path):
    page = (ROOT / "docs" / "recipes.md").read_text()
    sections = re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
    programs = [(title, block, CHECKS.get(title, "")) for title, text in sections for block in _blocks(text)]
    assert len(programs) == len(python_blocks("docs/recipes.md")) > 15
    assert set(CHECKS) <= {title for title, _, _ in programs}
    done = forked.run(json.dumps(programs), tmp_path, program=CHECKED, environment=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ran ")] == [f"ran {title}" for title, _, _ in programs]
    expected = re.findall(r"^ *print\(.*\)  # ([\w.]+)(?: |$)", page, re.MULTILINE)
    printed = [line for line in lines if not line.startswith("ran ")]
    assert all(any(line.startswith(start) for line in printed) for start in expected if start != "the")


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
