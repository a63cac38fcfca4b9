"""Constants inside the jaxpr, as JAX will write them (``JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contractions import contractions

from xla_amp.jax import autocast

SIZE = 1024  # whose text leaves numbers out, from 1000 on
X, W = jnp.ones((4, SIZE)) / 64, jnp.eye(SIZE)


@pytest.fixture(params=[False, True], ids=["", "simplified"])
def constants(request: Any) -> Iterator[None]:
    before = jax.config.jax_use_simplified_jaxpr_constants  # type: ignore[attr-defined]
    jax.config.update("jax_use_simplified_jaxpr_constants", request.param)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", before)


@pytest.mark.usefixtures("constants")
@pytest.mark.parametrize("module", [np, jnp])
def test_constants_that_print_alike_are_two(module: Any) -> None:
    one, other = module.ones(SIZE, np.float32), module.ones(SIZE, np.float32)
    other = module.where(module.arange(SIZE) == SIZE // 2, np.float32(1000), other)
    assert str(one) == str(other)

    def function(x: Any) -> Any:
        hidden = x @ W
        return jnp.sum(jnp.exp(hidden) * one), jnp.sum(jnp.exp(hidden) * other)

    for call in (jax.jit(autocast(function)), lambda x: jax.vjp(autocast(function), x)[0]):
        for found, expected in zip(call(X), function(X), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-2)


@pytest.mark.usefixtures("constants")
def test_a_weight_of_a_closure_is_rounded_once_and_low() -> None:
    w = jnp.eye(8)

    def function(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w @ w), None), x, None, length=2)[0].sum()

    x = jnp.ones((4, 8))
    assert contractions(jax.grad(autocast(function)), x) == {("bf16", "bf16"): 4}
    np.testing.assert_allclose(jax.grad(autocast(function))(x), jax.grad(function)(x), rtol=2e-2)
