"""Text generation compiles few programs; for a sequence that grows docs/pytorch.md has a remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp.testing import counts as counted

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
    for most in (4, 0):
        with counted() as counts:
            assert generate(model, prompt, 20).tolist() == expected.tolist()
        assert counts.compilations <= most


def test_transformers_with_a_static_cache_has_two_programs(device: torch.device) -> None:
    """The token ids stay on the CPU, so that nothing that grows reaches the device."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}
    config = transformers.LlamaConfig(**size, num_hidden_layers=1, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    model.to(device)
    xla_amp.sync()
    for most in (2, 0):
        with counted() as counts:
            got = model.generate(ids, cache_implementation="static", **options)
        assert counts.compilations <= most
        assert got.tolist() == expected.tolist()
