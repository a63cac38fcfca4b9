"""Rules that have no effect are reported, on every front; overrides around and inside of `jax.jit`; ``rules=``."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_malformed_and_ineffective import W, X, in_jax, in_stablehlo, step

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast


def test_a_function_that_jax_has_traced_before_counts() -> None:
    inner = jax.jit(jnp.tanh)
    with policy.override({"tanh": "fp32"}):
        for number in range(2):
            jax.make_jaxpr(autocast(lambda x, n=number: inner(x) + n, strict=True))(X)


def test_built_in_rules_never_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in policy.BUILTIN:
            jax.make_jaxpr(autocast(step, policy=name))(X, W)
            stablehlo.autocast(jax.jit(step).lower(X, W), policy=name)


def in_torch(rules: Any) -> None:
    with policy.override(rules), xla_amp.autocast("cpu", policy="tpu"):
        torch.tanh(torch.mm(torch.ones(2, 2), torch.ones(2, 2)))


@pytest.mark.parametrize("front", [in_jax, in_stablehlo, in_torch])
def test_reports_and_unused_rules_judge_the_same_patterns(
    front: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    rules = tmp_path / "rules.toml"  # rules of this file have had no effect before
    rules.write_text('[[rule]]\noperations = ["mm", "softmax", "module:*.head"]\ncast = "fp32"\n')
    monkeypatch.setenv("XLA_AMP_POLICY", str(rules))
    monkeypatch.setenv("XLA_AMP_RULES", "mm=low")  # outranks the file's
    without = ["softmax", "module:*.head"]
    if front is in_torch:
        front({"tanh": "low"})
    else:
        with pytest.warns(RuleWarning) as caught:
            front({"tanh": "low"})
        (warning,) = caught
        assert [line.split(" = ")[0].strip() for line in str(warning.message).splitlines()[1:]] == without
    listed = [(rule.operations, rule.cast) for rule in policy.unused_rules("tpu") if str(rules) in rule.origin]
    assert listed == [(tuple(without), "fp32")]


def test_a_rule_that_its_operation_does_not_follow_is_unused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\noperations = ["scatter_add"]\ncast = "low"\n')
    monkeypatch.setenv("XLA_AMP_POLICY", str(rules))
    with pytest.warns(RuleWarning, match="scatter_add = low .*as it was writ"):
        jax.make_jaxpr(autocast(lambda x: x.at[0].add(1.0)))(X)
    assert [rule.operations for rule in policy.unused_rules("tpu")] == [("scatter_add",)]


# Overrides and jax.jit.


def low(function: Any) -> bool:
    return "bf16" in str(jax.make_jaxpr(function)(X, W))


def test_an_override_around_a_jitted_function_traces_it_again() -> None:
    traced = []

    def product(x: Any, w: Any) -> Any:
        traced.append(1)
        return x @ w

    jitted = jax.jit(autocast(product))
    before = jitted(X, W)
    with policy.override(mm="fp32"):
        exact = [jitted(X, W), jitted(X, W)]
    after = jitted(X, W)
    np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(exact[0], X @ W, rtol=1e-6)
    assert not np.allclose(before, exact[1], rtol=1e-5)
    assert len(traced) == 2, "once for each set of rules"


def inside(x: Any, w: Any) -> Any:
    with policy.override(mm="fp32"):
        return x @ w


def test_an_override_inside_a_function_under_autocast_raises() -> None:
    with pytest.raises(PolicyError, match=r'autocast\(part, rules={"mm": "fp32"}\)'):
        autocast(inside)(X, W)
    assert low(autocast(jnp.matmul))
    part = autocast(jnp.matmul, rules={"mm": "fp32"})  # what the message says
    assert not low(autocast(lambda x, w: part(x, w)))
    with policy.override(mm="fp32"):
        assert not low(autocast(jnp.matmul))


@pytest.mark.parametrize("transform", ["jit", "grad", "scan"])
def test_an_override_inside_a_transformed_function_raises(transform: str) -> None:
    jitted = jax.jit(inside)
    jitted(X, W)  # traced before, without autocast
    functions = {
        "jit": jitted,
        "grad": jax.grad(lambda x, w: inside(x, w).sum()),
        "scan": lambda x, w: jax.lax.scan(lambda carry, _: (inside(carry, w), None), x, None, length=2)[0],
    }
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"override\(mm=fp32\) opened inside a function under autocast"):
            autocast(functions[transform])(X, W)


# ``rules=`` of the fronts.


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


def test_a_rule_that_equals_the_devices_own_cast_has_matched(device: torch.device) -> None:
    """torch's own kernel would do the same without a word."""
    x = torch.ones(2, 2, device=device)
    with xla_amp.autocast(x.device, dtype=torch.bfloat16, rules={"mm": "low", "relu": "fp32"}, strict=True):
        assert torch.relu(torch.mm(x, x)).dtype is torch.float32


def test_strict_judges_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_RULES", "module:*.not_there_either=fp32")
    with pytest.raises(PolicyError, match="not_there_either"), xla_amp.autocast("cpu", strict=True):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
