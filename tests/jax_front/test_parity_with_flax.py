"""autocast of unedited models against Flax's own `dtype=bfloat16`: dtypes of additions, saved bytes, collectives."""

from __future__ import annotations

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental.ode import odeint
from jax_autocast import Block

from xla_amp.jax import autocast


def loss(model):
    return lambda weights, x: jnp.mean(jnp.square(model.apply(weights, x).astype(jnp.float32)))


def saved_bytes(function, weights, *data):
    """Bytes that the forward pass saves for the backward pass, without the weights themselves."""
    traced = jax.make_jaxpr(lambda w: jax.vjp(lambda w: function(w, *data), w))(weights).jaxpr
    variables = {var for var in traced.outvars[1:] if not hasattr(var, "val")} - set(traced.invars)
    return sum(var.aval.size * var.aval.dtype.itemsize for var in variables - set(traced.constvars))


def equinox_mlp():
    model = eqx.nn.MLP(8, 8, 8, 3, key=jax.random.key(0))
    weights, rest = eqx.partition(model, eqx.is_array)
    return weights, lambda weights, x: jax.vmap(eqx.combine(weights, rest))(x)


def nnx_linear():
    graph, weights = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    return weights, lambda weights, x: nnx.merge(graph, weights)(x)


def linen_heads():
    module = nn.DenseGeneral((2, 4), axis=-1)
    return module.init(jax.random.key(0), jnp.ones((4, 8))), module.apply


def nchw_convolution():
    weights = {"w": jnp.ones((4, 8, 1, 1)), "b": jnp.ones(4)}

    def apply(p, x):
        return lax.conv(x[..., None, None], p["w"], (1, 1), "SAME") + p["b"][:, None, None]

    return weights, apply


def plain():
    return {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, lambda p, x: x @ p["w"] + p["b"]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("make", [equinox_mlp, nnx_linear, linen_heads, nchw_convolution, plain])
def test_a_bias_follows_the_product(make, rows):
    weights, apply = make()
    x = jnp.ones((rows, 8))

    def total(weights, x):
        return jnp.sum(apply(weights, x).astype(jnp.float32))

    text = jax.jit(autocast(apply)).lower(weights, x).as_text()
    sums = [line for line in text.splitlines() if "stablehlo.add" in line]
    assert sums
    assert all("bf16" in line for line in sums)
    exact = jax.jit(jax.grad(total))(weights, x)
    for mixed in (jax.grad(autocast(total)), autocast(jax.grad(total))):
        for found, expected in zip(*map(jax.tree.leaves, (jax.jit(mixed)(weights, x), exact)), strict=True):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_a_bias_adds_up_in_float32():
    weights, apply = plain()
    gradient = jax.grad(autocast(lambda p, x: jnp.sum(apply(p, x))))(weights, jnp.ones((4097, 8)))
    np.testing.assert_array_equal(gradient["b"], np.full(8, 4097))


def test_residuals_of_a_scanned_mlp_are_those_of_hand_written_casts():
    weights = {"w": jnp.ones((6, 32, 32)), "b": jnp.ones((6, 32)), "v": jnp.ones((6, 32, 32)), "c": jnp.ones((6, 32))}
    x = jnp.ones((64, 32))

    def layer(x, w):
        return jnp.tanh(x @ w["w"] + w["b"]) @ w["v"] + w["c"], None

    def function(weights, x):
        return jnp.mean(jnp.square(lax.scan(layer, x, weights)[0].astype(jnp.float32)))

    def by_hand(weights, x):
        return function(jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights), x.astype(jnp.bfloat16))

    assert saved_bytes(autocast(function), weights, x) <= 1.02 * saved_bytes(by_hand, weights, x)


class Attentive(nn.Module):
    """Blocks one after the other, in a scan, or rematerialized in a scan."""

    form: str
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        if self.form == "unrolled":
            for _ in range(2):
                x = Block(2, self.dtype)(x)
            return x
        block = nn.remat(Block, prevent_cse=False) if self.form == "rematerialized" else Block
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        scanned = nn.scan(lambda block, x, _: (block(x), None), length=2, **axes)
        return scanned(block(2, self.dtype), x.astype(self.dtype), None)[0]


