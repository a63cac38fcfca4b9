"""autocast with the rest of JAX: regions, loops, explain, ahead-of-time lowering, export; its arguments."""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contractions import contractions
from jax import export, lax
from jax.experimental import checkify

import xla_amp
from xla_amp.errors import AutocastWarning, PolicyError, UnsupportedDtypeError
from xla_amp.jax import autocast

LOW, WIDE = ("bf16", "bf16"), ("f32", "f32")


@pytest.fixture
def x():
    return jnp.asarray(np.random.RandomState(0).randn(4, 8), jnp.float32)


@pytest.fixture
def w():
    return jnp.asarray(np.random.RandomState(1).randn(8, 8) / 3, jnp.float32)


def test_regions_inside_traced_functions_are_decided_once(x, w):
    def body(c, _):
        low = autocast(lambda c: jnp.exp(jnp.tanh(c @ w)))(c)
        with autocast(enabled=False):
            wide = c @ w
        return low + wide, None

    def function(x):
        return lax.scan(body, x, None, length=2)[0]

    assert contractions(function, x) == {LOW: 1, WIDE: 1}
    assert contractions(autocast(function), x) == {LOW: 1, WIDE: 1}
    # The outer region has other rules: the decisions of the inner one remain.
    assert "tensor<4x8xf16>" not in jax.jit(autocast(function, dtype=jnp.float16)).lower(x).as_text()


def test_a_function_that_looks_at_values_is_refused_as_by_jit(x, w):
    def function(x):
        return x @ w if (x @ w).sum() > -1e9 else x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        autocast(function)(x)


def test_a_region_ends_with_an_exception_and_functions_call_themselves(x, w):
    off = autocast(enabled=False)
    with pytest.raises(KeyError), off, off:
        raise KeyError

    @autocast
    def recursive(depth):
        with off, off:
            wide = x @ w
        return x @ w + wide if depth == 0 else recursive(depth - 1)

    assert recursive(2).dtype == jnp.float32
    assert contractions(lambda: recursive(2)) == {LOW: 1, WIDE: 1}
    assert (x @ w).dtype == jnp.float32


def test_a_region_inside_has_its_own_dtype_and_rules(x, w):
    half = autocast(lambda x: jnp.tanh(x @ w), dtype=jnp.float16, rules={"tanh": "fp32"})

    def function(x):
        return half(x) + jnp.tanh(x @ w)

    text = jax.jit(autocast(function, rules={"tanh": "low"})).lower(x).as_text()
    assert sorted(re.findall(r"stablehlo.tanh.*tensor<4x8x(\w+)>", text)) == ["bf16", "f32"]
    assert contractions(autocast(function), x) == {LOW: 1, ("f16", "f16"): 1}

    @jax.custom_vjp  # a region inside a rule that runs when its part is differentiated
    def part(x):
        return x

    part.defvjp(lambda x: (half(x), x), lambda x, g: (g * half(x),))
    assert contractions(autocast(jax.grad(lambda x: (part(x) ** 2).sum())), x) == {("f16", "f16"): 2}


def test_a_block_says_what_to_write():
    with pytest.raises(PolicyError, match=r"y = autocast\(block\)\(x\)"), autocast():
        pass


def test_static_arguments_and_results_are_unchanged(x, w):
    def function(x, *, train, name, scale):
        assert isinstance(train, bool)
        return {"y": (x @ w) * scale, "name": name, "none": None, "train": train}

    out = autocast(function)(x, train=True, name="a", scale=2.0)
    assert (out["name"], out["none"], out["train"], out["y"].dtype) == ("a", None, True, jnp.float32)


def test_carries_keep_their_dtype(x, w):
    def scanned(x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]

    def in_a_while(x):
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))[0]

    for function in (scanned, in_a_while):
        (carried,) = re.findall(r"stablehlo\.while\(.*\) : (.*)", jax.jit(autocast(function)).lower(x).as_text())
        assert "tensor<4x8xf32>" in carried
        np.testing.assert_allclose(autocast(function)(x), function(x), atol=5e-2)


LAYERS = {
    "plain": lambda c, w: jnp.tanh(c @ w.T),
    "jit": jax.jit(lambda c, w: jnp.tanh(c @ w.T)),
    "checkpoint": jax.checkpoint(lambda c, w: jnp.tanh(c @ w.T)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_are_rounded_once_before_a_loop(layer, x, w):
    def function(x, w):
        return jnp.sum(lax.scan(lambda c, _: (LAYERS[layer](c, w), None), x, None, length=3)[0])

    step = jax.jit(jax.grad(autocast(function), 1))
    text = step.lower(x, w).as_text()
    entry = text[: text.index("func.func private")]
    outside, _, _ = entry.partition("stablehlo.while")
    convert = re.compile(r"convert .*tensor<8x8xf32>\) -> tensor<8x8xbf16>")
    assert convert.search(outside)
    assert len(convert.findall(text)) == 1
    np.testing.assert_allclose(step(x, w), jax.grad(function, 1)(x, w), atol=6e-2)
    assert step(x, w).dtype == jnp.float32


def test_explain_lists_primitives_also_inside_loops(x, w, own_policy):
    def function(x):
        y = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=2)[0]
        return jnp.sum(jnp.exp(y))

    with xla_amp.explain() as report:
        autocast(function)(x)
    rows = {row["operation"]: row for row in report.rows()}
    assert (rows["matmul"]["cast"], rows["matmul"]["result"]) == ("low", "bfloat16")
    assert (rows["exp"]["cast"], rows["exp"]["after"]) == ("fp32", "float32")
    assert rows["sum.dim_IntList"]["cast"] == "fp32_out"
    assert {row["front"] for row in report.rows()} == {"jax"}
    assert "test_autocast_composition.py" in rows["matmul"]["location"]
    assert {"tpu": "tpu.toml", "gpu": "cuda.toml"}[own_policy] in rows["matmul"]["rule"]


def test_export_for_several_platforms(x, w):
    function = jax.jit(autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w))))
    exported = export.export(function, platforms=["cpu", "tpu", "cuda"])(x, w)
    back = export.deserialize(bytearray(exported.serialize(vjp_order=1)))
    np.testing.assert_allclose(back.call(x, w), function(x, w), rtol=1e-5)
    found, expected = jax.grad(back.call, 1)(x, w), jax.grad(function, 1)(x, w)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=1e-3)


