"""Numbers, bounds and biases beside low values: the functions that the JAX and StableHLO fronts share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.analysis import beside_low


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_low_numbers_are_those_of_the_dtype(low):
    numbers, limits = beside_low.LOW_NUMBERS[low], jnp.finfo(low)
    found = np.exp(np.random.default_rng(0).uniform(-9, 11, 200)).astype(np.float32)
    for each in (*found, limits.tiny, limits.max, np.float32(1.00390625)):  # the last is between two of bfloat16
        assert numbers.rounded(float(each)) == float(np.asarray(each, low))
    for magnitude, inside in ((0, True), (limits.tiny, True), (limits.max, True), (float(limits.tiny) / 2, False)):
        assert numbers.in_range(float(magnitude)) == inside
    assert not numbers.in_range(1.01 * float(limits.max))
    edges = {"float16": (2**-7, 255.9), "bfloat16": (2**-63, 1.84e19)}[low]
    assert [numbers.leaves_room(each) for each in (0.99 * edges[0], *edges, 1.01 * edges[1], 0)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert numbers.holds(0.5)
    assert not numbers.holds(0.1)


@pytest.mark.parametrize(
    ("bound", "apart"), [(1 - 1e-6, False), (1.0, True), (6.0, True), (1e-6, True), (0.9375, True)]
)
def test_a_bound_stays_apart_from_1(bound, apart):
    assert beside_low.LOW_NUMBERS["bfloat16"].stays_apart(bound) == apart
