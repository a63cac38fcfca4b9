"""Arguments of autocast: errors for illegal values, spellings of a dtype, attributes of the wrapped function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.errors import PolicyError, UnsupportedDtypeError
from xla_amp.jax import autocast


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"carry": True}, PolicyError, r"carry=True.*'keep', 'low'"),
        ({"enabled": 1}, PolicyError, r"enabled=1.*True or False, got int"),
        ({"policy": "tpux"}, PolicyError, r"unknown policy 'tpux'; nearest: tpu"),
        ({"dtype": jnp.float32}, UnsupportedDtypeError, r"'tpu' offers jnp\.bfloat16, jnp\.float16"),
        ({"dtype": "bf17"}, UnsupportedDtypeError, r"dtype='bf17'"),
    ],
)
def test_settings(settings, error, words):
    with pytest.raises(error, match=words):
        autocast(lambda x: x, **settings)


@pytest.mark.parametrize("value", [3, "bfloat16", jnp.bfloat16, jnp.float16, np.float16, jnp.dtype("bfloat16")])
def test_a_value_that_is_no_function_is_rejected(value):
    with pytest.raises(TypeError, match=r"autocast expects a function, got .*by keyword.*autocast\(f, dtype=jnp"):
        autocast(value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16), jnp.dtype("bfloat16")])
def test_spellings_of_a_dtype(dtype):
    assert "bf16" in str(jax.make_jaxpr(autocast(jnp.matmul, dtype=dtype))(jnp.ones((2, 2)), jnp.ones((2, 2))))


def test_a_policy_has_its_own_low_dtype():
    assert "f16" in str(jax.make_jaxpr(autocast(jnp.matmul, policy="gpu"))(jnp.ones((2, 2)), jnp.ones((2, 2))))


def test_a_wrapped_function_keeps_its_name_and_shows_its_settings():
    @autocast(carry="low")
    def forward(x):
        """Doc."""
        return x

    assert (forward.__name__, forward.__doc__, forward.region.carry) == ("forward", "Doc.", "low")
    assert "enabled=True" in repr(forward.region)


def test_an_object_of_a_class_and_a_method_can_be_wrapped():
    class Model:
        def __call__(self, x):
            return x @ x

        method = autocast(__call__)

    assert autocast(Model())(jnp.ones((2, 2))).dtype == jnp.float32
    assert Model().method(jnp.ones((2, 2))).dtype == jnp.float32
