"""Counts of a small module, counted by hand."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from xla_amp.policy import float8
from xla_amp.report import terminal
from xla_amp.stablehlo import io, ir
from xla_amp.stablehlo.tools import inspection, targets

MODULE = """
func.func @main(%x: tensor<4x8xf32>, %w: tensor<8x8xbf16>, %n: tensor<?xi32>) -> (tensor<f32>, tensor<4x8xf32>) {
  %low = stablehlo.convert %x : (tensor<4x8xf32>) -> tensor<4x8xbf16> loc("cast")
  %dot = stablehlo.dot_general %low, %w, contracting_dims = [1] x [0]
    : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xf32>
  %wide = stablehlo.dot_general %dot, %dot, contracting_dims = [1] x [1]
    : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x4xf32>
  %whole = stablehlo.constant dense<0.0> : tensor<1024xf32>
  %parts = stablehlo.constant dense<[1.0, 2.0]> : tensor<2xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%dot init: %zero) applies stablehlo.add across dimensions = [0, 1]
    : (tensor<4x8xf32>, tensor<f32>) -> tensor<f32>
  %many = stablehlo.convert %n : (tensor<?xi32>) -> tensor<?xf32>
  %called = call @other(%dot) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %sum, %called : tensor<f32>, tensor<4x8xf32>
}
func.func private @other(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.tanh %x : tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}
"""


@pytest.fixture(scope="module")
def found():
    return inspection.inspect(ir.parse(MODULE), largest=3)


def test_counts(found):
    f32 = (4 * 8 + 4 * 4 + 1024 + 2 + 1 + 1 + 1 + 4 * 8 + 4 * 8) * 4  # in program order; the dynamic one counts as 1
    assert found.dtypes == {"f32": (9, f32), "bf16": (1, 4 * 8 * 2)}
    assert list(found.dtypes) == ["f32", "bf16"]
    assert found.operations["constant"] == {"f32": 3}
    assert found.operations["tanh"] == {"f32": 1}
    assert "add" not in found.operations  # the scalar body of the reduction
    assert "return" not in found.operations


def test_contractions_and_casts_by_dtype(found):
    assert found.contractions == {("bf16", "bf16", "f32"): 1, ("f32", "f32", "f32"): 1}
    assert found.casts == {("f32", "bf16"): (1, 64), ("i32", "f32"): (1, 4)}


def test_sizes(found):
    assert found.arguments == 4 * 8 * 4 + 8 * 8 * 2 + 4
    assert found.results == 4 + 4 * 8 * 4
    assert found.constants == 4 + 2 * 4 + 4  # equal elements are stored once
    assert [(value.name, value.type, value.bytes) for value in found.largest] == [
        ("constant", "f32[1024]", 4096),
        ("argument 0", "f32[4,8]", 128),
        ("argument 1", "bf16[8,8]", 128),
    ]


def test_as_plain_data(found):
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["contractions"][0] == {"left": "bf16", "right": "bf16", "result": "f32", "count": 1}
    assert plain["casts"][0] == {"from": "f32", "to": "bf16", "count": 1, "bytes": 64}
    assert plain["targets"] == {}


def test_what_the_policy_fp8_would_gain_and_lose():
    def model(x, wide, small, odd):
        with jax.named_scope("lm_head"):
            head = x @ wide
        return x @ wide, x[:64] @ small, x @ odd, jnp.sin(x).T @ jnp.sin(x), head

    shapes = ((16384, 4096), (4096, 4096), (4096, 16), (4096, 30))
    program = jax.jit(model).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    found = inspection.inspect(program, targets=["cpu", "h200"])
    assert list(found.float8) == ["h200"]
    products = found.float8["h200"]
    takes, loses, narrow, no_weight, head = sorted(products, key=lambda each: (each.module, products.index(each)))
    expected = float8.estimate(16384, 4096, 4096, "h200")
    for each in (takes, head):
        assert (each.seconds_16_bits, each.seconds_8_bits, each.seconds_scaling) == expected
    assert takes.cast == "fp8"
    assert head.cast == loses.cast == narrow.cast == no_weight.cast == "low"
    assert loses.seconds_8_bits > loses.seconds_16_bits > 0
    assert no_weight.seconds_8_bits is None
    text = str(found)
    assert "What the policy fp8 would take on h200" in text
    note = " ".join(text[text.index("Not in 8 bits:") :].split())
    for why in (
        "1 x slower, with the scaling",
        "30, no multiple of 16",
        "1 x neither operand",
        "1 x The logits of a head",
    ):
        assert why in note
    plain = json.loads(json.dumps(found.to_dict()))["float8"]["h200"]
    assert [each["cast"] for each in plain].count("fp8") == 1


@pytest.mark.parametrize(
    ("element", "size"),
    [("f32", 4), ("bf16", 2), ("i1", 1), ("ui16", 2), ("complex<f32>", 8), ("f8E4M3FN", 1), ("i4", 0.5)],
)
def test_bytes_of_element_types(element, size):
    module = ir.parse(
        f"func.func @main(%x: tensor<6x{element}>) -> tensor<6x{element}> {{ return %x : tensor<6x{element}> }}"
    )
    assert inspection.inspect(module).arguments == 6 * size


def test_products_in_8_bits_already_are_told_as_they_are():
    kind = "tensor<64x64xf8E4M3FN>"
    dot = f"%0 = stablehlo.dot %x, %x : ({kind}, {kind}) -> tensor<64x64xf32>"
    text = f"func.func @main(%x: {kind}) -> tensor<64x64xf32> {{ {dot} return %0 : tensor<64x64xf32> }}"
    [decision] = inspection._float8(io.read(text.encode()), "h100")
    assert decision.before == decision.after == "float8_e4m3fn"
    assert "rounds its operands to 8-bit floats itself" in decision.why


def test_a_program_that_cannot_be_converted_is_inspected():
    found = dataclasses.replace(inspection.inspect(ir.parse(MODULE)), float8={"h100": "for a reason"})
    shown = terminal.text(found.document())
    assert "the program cannot be converted\n-------------------------------\nfor a reason" in shown
    assert found.to_dict()["float8"] == {"h100": "for a reason"}


def test_targets_are_compiled_for_and_failures_are_told():
    program = io.read(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).as_text().encode())
    with targets.Compilers() as compilers:
        found = inspection.inspect(program, targets=["cpu", "nowhere"], compilers=compilers)
    assert found.targets["cpu"].contractions() == {("float32", "float32", "float32"): 1}
    assert found.targets["nowhere"].startswith("target 'nowhere': expected one of cpu")
    plain = found.to_dict()["targets"]
    assert "hlo" not in plain["cpu"]
    assert plain["cpu"]["contractions"][0]["count"] == 1
    assert plain["nowhere"] == {"error": found.targets["nowhere"]}
