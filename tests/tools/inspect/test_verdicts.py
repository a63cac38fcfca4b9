"""`compare`: what float32 cannot compute, NaN, programs without results, products that XLA:CPU cannot run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp import cli
from xla_amp.errors import ModuleError
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.autocast import autocast
from xla_amp.tools.inspect.comparison import compare


def lowered(function, *arguments):
    return jax.jit(function).lower(*arguments)


def attention(parameters, x):
    query = x @ parameters["query"]
    key = x @ parameters["key"] + parameters["key_bias"]
    weights = jax.nn.softmax(query @ key.T / 4.0)
    return jnp.sum((weights @ x) ** 2)


def of_attention():
    made = np.random.default_rng(0)
    parameters = {name: jnp.asarray(made.standard_normal((16, 16)), jnp.float32) / 4 for name in ("query", "key")}
    parameters["key_bias"] = jnp.asarray(made.standard_normal(16), jnp.float32)
    return lowered(jax.grad(attention), parameters, jnp.asarray(made.standard_normal((8, 16)), jnp.float32))


def test_a_gradient_that_is_only_rounding_is_listed_and_not_judged():
    program = of_attention()
    found = compare(program, autocast(program))
    skipped = [each.name for each in found.outputs if not each.judged]
    assert skipped == ["result['key_bias']"]
    assert next(each for each in found.outputs if not each.judged).error.relative > 0.5
    assert found.agrees(0.05)
    assert "result['key_bias']: not judged: it is rounding error in float32 already" in " ".join(str(found).split())


def test_a_result_that_is_not_judged_counts_if_it_is_not_finite():
    program = of_attention()
    module = ir.parse(program.as_text())
    last = list(ir.entry(module).regions[0].blocks[0].operations)[-1].operation
    with module.context, ir.mlir().Location.unknown(), ir.mlir().InsertionPoint(last):
        bias = last.operands[1]  # sorted by name: key, key_bias, query
        zero = ir.dialect().subtract(bias, bias)
        last.operands[1] = ir.dialect().divide(zero, zero)
    assert not compare(program, module).agrees()


NAN = """
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %nan = stablehlo.constant dense<0x7FC00000> : tensor<4xf32>
  %0 = stablehlo.add %x, %nan : tensor<4xf32>
  return %0, %x : tensor<4xf32>, tensor<4xf32>
}
"""


def test_all_nan_is_no_agreement(tmp_path, capsys):
    found = compare(NAN, NAN)
    assert np.isnan(found.outputs[0].error.relative)
    assert not found.agrees()
    (tmp_path / "a.mlir").write_text(NAN)
    assert cli.main(["compare", str(tmp_path / "a.mlir"), str(tmp_path / "a.mlir")]) == 1
    assert "none is finite in A and in B" in " ".join(capsys.readouterr().out.split())


def test_another_infinity_is_no_agreement():
    up, down = (lowered(lambda x, sign=sign: jnp.stack([x[0], sign * jnp.inf]), jnp.ones(2)) for sign in (1, -1))
    assert compare(up, up).agrees()
    assert not compare(up, down).agrees()


def test_a_program_without_a_result_is_an_error(tmp_path, capsys):
    text = "func.func @main(%x: tensor<4xf32>) {\n  return\n}\n"
    with pytest.raises(ModuleError, match="A and B give no result: there is nothing to compare"):
        compare(text, text)
    (tmp_path / "a.mlir").write_text(text)
    assert cli.main(["compare", str(tmp_path / "a.mlir"), str(tmp_path / "a.mlir")]) == 1
    assert "give no result" in capsys.readouterr().err
