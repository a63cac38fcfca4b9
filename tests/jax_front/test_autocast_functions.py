"""Each kind of JAX primitive under autocast, forward, differentiated, batched and in a loop: dtypes, values, leaks."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contractions import contractions
from jax import lax
from test_autocast_contracts import distance
from traced_functions import TABLE

from xla_amp.jax import autocast
from xla_amp.jax.analysis import float32_regions

LOW = ("bf16", "bf16")
DEAR = ("flash_attention",)
"""Of the full run: test_autocast_contracts.py has kernels, too."""
ROWS = [pytest.param(row, id=row.name, marks=[pytest.mark.full] if row.name in DEAR else []) for row in TABLE]


def compositions(function, row, directions):
    """The function under transformations: forward, gradient, batched, and gradients inside a scan."""

    def loss(p, x):
        y = function(p, x)
        return jnp.sum(y.astype(directions.dtype) * directions) / directions.size

    gradient = jax.grad(loss, (0, 1))

    def in_scan(p, x):
        def step(p, _):
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient(p, x)[0]), None

        return jax.tree.map(jnp.subtract, p, lax.scan(step, p, None, length=2)[0])

    found = {"forward": function, "grad": gradient, "grad in scan": in_scan}
    if row.vmapped:
        found["vmap"] = lambda p, x: jax.vmap(function, (None, 0))(p, jnp.stack([x, -x]))
    return found


def case(row):
    random = np.random.RandomState(0)
    p, x = row.weights(random), row.x(random)
    out = jax.eval_shape(row.function, p, x)
    return p, x, random.randn(*out.shape)


def arrays(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def run(row, function, p, x, directions, dtype, names):
    """Compositions in one jitted program, so gradients of jit are covered, too."""
    parts = compositions(function, row, jnp.asarray(directions, dtype))
    parts = {name: part for name, part in parts.items() if name in names}
    together = jax.jit(lambda p, x: {name: part(p, x) for name, part in parts.items()})
    return together(arrays(p, dtype), arrays(x, dtype))


@functools.cache
def lowered(name):
    row = next(row for row in TABLE if row.name == name)
    p, x, directions = case(row)
    p, x = arrays(p, jnp.float32), arrays(x, jnp.float32)
    parts = compositions(autocast(row.function), row, jnp.asarray(directions, jnp.float32))
    return {part: contractions(function, p, x) for part, function in parts.items()}


@pytest.mark.parametrize("row", ROWS)
def test_every_contraction_is_low(row):
    for part, found in lowered(row.name).items():
        assert found[LOW] > 0, part
        assert set(found) == {LOW} or row.wide, (part, found)
    assert (set(lowered(row.name)["grad"]) == {LOW}) != bool(row.wide)


@pytest.mark.parametrize(
    "names",
    [("grad",), pytest.param(("forward", "grad in scan", "vmap"), marks=pytest.mark.full)],
    ids=["grad", "rest"],
)
@pytest.mark.parametrize("row", ROWS)
def test_values_are_close_to_float64_and_dtypes_are_kept(row, names):
    p, x, directions = case(row)
    found = run(row, autocast(row.function), p, x, directions, jnp.float32, names)
    with jax.enable_x64(True):
        expected = run(row, row.exact or row.function, p, x, directions, jnp.float64, names)
    for part in found:
        assert distance(found[part], expected[part]) < row.tolerance, part
        assert {leaf.dtype for leaf in jax.tree.leaves(found[part])} == {jnp.dtype("float32")}, part
    if "forward" in names:  # eagerly, without jit: the same program in parts
        once = autocast(row.function)(arrays(p, jnp.float32), arrays(x, jnp.float32))
        assert 1e-6 < distance(once, expected["forward"]) < row.tolerance  # a float32 run would be closer


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_gradients_of_a_row_that_is_read_many_times_add_up_in_float32(low):
    w, x, rows = jnp.eye(8), jnp.ones((4, 8)), jnp.zeros(4096, int)

    def loss(w):
        return jnp.sum(jnp.sin(0.1 * (x @ w)[rows]))

    np.testing.assert_allclose(jax.grad(autocast(loss, dtype=low))(w), jax.grad(loss)(w), rtol=0.01)


def test_one_label_for_each_row_is_read_from_low_values():
    w, x, labels = jnp.eye(8), jnp.ones((4, 8)), jnp.zeros((4, 1), int)
    loss = autocast(lambda w: jnp.sum(jnp.take_along_axis(x @ w, labels, 1)))
    text = jax.jit(jax.grad(loss)).lower(w).as_text()
    assert re.search(r"stablehlo.scatter.*?\}\) : \(tensor<4x8x(\w+)>", text, re.DOTALL)[1] == "bf16"


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "function",
    [
        lambda y: jnp.exp(abs(y)) * jax.scipy.special.i0e(y),  # abs rounds nothing and is before the float32 part
        lambda y: jax.scipy.special.gammaln(y + 1.5) - jax.scipy.special.gammaln(1.5 * y + 1.5),  # two float32 parts
        lambda y: (0.3 * (y[1:] - y[:-1])) ** 2 + 0.3 * y[1:],  # slices and differences
        lambda y: 0.3 * jnp.take_along_axis(y, jnp.ones(y.shape, int), 1),  # one element many times
        lambda y: lax.scan(lambda h, k: (h + jnp.sin(k * y), None), jnp.zeros_like(y), jnp.cos(jnp.arange(64.0)))[0],
    ],
)
def test_gradients_of_one_low_value_are_added_before_they_are_rounded(low, function):
    w = jnp.eye(12)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((12, 12)) * 1e-3, low).astype(jnp.float32)
    weights = jnp.cos(jnp.arange(144.0)).reshape(12, 12)

    def loss(x, of=function):
        out = of(x @ w)
        return jnp.sum(out * weights[: len(out)])

    def by_hand(x):
        return loss(x.astype(low).astype(jnp.float32))

    exact, hand = jax.grad(loss)(x), jax.grad(by_hand)(x).astype(low).astype(jnp.float32)
    error = jax.jit(jax.grad(autocast(loss, dtype=low)))(x) - exact
    assert jnp.max(abs(error)) <= 2.5 * jnp.max(abs(hand - exact)) + 1e-6 * jnp.max(abs(exact))


def test_gradients_do_not_depend_on_the_programs_before():
    def loss(x):
        y = jnp.sin(x) @ jnp.cos(x)
        return jnp.sum(((jnp.exp(y) * abs(y)) @ jnp.cos(x)).astype(jnp.float32))

    low = jax.random.normal(jax.random.key(0), (16, 16), "bfloat16")
    for programs in ((low, low.astype(jnp.float32)), (low.astype(jnp.float32), low)):
        found = []
        for count in (1, 2):
            float32_regions._functions.clear()
            found.append([jax.grad(autocast(loss))(x) for x in programs[-count:]][-1])
        assert jnp.array_equal(*found)


def test_a_float32_copy_that_regions_share_is_not_saved():
    w, x = jnp.eye(64), jnp.full((16, 64), 1.5)

    def loss(w):
        y = x @ w
        return jnp.sum((jnp.tanh(y) @ w) * jnp.sin(y))

    _, backward = jax.vjp(jax.jit(autocast(loss, dtype="bfloat16")), w)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(backward) if leaf.shape == (16, 64)} == {"bfloat16"}
    assert jnp.allclose(jax.grad(autocast(loss, dtype="bfloat16"))(w), jax.grad(loss)(w), rtol=0.02, atol=0.05)
