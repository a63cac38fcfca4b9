"""Shardings in a module name the axes of the values that they are attributes of, also after a conversion."""

from __future__ import annotations

import os

import forked
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


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from xla_amp.stablehlo import autocast

explicit = sys.argv[1] == "explicit"
kind = AxisType.Explicit if explicit else AxisType.Auto
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
jax.set_mesh(mesh)
random = np.random.default_rng(0)

def array(*shape, inputs, at):
    value = (random.standard_normal(shape) / inputs**0.5).astype(np.float32)
    return jax.device_put(value, NamedSharding(mesh, P(*at)))

weights = {
    "words": array(64, 32, inputs=32, at=("model",)),
    "query": array(32, 4, 8, inputs=32, at=(None, "model")),
    "out": array(4, 8, 32, inputs=32, at=("model",)),
}
x = array(8, 16, 64, inputs=64, at=("data",))

def product(equation, a, b, *at):
    return jnp.einsum(equation, a, b, out_sharding=P(*at) if explicit else None)

def loss(w, x):
    h = product("btv,vd->btd", x, w["words"], "data")
    q = jnp.tanh(product("btd,dhk->bthk", h, w["query"], "data", None, "model"))
    h = h + product("bthk,hkd->btd", q, w["out"], "data")
    return jnp.mean(jnp.sin(product("btd,vd->btv", h, w["words"], "data", None, "model")))

step = jax.jit(jax.value_and_grad(loss, (0, 1)))
expected = step(weights, x)
exported = jax.export.export(step)(weights, x)
converted = autocast(exported)
assert converted.text().count("harding") >= exported.mlir_module().count("harding") > 3
products = [line for line in converted.text().splitlines() if "dot_general" in line]
assert products and all(line.count("xbf16>") >= 2 for line in products), products
got = jax.jit(converted.program.exported.call)(weights, x)
for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    assert 1e-4 < error < 0.02, error
print("same")
"""


@pytest.mark.parametrize("axes", ["explicit", pytest.param("auto", marks=pytest.mark.full)])
def test_a_step_on_four_devices(axes: str) -> None:
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }
    run = forked.run(axes, program=PROGRAM, environment={**os.environ, **flags})
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "same"
