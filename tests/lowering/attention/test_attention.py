"""Programs of the attention operation: products by dtype, and no score computed twice.

Values are tested in test_attention_forms.py, and through autograd in tests/lazy/ops/test_composites.py.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from harness import lowering_of, sample, to_array

from xla_amp import hardware
from xla_amp.lowering.attention import sdpa  # noqa: F401  (fills the table)

FORWARD = "_scaled_dot_product_fused_attention_overrideable"
B, H, L, S, D = 2, 4, 6, 7, 8


def both_passes(dtype: torch.dtype) -> jax.stages.Lowered:
    """A program of a causal call and its gradient."""

    def step(*arrays: Any) -> Any:
        options = {"platform": "cpu"}
        forward = lowering_of(FORWARD).function(*arrays, None, 0.0, True, False, **options)
        saved = (forward[0].astype(arrays[0].dtype), forward[1], None, None, L, S, 0.0, True, None, None)
        return lowering_of(f"{FORWARD}_backward").function(saved[0], *arrays, None, [True] * 4, *saved, **options)

    shapes = ((B, H, L, D), (B, H, S, D), (B, H, S, 5))
    arrays = [to_array(sample(*shape, dtype=dtype, seed=i)) for i, shape in enumerate(shapes)]
    return jax.jit(step).lower(*arrays)


@pytest.mark.parametrize("has_units", [True, False])
def test_a_bf16_product_widens_its_operands_only_for_a_cpu_without_units(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
):
    flags = frozenset({"avx512_bf16"} if has_units else ())
    monkeypatch.setattr(hardware, "processor", lambda: hardware.Processor("a CPU", 2, flags))
    products = [line for line in both_passes(torch.bfloat16).as_text().splitlines() if "dot_general" in line]
    assert len(products) == 7  # two forward, five backward; one of those recomputes a forward product
    low = [line.rsplit(" : ", 1)[1].count("bf16") for line in products]
    assert low.count(2) == (7 if has_units else 2)  # the two weight-like gradients contract rows of both operands
    assert low.count(0) == 7 - low.count(2)


def test_a_program_of_both_passes_computes_the_scores_once():
    compiled = both_passes(torch.float32).compile().as_text()
    assert sum(" exponential(" in line for line in compiled.splitlines()) == 1
