"""Rules for operations that a jaxpr contains only in parts: found by the function that wrote the parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import nn
from torch.nn import functional as F

from xla_amp import policy
from xla_amp.common import events
from xla_amp.jax import autocast

X = jnp.linspace(-3, 3, 32).reshape(4, 8)
W = jnp.cos(jnp.arange(64.0)).reshape(8, 8)

# Name in the rule, JAX's function, torch's: one with sums, one without, one that only compares.
COMPOSITES = [
    ("softmax", nn.softmax, lambda x: F.softmax(x, -1)),
    ("gelu", lambda x: nn.gelu(x, approximate=False), F.gelu),
    ("relu", nn.relu, F.relu),
]


@pytest.mark.parametrize(("name", "function", "of_torch"), COMPOSITES, ids=lambda value: str(value)[:12])
def test_a_composite_computes_as_torchs_kernel(name: str, function: Any, of_torch: Any) -> None:
    def after_a_product(x: Any, w: Any) -> Any:
        return function(x @ w)

    product = torch.tensor(np.asarray(X)).bfloat16() @ torch.tensor(np.asarray(W)).bfloat16()
    cases: list[tuple[Any, Any, str]] = [("low", torch.bfloat16, "bfloat16"), ("fp32", torch.float32, "float32")]
    if name == "softmax":
        cases += [(cast, torch.bfloat16, "bfloat16") for cast in ("keep", "promote")]
    for cast, given, result in cases:
        with policy.override({name: cast}), events.capture() as records:
            got = jax.jit(autocast(after_a_product, strict=True))(X, W)
        (record,) = [each for each in records if each.layer == "override"]
        # A product that only a maximum reads on its way to the result keeps its float32 sums.
        read = "float32" if name == "relu" else "bfloat16"
        assert (record.cast, record.given[0], record.result) == (cast, read, (result,))
        wanted = of_torch(product.to(given))
        # JAX rounds the product after summing in another order, and the two libraries' functions differ by an ulp.
        tolerance = 0.02 if result == "bfloat16" else 0.01
        np.testing.assert_allclose(got, wanted.float().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["relu6", "softplus", "elu", "leaky_relu", "mish"])
def test_a_rule_finds_the_function(name: str) -> None:
    """Others are in test_one_rule_one_meaning.py."""
    with policy.override({name: "low"}), events.capture() as records:
        jax.make_jaxpr(autocast(getattr(nn, name), strict=True))(X)
    (record,) = [each for each in records if each.layer == "override"]
    assert record.result == ("bfloat16",)


def test_a_rule_for_a_part_does_not_reach_into_a_ruled_composite() -> None:
    with policy.override({"softmax": "fp32", "exp": "low"}), events.capture() as records:
        jax.make_jaxpr(autocast(lambda x: jnp.exp(nn.softmax(x)), strict=True))(X)
    decided = [(each.operation, each.used) for each in records if each.layer == "override"]
    assert decided == [("softmax.int", ("float32",)), ("exp", ("bfloat16",))]


def test_without_a_rule_the_parts_are_decided_as_before() -> None:
    with events.capture() as records:
        jax.make_jaxpr(autocast(nn.softmax))(X)
    assert "exp" in [each.operation for each in records]
    with policy.override(exp="low"), events.capture() as records:
        jax.make_jaxpr(autocast(nn.softmax, strict=True))(X)
    assert [each.operation for each in records if each.layer == "override"] == ["exp"]
