"""What the monitor of a JAX step tells of 8-bit operands, against counting with NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xla_amp.jax import autocast, monitor
from xla_amp.recorder.history import Key

ROWS, WIDTH = 32, 64
CASTS = {"fp8": (None, "float8_e5m2"), "fp8_rowwise": (WIDTH, "float8_e5m2"), "mxfp8": (32, "float8_e4m3fn")}
"""Cast -> elements along the summed axis that share a scale, and the format of the gradient."""
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def counted(x: np.ndarray, format: str, shared: int | None) -> tuple[int, int]:
    """How many elements of (rows, summed axis) are not zero, and how many of these become zero."""
    blocks = x.reshape(1, -1) if shared is None else x.reshape(-1, shared)
    scale = np.exp2(np.floor(np.log2(LARGEST[format] / np.abs(blocks).max(1, keepdims=True))))
    rounded = (blocks * scale).astype(getattr(ml_dtypes, format)).astype(np.float64)
    return int((x != 0).sum()), int(((rounded == 0) & (blocks != 0)).sum())


def values(key: int, *shape: int) -> jax.Array:
    """Magnitudes over 2**40, of which many become zero."""
    one, two = jax.random.split(jax.random.key(key))
    wide = jax.random.normal(one, shape) * jnp.exp2(jax.random.uniform(two, shape, minval=-40.0, maxval=0.0))
    return wide.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("cast", CASTS)
def test_operands_of_8_bit_products_are_counted(cast: str) -> None:
    shared, of_gradient = CASTS[cast]
    x, w, g = values(0, ROWS, WIDTH), values(1, WIDTH, WIDTH), values(2, ROWS, WIDTH)

    @jax.jit
    def step(w, x, g):
        def loss(w, x):
            with jax.named_scope("layer"):
                y = autocast(lambda x: x @ w, rules={"matmul": cast})(x)
            return jnp.sum(y * g)

        return jax.grad(loss, argnums=(0, 1))(w, x)

    watched = monitor(step, sample=1)
    watched(w, x, g)
    (record,) = watched.read().steps
    a, b, c = (np.asarray(each, np.float64) for each in (x, w, g))
    read = {"float8_e4m3fn": [(a, "float8_e4m3fn"), (b.T, "float8_e4m3fn"), (b, "float8_e4m3fn")]}
    read.setdefault(of_gradient, []).append((c, of_gradient))
    found = {key.kind: row for key, row in record.statistics.items() if key.kind.startswith("float8")}
    assert set(found) == set(read)
    for kind, operands in read.items():
        nonzero, lost = np.sum([counted(each, format, shared) for each, format in operands], 0)
        row = record.statistics[Key("layer", kind)]
        amax = max(np.abs(each).max() for each, _ in operands)
        assert lost > 0
        assert row.underflow == pytest.approx(lost / nonzero, rel=1e-6)
        assert row.amax == amax
        assert row.headroom == pytest.approx(np.log2(LARGEST[kind] / amax))
        assert row.finite


def test_a_report_tells_the_exponent_of_the_scale_and_other_runs_have_no_such_rows() -> None:
    def step(w, x, rules):
        with jax.named_scope("layer"):
            return autocast(lambda x: x @ w, rules=rules)(x)

    x, w = jnp.full((ROWS, WIDTH), 3.0), jnp.ones((WIDTH, WIDTH))
    for rules, kinds in (({"matmul": "fp8"}, {"activation", "float8_e4m3fn"}), ({}, {"activation"})):
        watched = monitor(jax.jit(lambda w, x, rules=rules: step(w, x, rules)), sample=1)
        watched(w, x)
        (record,) = watched.read().steps
        assert {key.kind for key in record.statistics} == kinds
        if rules:
            row = record.statistics[Key("layer", "float8_e4m3fn")]
            assert (row.amax, row.underflow, int(row.headroom)) == (3.0, 0.0, 7)  # 3 * 2**7 = 384, below 448
    with pytest.raises(ValueError, match=r"unknown \['float8_e3m4'\]; expected some of .*'float8_e5m2'"):
        monitor(step, kinds=["float8_e3m4"])


def _layers(form):
    """Three layers of 8-bit products, written in one of several ways: (weights, x) -> y."""

    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(autocast(lambda x: x @ w, rules={"matmul": "fp8"})(x))

    def each(run):
        def all_layers(weights, x):
            for w in weights:
                x = run(x, w)
            return x

        return all_layers

    def scanned(run):
        return lambda weights, x: jax.lax.scan(lambda x, w: (run(x, w), None), x, weights)[0]

    again = jax.checkpoint(layer)
    return {
        "plain": each(layer),
        "checkpoint": each(again),
        "nested checkpoints": jax.checkpoint(each(again)),
        "saved products": each(jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)),
        "jit": each(jax.jit(layer)),
        "scan": scanned(layer),
        "scan of checkpoints": scanned(again),
        "checkpoint of a scan": jax.checkpoint(scanned(again)),
        "cond": each(lambda x, w: jax.lax.cond(x[0, 0] < 2, layer, lambda x, w: x, x, w)),
    }[form]


@functools.cache
def _rows(form):
    weights, x, g = values(0, 3, WIDTH, WIDTH) * 4, values(1, ROWS, WIDTH), values(2, ROWS, WIDTH)

    @jax.jit
    def step(weights, x, g):
        return jax.value_and_grad(lambda w, x: jnp.sum(_layers(form)(w, x) * g), argnums=(0, 1))(weights, x)

    watched = monitor(step, sample=1, kinds=["float8_e4m3fn", "float8_e5m2"])
    results = watched(weights, x, g)
    (record,) = watched.read().steps
    for found, expected in zip(jax.tree.leaves(results), jax.tree.leaves(step(weights, x, g)), strict=True):
        assert np.array_equal(found, expected)
    return record.statistics


_IN_ALL = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "form",
    [
        "checkpoint",
        "scan of checkpoints",
        *(
            pytest.param(each, marks=_IN_ALL)
            for each in ("nested checkpoints", "saved products", "jit", "scan", "checkpoint of a scan", "cond")
        ),
    ],
)
def test_backward_products_inside_of_other_programs_are_counted_once(form):
    plain, found = _rows("plain"), _rows(form)
    assert {key.kind for key in plain} == {"float8_e4m3fn", "float8_e5m2"}
    assert found.keys() == plain.keys()
    for key, row in plain.items():
        assert row.underflow > 0
        assert found[key].underflow == pytest.approx(row.underflow, rel=1e-6), key
        assert found[key].amax == row.amax
        assert found[key].rms == pytest.approx(row.rms, rel=1e-6)
