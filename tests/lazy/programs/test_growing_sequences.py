"""A loop whose sequence grows is warned about, and the loop of docs/pytorch.md has four programs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp.errors import RecompileWarning

PAGE = Path(__file__).parents[3] / "docs" / "pytorch.md"


class Causal(nn.Module):
    """A decoder's layer with positions, as minGPT has it: no cache, no mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.out = nn.Embedding(32, 16), nn.Embedding(64, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.out(x)

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids


def recipe() -> Any:
    """``generate`` of the page."""
    (block,) = re.findall(r"```python\n(@torch.no_grad\(\)\ndef generate.*?)\n\n\n", PAGE.read_text("utf-8"), re.S)
    scope = {"torch": torch}
    exec(block, scope)
    return scope["generate"]


def test_the_recipe_gives_the_tokens_of_the_growing_loop_with_few_programs(device: torch.device) -> None:
    model, prompt, generate = Causal().eval(), torch.tensor([[5, 6, 7], [1, 9, 3]]), recipe()
    expected = model.generate(prompt, 20)
    model.to(device)
    prompt = prompt.to(device)
    xla_amp.sync(wait=True)
    counts = []
    for count in (20, 20):
        xla_amp.metrics.reset()
        assert generate(model, prompt, count).tolist() == expected.tolist()
        counts.append(xla_amp.metrics()["compilations"])
    assert counts[0] <= 4
    assert counts[1] == 0


def test_a_sequence_that_grows_is_told_what_to_do_once(device: torch.device) -> None:
    model, prompt = Causal().eval().to(device), torch.tensor([[5, 6, 7]]).to(device)

    def decode(ids: torch.Tensor) -> None:
        for _ in range(9):
            ids = model.generate(ids, 1)
            if ids[0, -1].item() == 99:  # "is it the end?"
                break

    xla_amp.metrics.reset()
    with pytest.warns(RecompileWarning) as caught:
        decode(prompt)
    (text,) = [str(each.message) for each in caught]
    assert "for a sequence that grows see docs/pytorch.md#sequences-that-grow" in text
    assert re.match(rf"{__file__}:\d+ has compiled 6 programs", text)


def test_lengths_that_go_up_and_down_are_told_to_be_padded(device: torch.device) -> None:
    model = Causal().eval().to(device)
    xla_amp.metrics.reset()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", RecompileWarning)
        for length in (3, 9, 4, 11, 7, 13, 5):
            model(torch.full((1, length), 4).to(device)).cpu()
    (text,) = [str(each.message) for each in caught if each.category is RecompileWarning]
    assert "xla_amp.pad_to_bucket" in text
