"""Rules for operations that a StableHLO program contains in parts: operands and results follow, the parts do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest

from xla_amp.stablehlo import autocast

nn = pytest.importorskip("flax.linen")


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(name="ln")(nn.Dense(8, name="body")(x))
        x = nn.softmax(nn.Dense(8, name="q")(nn.silu(x)))
        return nn.log_softmax(nn.Dense(8, name="head")(x))


X = jnp.linspace(-1, 1, 16).reshape(2, 8)
PARAMS = jax.tree.map(
    lambda each: 0.3 + np.cos(np.arange(each.size, dtype=np.float32)).reshape(each.shape) / 4,
    jax.eval_shape(Model().init, jax.random.key(0), X),
)
LOWERED = jax.jit(Model().apply).lower(PARAMS, X)


def decided(rules: Any, program: Any = LOWERED) -> tuple[Any, set[tuple[str, str, str]]]:
    converted = autocast(program, rules=rules, strict=True)
    return converted, {
        (each.operation, each.after, *each.result) for each in converted.report.operations if each.layer == "context"
    }


@pytest.mark.parametrize("name", ["log_softmax", "layer_norm", "silu"])
@pytest.mark.parametrize(("cast", "dtype"), [("low", "bfloat16"), ("fp32", "float32"), ("fp32_out", "float32")])
def test_operands_and_result_follow_the_rule(name: str, cast: str, dtype: str) -> None:
    converted, found = decided({name: cast})
    assert found == {(name, dtype, dtype)}
    text = converted.text()
    assert "amp." not in text
    assert not any("exponential" in line and "bf16" in line for line in text.splitlines())
    assert not any("rsqrt" in line and "bf16" in line for line in text.splitlines())
    result = module_runs.run(converted.module, [*jax.tree.leaves(PARAMS), X])[0]
    np.testing.assert_allclose(result, jax.jit(Model().apply)(PARAMS, X), atol=0.02)


@pytest.mark.parametrize("policy", ["tpu", "cautious", "lean"])
def test_a_softmax_in_parts_has_float32_exponentials_and_sums(policy: str) -> None:
    """Nothing names the parts of `jax.nn.softmax`: they are float32 anyway, and the products around them low."""
    text = autocast(LOWERED, policy=policy).text()
    lines = {name: [line for line in text.splitlines() if f"stablehlo.{name}" in line] for name in ("exp", "dot")}
    sums = [line for line in text.splitlines() if "applies stablehlo.add" in line]
    assert len(lines["exp"]) == 3  # of silu, softmax and log_softmax
    assert not any("bf16" in line for line in (*lines["exp"], *sums))
    assert len(lines["dot"]) == 3
    assert all("xbf16>, tensor" in line for line in lines["dot"])


@pytest.mark.parametrize("pattern", ["module:*.ln.layer_norm", "module:*.ln"])
def test_a_rule_for_a_module_reaches_it(pattern: str) -> None:
    assert ("layer_norm", "float32", "float32") in decided({pattern: "fp32"})[1]


def test_a_composite_operation_is_followed() -> None:
    text = """
    func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = stablehlo.composite "aten.gelu" %x {decomposition = @gelu.impl} : (tensor<4xf32>) -> tensor<4xf32>
      return %y : tensor<4xf32>
    }
    func.func private @gelu.impl(%x: tensor<4xf32>) -> tensor<4xf32> {
      %t = stablehlo.tanh %x : tensor<4xf32>
      %y = stablehlo.multiply %x, %t : tensor<4xf32>
      return %y : tensor<4xf32>
    }"""
    converted, found = decided({"gelu": "low"}, text)
    assert found == {("gelu", "bfloat16", "bfloat16")}
    assert "amp." not in converted.text()
    assert "stablehlo.tanh %" in converted.text()
    assert not any("tanh" in line and "bf16" in line for line in converted.text().splitlines())
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    np.testing.assert_allclose(module_runs.run(converted.module, [x])[0], x * np.tanh(x), atol=0.01)
    assert "composite" in autocast(text).text()  # without a rule it is left alone


def test_a_log_softmax_with_a_symbolic_batch() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(jax.nn.log_softmax))(jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    report = autocast(exported, rules={"log_softmax": "low"}, strict=True).report
    assert {each.result for each in report.operations if each.operation == "log_softmax"} == {("bfloat16",)}
