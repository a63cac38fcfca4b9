"""`xla_amp.common.compiling`: plans are compiled quickly, and have the errors of optimized code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.common import compiling


def loss(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("platform", "flops", "quick"),
    [
        ("cpu", compiling.QUICK_FLOPS - 1, True),
        ("cpu", compiling.QUICK_FLOPS, False),
        ("gpu", 1.0, False),
        ("tpu", 1.0, False),
    ],
)
def test_small_work_on_a_cpu_is_compiled_quickly(platform, flops, quick):
    assert bool(compiling.quick_options(platform, flops)) == quick


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the options are for the CPU")
def test_results_are_the_same_but_for_the_order_of_sums():
    w, x = (jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate([(16, 16), (8, 16)]))
    as_usual, quick = (
        jax.jit(jax.grad(loss), compiler_options=options)(w, x) for options in ({}, compiling.quick_options("cpu", 1.0))
    )
    np.testing.assert_allclose(quick, as_usual, rtol=1e-5, atol=1e-8)
