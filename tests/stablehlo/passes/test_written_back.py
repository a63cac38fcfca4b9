"""What a conversion writes: programs that run, the same bytes twice, and nothing where nothing is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import calls
import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from jax import export

from xla_amp import cli
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.api import autocast
from xla_amp.stablehlo.measure import execution, inspection, samples
from xla_amp.stablehlo.measure.comparison import compare

E, W, IDS = jnp.ones((50, 16)), jnp.ones((16, 16)), jnp.zeros((4, 8), jnp.int32)


def gpt2(p, ids):
    x = jnp.tanh(p["E"][ids] @ p["W"])
    logits = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) @ p["E"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1).mean()


def bert(p, ids):
    x = jnp.tanh(p["E"][ids] @ p["W"]).reshape(-1, 16)
    return jax.nn.logsumexp((p["E"] @ x.T).T, -1).mean()


def update(p, ids):
    gradient = jax.grad(gpt2)(p, ids)
    norm = jnp.sqrt(sum(jnp.sum(each**2) for each in gradient.values()))
    return {name: p[name] - 0.1 * gradient[name] / jnp.maximum(norm, 1.0) for name in p}


STEPS = {
    "gpt2": (jax.value_and_grad(gpt2), ({"E": E, "W": W}, IDS)),
    "bert": (jax.value_and_grad(bert), ({"E": E, "W": W}, IDS)),
    "clipped": (update, ({"E": E, "W": W}, IDS)),
    "abs": (lambda x, m: jnp.abs(jnp.fft.rfft(x)) @ m, (jnp.ones((4, 64)), jnp.ones((33, 8)))),
}


@pytest.mark.parametrize(("function", "arguments"), STEPS.values(), ids=STEPS)
def test_it_runs_as_it_is_and_converts_twice_to_the_same(function, arguments):
    program = export.export(jax.jit(function))(*arguments)
    once = autocast(program)
    assert once.report.casts
    module_runs.run(
        once.module, samples.random_inputs(once.module, 0), execution.devices("cpu")[0]
    )  # without `widen.for_cpu`
    found = compare(program, once)
    assert found.agrees(0.05)
    twice = autocast(once)
    assert (dict(twice.report.casts), twice.report.folded) == ({}, 0)
    assert twice.bytecode() == once.bytecode()
    assert twice.artifact() == once.artifact()


def test_pairs_of_transposes_are_folded():
    text = autocast(export.export(jax.jit(jax.grad(gpt2)))({"E": E, "W": W}, IDS)).text()
    assert text.count("stablehlo.transpose") == 1  # of E, before the logits


BFLOAT16 = """module {
  func.func public @main(%arg0: tensor<4x4xbf16>, %arg1: tensor<4x4xf32>) -> (tensor<4x4xbf16>, tensor<4x4xf32>) {
    %0 = stablehlo.exponential %arg1 : tensor<4x4xf32>
    %1 = stablehlo.convert %arg1 : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %2 = stablehlo.dot_general %arg0, %1, contracting_dims = [1] x [0] : (tensor<4x4xbf16>, tensor<4x4xbf16>) -> tensor<4x4xbf16>
    %3 = stablehlo.convert %arg1 : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %4 = stablehlo.add %2, %3 : tensor<4x4xbf16>
    return %4, %0 : tensor<4x4xbf16>, tensor<4x4xf32>
  }
}

"""  # noqa: E501 - as MLIR prints it


def test_a_bfloat16_program_that_needs_nothing_is_unchanged(tmp_path):
    source, out = tmp_path / "in.mlir", tmp_path / "out.mlir"
    source.write_text(BFLOAT16)
    assert cli.main(["convert", str(source), "-o", str(out), "--quiet"]) == 0
    assert out.read_text().strip() == BFLOAT16.strip()
    low = jnp.ones((4, 4), jnp.bfloat16)
    program = export.export(jax.jit(lambda x: jnp.tanh(x @ x)))(low)
    blob = program.serialize(vjp_order=1)
    (tmp_path / "in.jax_export").write_bytes(blob)
    assert cli.main(["convert", str(tmp_path / "in.jax_export"), "-o", str(tmp_path / "out.jax_export"), "-q"]) == 0
    assert export.deserialize(bytearray((tmp_path / "out.jax_export").read_bytes())).has_vjp()


@pytest.mark.full
def test_the_hash_seed_changes_nothing():
    program = "import sys, hashlib; from xla_amp.stablehlo import autocast; "
    program += "print(hashlib.sha256(autocast(sys.stdin.read()).bytecode()).hexdigest())"
    text = jax.jit(jax.grad(gpt2)).lower({"E": E, "W": W}, IDS).as_text()
    command = [sys.executable, "-c", program]
    environments = [{**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"} for seed in "12"]
    found = {
        subprocess.run(command, input=text, env=env, capture_output=True, text=True).stdout for env in environments
    }
    assert len(found) == 1
    assert found != {""}


HYBRID = {
    "dot_general": """func.func @main(%x: tensor<4x16xf32>, %w: tensor<16x8x!quant.uniform<i8:f32, 0.5>>) -> tensor<4x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<4x16xf32>, tensor<16x8x!quant.uniform<i8:f32, 0.5>>) -> tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}
