"""``rules=`` of the fronts, and paths with slashes."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import xla_amp
import xla_amp.jax
from xla_amp import stablehlo
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.policy import effects


def routed(x: Any) -> Any:
    with jax.named_scope("router"):
        return x @ x


def device(name: str) -> torch.device:
    return xla_amp.xla_device() if name == "lazy" else torch.device(name)


def test_a_rule_that_matches_nothing_is_reported_when_the_region_closes() -> None:
    x = torch.ones(2, 2)
    missing: Any = {"module:*.never_there": "fp32"}
    expected = pytest.warns(RuleWarning, match=r"module:\*\.never_there = fp32 .*it has matched no operation")
    with expected, xla_amp.autocast("cpu", rules=missing):
        torch.mm(x, x)
    with pytest.raises(PolicyError, match="never_there"), xla_amp.autocast("cpu", rules=missing, strict=True):
        torch.mm(x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xla_amp.autocast("cpu", rules={"module:*.nor_there": "fp32"}, strict=True):
            pass  # no operation ran


@pytest.mark.parametrize("name", ["cpu", "lazy"])
def test_a_rule_that_equals_the_devices_own_cast_has_matched(name: str) -> None:
    """torch's own kernel would do the same without a word."""
    x = torch.ones(2, 2, device=device(name))
    with xla_amp.autocast(x.device, dtype=torch.bfloat16, rules={"mm": "low", "relu": "fp32"}, strict=True):
        assert torch.relu(torch.mm(x, x)).dtype is torch.float32


def test_strict_judges_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_RULES", "module:*.not_there_either=fp32")
    with pytest.raises(PolicyError, match="not_there_either"), xla_amp.autocast("cpu", strict=True):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize("rules", [{"*/router": "float32"}, {"sofmax": "fp32"}, {"/": "fp32"}])
def test_malformed_rules_are_refused_by_every_front(rules: Any) -> None:
    with pytest.raises(PolicyError):
        xla_amp.autocast("cpu", rules=rules)
    with pytest.raises(PolicyError):
        xla_amp.jax.autocast(routed, rules=rules)
    with pytest.raises(PolicyError):
        stablehlo.autocast(jax.jit(routed).lower(jnp.ones((4, 4))), rules=rules)


@pytest.mark.parametrize("name", ["cpu", "lazy"])
def test_a_rule_for_the_softmax_of_a_fused_attention_says_what_to_write(name: str) -> None:
    place = device(name)
    q = torch.ones(1, 1, 4, 8, device=place)
    module = torch.nn.Module()
    module.forward = lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)  # type: ignore[assignment]
    model = torch.nn.Sequential()
    model.add_module(f"attention_{name}", module)
    model.forward = lambda: module()  # type: ignore[assignment]
    written = f"module:*attention_{name}.softmax"
    instead = rf"write module:\*attention_{name}\.scaled_dot_product_attention = fp32"
    with pytest.warns(RuleWarning, match=instead), xla_amp.autocast(place, rules={written: "fp32"}, policy="tpu"):
        model()
    with xla_amp.autocast(place, rules={written.replace("softmax", effects.FUSED): "fp32"}, policy="tpu", strict=True):
        assert model().dtype is torch.float32
