"""Shardings in a module name the axes of the values that they are attributes of, also after a conversion."""

from __future__ import annotations

import pytest

from xla_amp.stablehlo import autocast, ir
from xla_amp.stablehlo.passes.canonicalize import untranspose

MODULES = {
    "sdy": ('{"x"}, {"y"}', '{"y"}, {"x"}', "sdy.sharding = #sdy.sharding_per_value<[<@mesh, [%s]>]>"),
    "mhlo": ("devices=[2,2]0,2,1,3", "devices=[2,2]0,1,2,3", 'mhlo.sharding = "{%s}"'),
    "mhlo iota": ("devices=[2,2]<=[2,2]T(1,0)", "devices=[2,2]<=[4]", 'mhlo.sharding = "{%s}"'),
}
"""Dialect -> sharding of a product with its axes split, that of its transpose, the attribute."""


def module(before: str, after: str) -> str:
    """The gradient of a weight as JAX differentiates it: a transpose of a product, each with attributes."""
    return f"""module @m attributes {{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32}} {{
      sdy.mesh @mesh = <["x"=2, "y"=2]>
      func.func public @main(%dy: tensor<8x4xf32>, %x: tensor<8x6xf32>) -> tensor<6x4xf32> {{
        %0 = stablehlo.dot_general %dy, %x, contracting_dims = [0] x [0] {{{before}}}
          : (tensor<8x4xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>
        %1 = stablehlo.transpose %0, dims = [1, 0] {{{after}}} : (tensor<4x6xf32>) -> tensor<6x4xf32>
        return %1 : tensor<6x4xf32>
      }}
    }}"""


@pytest.mark.parametrize("dialect", MODULES)
def test_a_product_alone_with_a_sharding_is_not_swapped(dialect: str) -> None:
    split, _, attribute = MODULES[dialect]
    parsed = ir.parse(module(attribute % split, ""))
    before = ir.text(parsed)
    (product,) = (each for each in ir.operations(parsed.operation) if each.name == "stablehlo.dot_general")
    with product.location:
        assert not untranspose(product)
    assert ir.text(parsed) == before


@pytest.mark.parametrize("dialect", MODULES)
def test_the_pass_keeps_them(dialect: str) -> None:
    split, exchanged, attribute = MODULES[dialect]
    text = autocast(module(attribute % split, attribute % exchanged)).text()
    assert "bf16" in text
    for line in text.splitlines():
        if "dot_general" in line or "transpose" in line:
            assert (attribute % exchanged in line) == ("-> tensor<6x4x" in line)