""",  # noqa: E501
    "convolution": """func.func @main(%x: tensor<1x8x8x3xf32>,
    %w: tensor<3x3x3x2x!quant.uniform<i8:f32:3, {0.5, 0.25}>>)
    -> tensor<1x6x6x2xf32> {
  %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<1x8x8x3xf32>, tensor<3x3x3x2x!quant.uniform<i8:f32:3, {0.5, 0.25}>>) -> tensor<1x6x6x2xf32>
  return %0 : tensor<1x6x6x2xf32>
}
""",
}


@pytest.mark.parametrize("operation", HYBRID)
def test_a_product_with_quantized_weights_stays_as_it_is(operation, tmp_path, capsys):
    converted = autocast(HYBRID[operation])
    assert converted.text() == ir.text(ir.parse(HYBRID[operation]))
    (row,) = [each for each in converted.report.operations if each.product]
    assert row.operation == f"{operation}.quantized"
    assert row.before == row.after == "float32"
    assert "quantized" in row.why
    assert inspection.inspect(converted.program).dtypes
    (tmp_path / "in.mlir").write_text(HYBRID[operation])
    assert cli.main(["convert", str(tmp_path / "in.mlir"), "-o", str(tmp_path / "out.mlir")]) == 0
    assert "quantized" in capsys.readouterr().out


def test_text_is_read_once_and_a_module_stays_as_it_is():
    text = jax.jit(lambda x, w, b: jnp.tanh(x @ w + b).sum()).lower(E, W, W[0]).as_text()
    autocast(text)
    made = calls.of(lambda: autocast(text))
    assert len(made) <= 900  # of Python functions
    assert made.count("xla_amp/stablehlo/ir.py:parse") == 1
    module = ir.parse(text)
    before = ir.text(module)
    assert autocast(module).text() == autocast(text).text() != before
    assert ir.text(module) == before


BLOCKS = """func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = call @several(%0) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}
func.func private @several(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.tanh %0 : tensor<8x8xf32>
  %2 = stablehlo.constant dense<true> : tensor<i1>
  cf.br ^other(%2 : tensor<i1>)
^other(%p: tensor<i1>):
  %3 = stablehlo.dot_general %1, %1, contracting_dims = [1] x [0]
    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %3 : tensor<8x8xf32>
}
"""


def test_functions_of_several_blocks_stay_and_are_named():
    converted = autocast(BLOCKS)
    assert converted.report.unconverted == ("several",)
    assert "not converted   several: functions of several blocks" in str(converted.report)
    assert converted.report._repr_html_() == converted.report.page().html()  # in a notebook
    before, after = (text.partition("@several(%arg")[2] for text in (ir.text(ir.parse(BLOCKS)), converted.text()))
    assert before == after != ""
    assert converted.report.casts == {"f32->bf16": 1}
    x = np.eye(8, dtype=np.float32)
    assert module_runs.run(converted.module, [x], execution.devices("cpu")[0])[0].shape == (8, 8)


def descent(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


@pytest.mark.parametrize(
    ("steps", "rounded"),
    [
        (descent, [False]),
        (lambda w, x: descent(descent(w, x), x), [True, False]),
        (lambda w, x: jax.lax.fori_loop(0, 3, lambda _, w: descent(w, x), w), [True]),
    ],
    ids=["one", "unrolled", "loop"],
)
def test_a_gradient_is_rounded_where_a_later_step_reads_it(steps, rounded):
    text = autocast(jax.jit(steps).lower(W, jnp.ones((8, 16)))).text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    gradients = [line for line in products if re.search(r"-> tensor<16x16x\w+>$", line)]
    assert [line.endswith("bf16>") for line in gradients] == rounded
