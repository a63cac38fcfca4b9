"""Programs from traces: JAX traces the lowering of each distinct instruction once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp.lazy.programs import compile as compiling
from xla_amp.lazy.programs import execute
from xla_amp.lowering.training import optim


@pytest.mark.parametrize("layers", [2, 6])
def test_each_distinct_instruction_is_traced_once(
    device: torch.device, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    width = 8 + layers  # new instructions: what an earlier program has traced is not traced again
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(4, width).to(device)
    xla_amp.sync()
    execute.clear_programs()
    traced: Counter[tuple[int, bool]] = Counter()
    updates: list[Any] = []
    emit, step = compiling.emit, optim.adam_step

    def counted(instruction: Any, context: Any, *arguments: Any) -> Any:
        traced[instruction.id, context.wide] += 1
        return emit(instruction, context, *arguments)

    def stepped(param: Any, *arguments: Any, **options: Any) -> Any:
        updates.append(param.shape)
        return step(param, *arguments, **options)

    monkeypatch.setattr(compiling, "emit", counted)
    monkeypatch.setattr(optim, "adam_step", stepped)
    with xla_amp.autocast(device):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    xla_amp.sync()
    [program] = execute.programs()
    operations = [each for each in program.instructions.values() if each.emit is not None]
    assert set(traced.values()) == {1}
    assert len(traced) == len(operations) < program.operations
    assert sorted(updates) == [(width,), (width, width)]  # of 4 parameters a layer


def test_a_program_that_is_read_has_each_operation_in_its_place(device: torch.device) -> None:
    """Operations of a program with places are not shared: each has the line and the module that it came from."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    text = xla_amp.export(lambda x: model(x), torch.ones(2, 4, device=device)).mlir_text
    assert text.count("call @") == text.count("call @lazy_step") == 1
