"""Functions of JAX's libraries under autocast: a part of `tests/jax_front/jax_sweep.py`, which calls all of them."""

from __future__ import annotations

import jax.numpy as jnp
import jax_sweep
import pytest


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 1])
def test_a_sample_of_all_functions(first):
    names = dict(list(jax_sweep.functions(jax_sweep.MODULES))[first::24])
    calls = {name: jax_sweep.call(name, function) for name, function in names.items()}
    assert None not in calls.values()
    rows = [row for name, call in calls.items() for row in jax_sweep.rows(name, *call)]
    assert len(rows) > 20
    assert not jax_sweep.beyond_bound(rows)
    page = jax_sweep.PAGE.read_text()
    assert all((f"`{row.function}` | {row.direction}" in page) == bool(row.error) for row in rows)


def test_the_sweep_sees_what_is_worse():
    """The twin: a product that runs low is found, and one that should not have run low is beyond the bound."""
    arrays = jnp.ones((6, 6)) * 1.01, jnp.ones((6, 6)) * 0.37
    (row, _) = jax_sweep.rows("f", lambda x, y: [1000 + x @ y - 1000], arrays)
    assert row.low == 1
    assert row.error > 0
    assert jax_sweep.beyond_bound([row._replace(low=0)])
    assert jax_sweep.beyond_bound([row._replace(error=0.1)])
