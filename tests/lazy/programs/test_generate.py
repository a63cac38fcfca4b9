"""Text generation compiles few programs, and asks the host without waiting for the device."""

from __future__ import annotations

import pytest
import torch

from xla_amp import lazy as engine
from xla_amp.testing import counts as counted


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
    engine.sync()
    with counted() as counts:
        got = model.generate(ids, cache_implementation="static", **options)
    assert counts.compilations <= 2
    assert got.tolist() == expected.tolist()
    with counted() as counts:
        model.generate(ids, cache_implementation="static", **options)
    assert counts.compilations == 0


def test_a_state_that_is_asked_for_each_time_is_computed_once(device: torch.device) -> None:
    """As the flags of unfinished sequences: each depends on all before it."""

    def loop(device: torch.device | str, cut: int) -> list[bool]:
        unfinished = torch.tensor([1, 1, 1]).to(device)
        answers = []
        for i in range(12):
            done = torch.full((3,), i >= 9, device=device)
            unfinished = unfinished & ~done
            answers.append(bool(unfinished.max() == 0))
            if i == cut:
                engine.sync()
        return answers

    expected = loop("cpu", -1)
    with counted() as counts:
        assert loop(device, 5) == expected
    assert (counts.host_syncs, counts.host_values) == (0, 12)
    assert counts.compilations <= 5  # the first, the others, and those for full(True); the end of the step


def test_iterations_that_grow_are_steps(device: torch.device) -> None:
    class Next(torch.nn.Module):
        def forward(self, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            last = (state[-1:] @ weight).tanh().cos() / 2
            return torch.cat([state, last.exp().sin().sigmoid() - 1])

    model, weight = Next(), torch.arange(9.0).reshape(3, 3)

    def loop(weight: torch.Tensor) -> torch.Tensor:
        state = torch.ones(1, 3).to(weight.device)
        for _ in range(8):
            state = model(state, weight)
        return state

    expected, moved = loop(weight), weight.to(device)
    engine.sync()
    with torch.no_grad(), counted() as counts:
        got = loop(moved).cpu()
    torch.testing.assert_close(got, expected)
    assert counts.executions >= 3