def test_effects_keep_their_order_and_dtypes(x, w):
    seen = []

    def function(x):
        y = x @ w
        jax.debug.callback(lambda v: seen.append(np.asarray(v).dtype.name), y, ordered=True)
        jax.debug.callback(lambda v: seen.append("second"), y, ordered=True)
        lax.cond(y[0, 0] < 9, lambda: checkify.check(False, "{first}", first=y[0, 0]), lambda: None)
        return y

    error, y = jax.jit(checkify.checkify(autocast(function)))(x)
    assert error.get().startswith(f"{y[0, 0]} ")
    jax.effects_barrier()
    assert seen == ["float32", "second"]  # a callback gets the dtype that it was written for


def test_mutable_references_keep_their_dtype(x, w):
    def function(x):
        total = jax.new_ref(jnp.zeros((4, 8)))
        for _ in range(2):
            total[...] += x @ w
        return total[...]

    np.testing.assert_allclose(autocast(function)(x), 2 * x @ w, atol=5e-2)


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="backward rules log since JAX 0.11.2")
def test_logs_of_a_backward_rule_are_returned(x, w):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        return x @ w, (x, w)

    def backward(kept, dy):
        x, w = kept
        return (dy @ w.T, x.T @ dy), {"norm": jnp.sum(jnp.square(dy))}

    product.defvjp_with_logs(forward, backward)
    y, pull = jax.vjp(autocast(product), x, w)
    (dx, dw), logs = pull.with_logs(jnp.ones_like(y))
    assert 1e-4 < np.abs(y - x @ w).max() < 5e-2  # of low operands
    assert dx.dtype == dw.dtype == jnp.float32
    assert logs == {"norm": y.size}


# Arguments: errors for illegal values, spellings of a dtype, attributes of the wrapped function.


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"residual": True}, PolicyError, r"residual=True.*'keep', 'low'"),
        ({"enabled": 1}, PolicyError, r"enabled=1.*True or False, got int"),
        ({"policy": "tpux"}, PolicyError, r"unknown policy 'tpux'; nearest: tpu"),
        ({"dtype": jnp.float32, "policy": "tpu"}, UnsupportedDtypeError, "'tpu' offers bfloat16, float16"),
        ({"rules": ["tanh"]}, PolicyError, r"map names to casts.*got \['tanh'\]"),
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


def test_spellings_of_a_dtype_and_the_dtype_of_a_policy():
    x, spellings = jnp.ones((8, 8)), (jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16), jnp.dtype("bfloat16"))
    for dtype in spellings:
        assert "bf16" in str(jax.make_jaxpr(autocast(jnp.matmul, dtype=dtype))(x, x))
    for policy, kind in (("cuda", "float16"), ("gpu", "bfloat16"), ("tpu", "bfloat16")):
        eqns = jax.make_jaxpr(autocast(jnp.matmul, policy=policy))(x, x).eqns
        assert {str(var.aval.dtype) for eqn in eqns for var in eqn.outvars} - {"float32"} == {kind}


class Gpu(NamedTuple):
    compute_capability: str


@pytest.mark.parametrize("policy", [None, "default", "gpu"])
@pytest.mark.parametrize(("capability", "low"), [("7.5", "float16"), ("8.0", "bfloat16"), ("12.0", "bfloat16")])
def test_the_low_dtype_on_a_gpu_is_bfloat16_where_it_multiplies_it(monkeypatch, policy, capability, low):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu(capability)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        settings = autocast(lambda x: x).region.settings() if policy is None else autocast(policy=policy).settings()
        for asked in ("bfloat16", "float16"):
            assert autocast(lambda x: x, policy=policy, dtype=asked).region.settings().low == asked
    assert (settings.low, settings.policy.name) == (low, "gpu")
    said = {str(warning.message) for warning in seen if warning.category is AutocastWarning}
    assert len(said) == (low == "float16")
    assert all("7.5" in text and "LossScale.dynamic()" in text for text in said)


def test_a_wrapped_function_keeps_its_name_and_shows_its_settings():
    @autocast(residual="low")
    def forward(x):
        """Doc."""
        return x

    assert (forward.__name__, forward.__doc__, forward.region.residual) == ("forward", "Doc.", "low")
    assert "enabled=True" in repr(forward.region)


def test_an_object_of_a_class_and_a_method_can_be_wrapped():
    class Model:
        def __call__(self, x):
            return x @ x

        method = autocast(__call__)

    assert autocast(Model())(jnp.ones((2, 2))).dtype == jnp.float32
    assert Model().method(jnp.ones((2, 2))).dtype == jnp.float32