@pytest.mark.full
@pytest.mark.parametrize(("form", "residual"), [("unrolled", "keep"), ("scanned", "keep"), ("rematerialized", "low")])
def test_float32_inside_of_a_gelu_and_of_attention_is_not_saved(form, residual):
    x = jax.random.normal(jax.random.key(0), (2, 32, 16), jnp.bfloat16).astype(jnp.float32)
    model = Attentive(form)
    weights = model.init(jax.random.key(1), x)
    ours = autocast(loss(model), residual=residual)
    by_hand = saved_bytes(loss(Attentive(form, jnp.bfloat16)), weights, x)
    assert saved_bytes(ours, weights, x) <= 1.02 * by_hand
    if form != "unrolled":
        return
    # What is computed again is computed in float32: nearer to float32 than Flax's own bfloat16.
    exact = jax.jit(jax.grad(loss(model)))(weights, x)
    errors = [
        max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), got, exact)))
        for got in (jax.jit(jax.grad(f))(weights, x) for f in (ours, loss(Attentive(form, jnp.bfloat16))))
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_a_low_residual_stream_saves_less(form):
    x = jax.random.normal(jax.random.key(0), (2, 32, 16))
    model = Attentive(form)
    weights = jax.eval_shape(model.init, jax.random.key(1), x)
    kept, low = (saved_bytes(autocast(loss(model), residual=each), weights, x) for each in ("keep", "low"))
    assert low < 0.9 * kept


def test_a_low_residual_stream_leaves_sums_alone():
    def layers(x, w, total):
        def body(carry, _):
            x, total = carry
            h = jax.nn.relu(x @ w)
            return (x + h @ w, total + h), None

        (x, total), _ = jax.lax.scan(body, (x, total), None, length=3)
        return x, total

    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    for residual, stream in (("keep", "f32"), ("low", "bf16")):
        program = jax.make_jaxpr(autocast(layers, residual=residual))(x, w, x)
        (loop,) = (eqn for eqn in program.eqns if eqn.primitive.name == "scan")
        carried = [atom.aval.str_short(short_dtypes=True) for atom in loop.outvars]
        assert carried == [f"{stream}[4,8]", "f32[4,8]"]


@pytest.mark.full
def test_a_low_residual_stream_leaves_a_solver_alone():
    w, y0 = jax.random.normal(jax.random.key(0), (6, 6)) / 2, jax.random.normal(jax.random.key(1), (6,))

    def solved(w, y0):
        return jnp.sum(odeint(lambda y, t: jnp.tanh(w @ y) - y, y0, jnp.linspace(0.0, 1.0, 5))[-1] ** 2)

    exact = jax.value_and_grad(solved, (0, 1))(w, y0)
    got = jax.value_and_grad(autocast(solved, residual="low"), (0, 1))(w, y0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert jnp.linalg.norm(a - b) < 0.01 * jnp.linalg.norm(b)


def collectives(function, *args):
    """Kind and dtype of the collectives of a program whose result is read: XLA drops the others."""
    text, _, _ = jax.jit(function).lower(*args).as_text().partition("func.func private")
    pattern = r'(%\w+) = "stablehlo\.(all_gather|reduce_scatter)"\(.*?\) -> tensor<[\dx]*x(\w+)>'
    found = re.findall(pattern, text, re.DOTALL)
    return sorted(f"{kind} {dtype}" for name, kind, dtype in found if len(re.findall(rf"{name}\b", text)) > 1)


def test_a_collective_follows_its_data_and_gradients_stay_float32():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.PartitionSpec()

    def product(x, w):
        return jnp.tanh(lax.psum_scatter(x @ w, "d", scatter_dimension=0, tiled=True))

    def update(x, w):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return lax.psum_scatter(gradient, "d", scatter_dimension=0, tiled=True)

    def sharded(x, w):  # weights travel low on their way forward, gradients in float32 on their way back
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ lax.all_gather(w, "d", tiled=True))))(w)

    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    for function, expected in (
        (product, ["reduce_scatter bf16"]),
        (update, ["reduce_scatter f32"]),
        (sharded, ["all_gather bf16", "reduce_scatter f32"]),
    ):
        settings = {"mesh": mesh, "in_specs": (everywhere, everywhere), "out_specs": everywhere, "check_vma": False}
        mapped = autocast(jax.shard_map(function, **settings))
        assert collectives(mapped, x, w) == expected
        assert jax.eval_shape(mapped, x, w).dtype == jnp.float32
