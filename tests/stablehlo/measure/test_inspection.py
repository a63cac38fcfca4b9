"""Counts of a small module, counted by hand."""

from __future__ import annotations

import pytest

from xla_amp.stablehlo import ir
from xla_amp.stablehlo.measure import inspection

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
    return inspection.inspect(ir.parse(MODULE))


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
