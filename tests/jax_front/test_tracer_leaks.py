"""`jax.check_tracer_leaks` reports no leak of autocast, so a user can look for leaks of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_autocast_contracts import FUNCTIONS, W, X
from traced_functions import TABLE

from xla_amp.jax import autocast

NAMES = ("softmax_mixture", "nested_jit", "scan_over_layers", "fori", "branch", "scan_of_remat", "own_jvp", "own_vjp")
ROWS = [row for row in TABLE if row.name in NAMES]


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_tracer_outlives_its_trace(row):
    def loss(p, x):
        return row.function(p, x).sum()

    def outer(p, x):
        return autocast(loss)(p, x)

    random = np.random.RandomState(0)
    p, x = (jax.tree.map(jnp.asarray, made(random)) for made in (row.weights, row.x))
    with jax.check_tracer_leaks():
        for call in (jax.jit(outer), autocast(loss)):
            call(p, x)
        for call in (jax.jit(autocast(jax.grad(loss, 1))), jax.jit(jax.grad(outer, 1)), jax.grad(outer, 1)):
            call(p, x)


@pytest.mark.full
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_tracer_outlives_other_calls(name):
    with jax.check_tracer_leaks():
        jax.jit(lambda w, x: autocast(FUNCTIONS[name])(w, x))(W, X)
        autocast(FUNCTIONS[name])(W, X)


@pytest.mark.full
def test_a_leak_of_the_program_is_found():
    kept = []

    def leaks(x):
        kept.append(x @ W)
        return kept[-1]

    with pytest.raises(Exception, match="Leaked"), jax.check_tracer_leaks():
        jax.jit(autocast(leaks))(X)
