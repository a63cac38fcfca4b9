"""The cast `fp8` in JAX: which products read 8-bit floats, inside and outside of derivatives, loops and maps."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from float8_training import RULES as TRAINING
from float8_training import train

import xla_amp
from xla_amp.errors import PolicyError, RuleWarning, UnsupportedDtypeError
from xla_amp.jax import autocast, compat
from xla_amp.policy import float8

RULES = {"matmul": "fp8"}
E4, E5, LOW = "float8_e4m3fn", "float8_e5m2", "bfloat16"
FORWARD, DATA, WEIGHT = (E4, E4), (E5, E4), (LOW, LOW)


def normal(key: int, *shape: int) -> jax.Array:
    return 0.12 * jax.random.normal(jax.random.key(key), shape)


WEIGHTS = (normal(0, 32, 64), normal(1, 64, 32))
X = 8 * normal(2, 48, 32)


def loss(weights, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)


def over_layers(stacked, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stacked)[0] ** 2)


STACK = jnp.stack([normal(3, 32, 32), normal(4, 32, 32)])


def distance(found, wanted) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def products(function, *args):
    """Operands of the products of a program under autocast, with their number; "low" for bfloat16."""
    with xla_amp.explain() as report:
        jax.make_jaxpr(function)(*args)
    return collections.Counter(each.used for each in report.records if each.operation == "matmul")


def test_each_product_reads_its_format_in_a_whole_step() -> None:
    whole = autocast(lambda w, x: jax.grad(loss)(w, x), rules=RULES)
    assert products(whole, WEIGHTS, X) == {FORWARD: 2, DATA: 1, WEIGHT: 2}
    again = autocast(lambda w, x: jax.grad(jax.checkpoint(loss))(w, x), rules=RULES)
    assert products(again, WEIGHTS, X) == {FORWARD: 4, DATA: 1, WEIGHT: 2}  # the forward pass twice


def formats(jaxpr) -> list:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "low_dot_general":
            found.append(eqn.params["float8"] and eqn.params["float8"].formats)
        for inner in compat.sub_jaxprs(eqn.params):
            found += formats(getattr(inner, "jaxpr", inner))
    return found


def test_and_under_a_derivative() -> None:
    made = jax.make_jaxpr(jax.grad(autocast(loss, rules=RULES)))(WEIGHTS, X)
    assert collections.Counter(formats(made.jaxpr)) == {("e4m3", "e4m3"): 2, ("e5m2", "e4m3"): 1, None: 2}


@pytest.mark.parametrize("where", ["inside", "checkpoint", "jit", "vmap", "scan"])
def test_gradients_are_those_of_float32_but_for_the_rounding(where: str) -> None:
    def gradient(function, wrap):
        return {
            "inside": lambda: jax.jit(wrap(jax.grad(function))),
            "checkpoint": lambda: jax.jit(jax.grad(jax.checkpoint(wrap(function)))),
            "jit": lambda: jax.jit(jax.grad(wrap(jax.jit(function)))),
            "vmap": lambda: jax.jit(jax.vmap(jax.grad(wrap(function)), in_axes=(None, 0))),
            "scan": lambda: jax.jit(jax.grad(wrap(over_layers))),
        }[where]()

    args = (STACK, X) if where == "scan" else (WEIGHTS, X.reshape(3, 16, 32) if where == "vmap" else X)
    wanted = gradient(loss, lambda f: f)(*args)
    low = distance(gradient(loss, autocast)(*args), wanted)
    small = distance(gradient(loss, lambda f: autocast(f, rules=RULES))(*args), wanted)
    assert low < 0.02
    assert 2 * low < small < 0.15


def test_forward_derivatives_are_close() -> None:
    args = ((WEIGHTS, X), (WEIGHTS, X))
    for found, wanted in zip(jax.jvp(autocast(loss, rules=RULES), *args), jax.jvp(loss, *args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0.02)


def test_what_stays_in_16_bits_and_why() -> None:
    def model(weights, x):
        with jax.named_scope("lm_head"):
            return x @ weights[0], (x @ x.T) @ x

    def reasons(x, weights=WEIGHTS, **given):
        with xla_amp.explain() as report:
            jax.make_jaxpr(autocast(model, **given))(weights, x)
        return [(each.cast, each.why) for each in report.records if each.operation == "matmul"]

    (head, *_) = reasons(X, policy="fp8")
    assert head[0] == "low"
    assert "logits" in head[1]
    wide = [jnp.zeros((2048, 8192))]
    rows = jax.ShapeDtypeStruct((4096, 2048), jnp.float32)
    assert float8.estimate(4096, 2048, 8192).gain > 1
    assert products(autocast(lambda w, x: x @ w, policy="fp8"), wide[0], rows) == {FORWARD: 1}
    small, *_ = reasons(X, rules={"module:*.lm_head.matmul": "fp8"})
    assert small[0] == "fp8"
    (lost,) = products(autocast(lambda w, x: x @ w, policy="fp8"), WEIGHTS[0], X)
    assert lost == WEIGHT
    with pytest.warns(RuleWarning, match="sums over 30, no multiple of 16"):
        jax.make_jaxpr(autocast(lambda w, x: x @ w, rules=RULES))(jnp.ones((30, 16)), jnp.ones((16, 30)))
    with pytest.raises(PolicyError, match="sums over 30, no multiple of 16"):
        jax.make_jaxpr(autocast(lambda w, x: x @ w, rules=RULES, strict=True))(jnp.ones((30, 16)), jnp.ones((16, 30)))


def test_explain_says_what_8_bits_gain_and_lose() -> None:
    def why(weight, rows):
        shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((weight, 2 * weight), (2, rows, weight)))
        with xla_amp.explain() as report:
            jax.make_jaxpr(autocast(lambda w, x: x @ w, policy="fp8"))(*shapes)
        (record,) = report.records
        assert record.why in str(report.document().tables[0].rows)
        return record.why

    gains, loses = float8.estimate(16384, 4096, 8192), float8.estimate(32, 64, 128)
    assert why(4096, 8192) == (
        f"8 bits, scaled by their largest magnitude: estimated {gains.float8 * 1e6:.0f} us on h100, "
        f"{gains.scaling * 1e6:.0f} of them for scaling, against {gains.low * 1e6:.0f} us in bfloat16"
    )
    assert why(64, 16) == (
        f"not in 8 bits: on h100 it would take {loses.float8 * 1e6:.0f} us, {loses.scaling * 1e6:.0f} of them for "
        f"scaling, against {loses.low * 1e6:.0f} us in bfloat16 (estimates, with its gradient)"
    )


def test_refusals() -> None:
    with pytest.raises(PolicyError, match=r"'fp8' is not supported where the low dtype is float16; pass dtype=jnp.bf"):
        jax.make_jaxpr(autocast(loss, rules=RULES, dtype=jnp.float16))(WEIGHTS, X)
    with pytest.raises(UnsupportedDtypeError, match=r"the policy 'fp8' offers jnp\.bfloat16"):
        autocast(loss, policy="fp8", dtype=jnp.float16)


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_gpus_get_8_bit_products_forward_and_for_the_data(target: str) -> None:
    if not targets.available(target):
        pytest.skip(f"the compiler for {target} is not installed")
    step = jax.grad(autocast(loss, rules=RULES), argnums=(0, 1))
    module = targets.lower(step, WEIGHTS, X, target=target)
    hlo = targets.compile_for(module, target).hlo
    # X and the first weight both come from outside, so the gradient of X is in 8 bits because the weight is second.
    assert hlo.count('custom_call_target="__cublas$lt$matmul$f8"') == 4


def test_a_small_gpt_learns_as_in_bfloat16() -> None:
    low, small = (train(0, rules, 60, width=32, layers=1, length=16) for rules in ({}, TRAINING))
    assert low < 3.9  # it learns: 4.85 at the start
    assert low != small
    assert abs(small / low - 1) < 0.01
