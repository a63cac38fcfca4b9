"""Programs from traces: JAX traces the lowering of each distinct instruction once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import xla_amp
from xla_amp import lowering

LIBRARY = torch.library.Library("traced_once", "DEF")


def test_each_distinct_instruction_is_traced_once(device: torch.device) -> None:
    LIBRARY.define("doubled(Tensor x) -> Tensor")
    LIBRARY.impl("doubled", torch.empty_like, "Meta")
    traced: list[tuple[int, ...]] = []

    @lowering.register("traced_once::doubled")
    def doubled(x: Any) -> Any:
        traced.append(x.shape)
        return x * 2

    x, y = torch.ones(2, 3).to(device), torch.ones(5).to(device)
    for _ in range(6):
        x, y = torch.ops.traced_once.doubled(x).tanh(), torch.ops.traced_once.doubled(y)
    assert y.tolist() == [64] * 5
    assert x.isfinite().all()
    assert sorted(traced) == [(2, 3), (5,)]


def test_a_program_that_is_read_has_each_operation_in_its_place(device: torch.device) -> None:
    """Operations of a program with places are not shared: each has the line and the module that it came from."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    text = xla_amp.export(lambda x: model(x), torch.ones(2, 4, device=device)).mlir_text
    assert text.count("call @") == text.count("call @lazy_step") == 1
