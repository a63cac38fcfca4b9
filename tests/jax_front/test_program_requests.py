"""What a program asks for wins over the policy: precision, dtypes, algorithms; other products; constants."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contractions import contractions
from jax import lax

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.jax import autocast

LOW, WIDE = ("bf16", "bf16"), ("f32", "f32")


def array(*shape, seed=0):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), jnp.float32)


def angles(positions, frequencies):
    return jnp.einsum("i,j->ij", positions, frequencies, precision="highest")


def test_rotary_positions_are_exact():
    positions, frequencies = jnp.arange(4096.0), 1 / 10000 ** (jnp.arange(0, 64, 2) / 64)
    found = autocast(angles)(positions, frequencies)
    np.testing.assert_array_equal(found, angles(positions, frequencies))
    with xla_amp.explain() as report:
        autocast(angles)(positions, frequencies)
    assert [row["why"] for row in report.rows()] == ["the program asks for float32: precision HIGHEST"]


PRECISIONS = {
    "highest": WIDE,
    "high": WIDE,
    ("default", "high"): WIDE,
    lax.DotAlgorithmPreset.F32_F32_F32: WIDE,
    lax.DotAlgorithmPreset.BF16_BF16_F32: WIDE,  # an algorithm for float32 operands
    lax.DotAlgorithmPreset.DEFAULT: LOW,
    "default": LOW,
    None: LOW,
}


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_a_precision_or_an_algorithm_wins(precision):
    x, w = array(6, 8), array(8, 8, seed=1)

    def function(x, w):
        return jnp.sum(jnp.tanh(jnp.matmul(x, w, precision=precision)))

    expected = PRECISIONS[precision]
    assert contractions(autocast(function), x, w) == {expected: 1}
    assert contractions(jax.grad(autocast(function), (0, 1)), x, w) == {expected: 3}
    assert contractions(autocast(jax.grad(function, (0, 1))), x, w) == {expected: 3}
    given = jax.jit(lambda x, w: (function(x, w), x @ w)).lower(x, w)
    converted = stablehlo.autocast(given)
    first, second = (line for line in converted.text().splitlines() if "dot_general" in line)
    assert ["xbf16" in first, "xbf16" in second] == [expected == LOW, True]
    assert re.search("(precision|algorithm) = [^:]*", first)[0] in given.as_text()
    asks = any("the program asks for float32" in each.why for each in converted.report.operations)
    assert asks == (expected == WIDE)


def test_a_convolution_and_the_global_setting_win_too():
    x, w = array(2, 3, 6, 6), array(4, 3, 3, 3, seed=1)
    assert contractions(autocast(lambda x, w: lax.conv(x, w, (1, 1), "SAME", precision="highest")), x, w) == {WIDE: 1}
    with jax.default_matmul_precision("float32"):
        assert contractions(autocast(lambda x, w: lax.conv(x, w, (1, 1), "SAME")), x, w) == {WIDE: 1}
        assert contractions(autocast(jnp.matmul), x, x) == {WIDE: 1}
    assert contractions(autocast(jnp.matmul), x, x) == {LOW: 1}


def test_dtypes_that_the_program_chose():
    x, w = array(4, 8), array(8, 8, seed=1)

    def product(**settings):
        return lambda x, w: jnp.matmul(x, w, **settings)

    assert contractions(autocast(product(preferred_element_type=jnp.float16)), x, w) == {WIDE: 1}
    assert contractions(autocast(product(preferred_element_type=jnp.bfloat16)), x, w) == {LOW: 1}
    low = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    assert autocast(product(preferred_element_type=jnp.float32))(*low).dtype == jnp.float32
    half = x.astype(jnp.float16), w.astype(jnp.float16)
    assert contractions(autocast(product()), *half) == {("f16", "f16"): 1}

    def float32_head(x, w):
        hidden = jax.nn.relu(jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)))
        return hidden.astype(jnp.float32) @ w

    assert contractions(autocast(float32_head), x, w) == {LOW: 1, WIDE: 1}
    # Weights stored in bfloat16 say nothing about the product.
    stored = jax.jit(lambda x, w: x @ w.astype(jnp.float32))
    assert contractions(autocast(stored), x, w.astype(jnp.bfloat16)) == {LOW: 1}


def test_other_dtypes_and_their_partners_are_left_alone():
    x = array(4, 4)
    for dtype in (jnp.int32, jnp.complex64):
        assert autocast(lambda a: a @ a)(jnp.ones((4, 4), dtype)).dtype == dtype
    with jax.enable_x64(True):
        wide = jnp.ones((4, 4), jnp.float64)

        def product(a, b):
            return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type="float64")

        assert "bf16" not in jax.jit(autocast(product)).lower(wide, x).as_text()
        for other in (x, wide):
            assert contractions(autocast(jnp.matmul), wide, other) == {("f64", "f64"): 1}
    assert "bf16" not in jax.jit(autocast(jnp.matmul)).lower(x.astype(jnp.complex64), x).as_text()


def test_inner_and_outer_products_are_float32():
    ones = jnp.ones(4097)
    assert autocast(lambda v: v @ jnp.ones(4097))(ones) == 4097
    assert autocast(jnp.vdot)(ones, ones) == 4097
    x = array(3, 5)
    for subscripts in ("bi,bi->b", "bi,bj->bij"):

        def function(x, subscripts=subscripts):
            return jnp.einsum(subscripts, x, x)

        np.testing.assert_array_equal(autocast(function)(x), function(x))
    assert contractions(autocast(jnp.matmul), x, x[0]) == {LOW: 1}  # a matrix and a vector
    with policy.override(dot="low"):
        assert contractions(autocast(jnp.vdot), x, x) == {LOW: 1}


def test_selections_of_float32_values_are_exact():
    table = jnp.arange(1000.0)
    pick = autocast(lambda i: jax.nn.one_hot(i, 1000) @ table)
    assert pick(999) == 999
    rows = autocast(lambda i: jax.nn.one_hot(i, 1000) @ table[:, None])
    np.testing.assert_array_equal(rows(jnp.array([999, 3])), [[999], [3]])
    # What is low already is selected in the low dtype, without loss.
    x, w = array(1000, 8), array(8, 8, seed=1)
    both = autocast(lambda i, x: jax.nn.one_hot(i, 1000) @ (x @ w))
    assert contractions(both, jnp.array([1, 2]), x) == {LOW: 2}


# The optimizer of a step.


OPTIMIZERS = {"muon": optax.contrib.muon, "dadapt_adamw": lambda _: optax.contrib.dadapt_adamw(1.0), "sgd": optax.sgd}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_products_of_the_optimizer_are_left_alone(name):
    optimizer = OPTIMIZERS[name](1e-2)
    weights = {"w": array(8, 8), "v": array(8, 8, seed=1)}
    x = array(6, 8, seed=2)

    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights["w"]) @ weights["v"]) ** 2)

    def step(weights, state):
        value, gradients = jax.value_and_grad(loss)(weights)
        updates, state = jax.jit(optimizer.update)(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    state = optimizer.init(weights)
    model = contractions(jax.value_and_grad(loss), weights)[WIDE]
    plain = contractions(step, weights, state)[WIDE]
    for whole in (autocast(step), autocast(jax.jit(step))):
        found = contractions(whole, weights, state)
        assert (found[LOW], found[WIDE]) == (model, plain - model)


def test_a_loss_that_is_evaluated_after_the_update_is_the_models():
    w, x = array(8, 8), array(6, 8, seed=2)

    def step(w, x):
        w = w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w, jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    assert contractions(autocast(step), w, x) == {LOW: 4}

    def said(w, x):  # a region inside decides for itself
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * autocast(jnp.matmul)(gradient, gradient.T)

    assert contractions(autocast(said), w, x) == {LOW: 3}


def network(p, x):
    return jnp.tanh(x @ p[0] + p[1]) @ p[2]


def stepped(p, x):
    gradient = jax.grad(lambda p: jnp.mean(network(p, x) ** 2))(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradient)


NETWORK = [array(8, 16, seed=3), array(16, seed=4), array(16, 6, seed=5)]


def guided(p, q, x):
    x = x + 0.1 * jax.grad(lambda x: jnp.sum(network(q, x) ** 2))(x)
    return network(p, x)


def validated(p, x, held_out, target):
    p = stepped(p, x)
    return p, jnp.mean((network(p, held_out) - target) ** 2)


def averaged(p, teacher, x, held_out):
    teacher = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, stepped(p, x))
    return teacher, network(teacher, held_out)


def projected(w, m, projection, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    m = 0.9 * m + projection.T @ gradient
    return w - 0.1 * projection @ jnp.sign(m), m


def preconditioned(w, factor, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * factor @ gradient


def power_iteration(w, factor, basis, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    factor = factor + gradient @ gradient.T
    return w - 0.1 * basis @ gradient, factor, jnp.linalg.qr(factor @ basis)[0]


AFTER_A_GRADIENT = [
    (guided, (NETWORK, NETWORK, array(6, 8)), 0),
    (validated, (NETWORK, array(6, 8), array(7, 8), array(7, 6)), 0),
    (averaged, (NETWORK, NETWORK, array(6, 8), array(7, 8)), 0),
    (projected, (array(8, 6), array(5, 6), array(8, 5), array(6, 8)), 2),
    (preconditioned, (array(8, 6), array(8, 8), array(6, 8)), 1),
    (power_iteration, (array(8, 6), array(8, 8), array(8, 8), array(6, 8)), 3),
]
"""Functions, their arguments, and how many products make new weights: those are the optimizer's."""


@pytest.mark.parametrize(
    ("function", "args", "own"), AFTER_A_GRADIENT, ids=lambda value: getattr(value, "__name__", "")
)
def test_products_after_a_gradient_are_low_but_for_those_that_make_new_weights(function, args, own):
    found = contractions(autocast(function), *args)
    assert found[WIDE] == own
    assert found[LOW] == 2 or not own


# Constants and arrays beside a low value.


def by_hand(x, w, low):
    """A product of rounded operands, the rest in float32."""
    return x.astype(low).astype(jnp.float32) @ w.astype(low).astype(jnp.float32)


def product(x, w, low):
    return x @ w


NEAR_1 = {
    "clip": lambda p: jnp.log(1 - jnp.clip(p, 1e-6, 1 - 1e-6)),
    "minimum": lambda p: jnp.arctanh(jnp.minimum(jnp.abs(p), 1 - 1e-5)),
    "clamp": lambda p: jnp.arccos(lax.clamp(-1 + 1e-6, p, 1 - 1e-6)),
    "where": lambda p: 1 / (1 - jnp.where(p < 0.9999, p, 0.9999)),
    "function": lambda p: jnp.log(1 - jax.jit(jnp.minimum)(p, 1 - 1e-6)),
    "argument": lambda p: jax.jit(lambda p, eps: jnp.log(1 - jnp.minimum(p, 1 - eps)))(p, 1e-6),
    "1 - p": lambda z: jnp.log(1 - jax.nn.sigmoid(z) + 1e-7),
    "clipped": lambda z: jnp.log1p(-jnp.clip(jax.nn.sigmoid(z), 1e-6, 1 - 1e-6)),
    "odds": lambda z: jnp.log1p(jax.nn.sigmoid(z) / (1 - jax.nn.sigmoid(z) + 1e-6)),
    "squeezed": lambda z: jax.scipy.special.logit(jax.nn.sigmoid(z) * (1 - 2e-6) + 1e-6),
    "tanh": lambda z: jnp.log(1 - jnp.tanh(z) ** 2 + 1e-6),
    "focal": lambda z: (1 - jax.nn.sigmoid(z)) ** 2 * jnp.log(1 - jax.nn.sigmoid(z) + 1e-8),
}


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", NEAR_1)
def test_what_is_read_near_1_is_not_rounded_to_1(name, low):
    """Of a bound, and of a sigmoid, by logarithms and the like."""

    def loss(x, w, product):
        return jnp.mean(NEAR_1[name](product(x, w, low)))

    x, w = array(16, 8), 3 * array(8, 8, seed=1) / 2
    with jax.enable_x64(True):
        wide = np.asarray(x, np.float64)
        exact = jax.value_and_grad(lambda w: jnp.mean(NEAR_1[name](wide @ w)))(np.asarray(w, np.float64))
    by_user = jax.value_and_grad(lambda w: loss(x, w, by_hand))(w)
    for function in (
        jax.value_and_grad(autocast(lambda w: loss(x, w, product), dtype=low)),
        autocast(jax.value_and_grad(lambda w: loss(x, w, product)), dtype=low),
    ):
        for one, other, right in zip(function(w), by_user, exact, strict=True):
            error, of_user = (float(np.abs(each - np.asarray(right)).max()) for each in (one, other))
            assert error <= 2 * of_user + 0.002 * float(np.abs(right).max())


def test_what_computes_between_products_is_float32_and_saves_its_low_operands():
    x, w = array(4, 8), array(8, 8)

    def gated(w):
        h = x @ w
        gate = jax.nn.sigmoid(h)
        h = gate * jnp.tanh(h) + (1 - gate) * jax.nn.silu(h)
        return (0.25 * (h @ w)) @ w

    text = str(jax.make_jaxpr(autocast(gated, dtype="bfloat16"))(w))
    assert not re.search(r"bf16\[4,8\] = (tanh|logistic|sub|add)", text)
    assert "bf16[4,8] = mul" in text  # a power of two rounds nothing
    saved = jax.make_jaxpr(lambda w: jax.vjp(autocast(gated, dtype="bfloat16"), w)[1])(w).out_avals
    assert {str(aval.dtype) for aval in saved if aval.shape == (4, 8) and aval is not x} == {"bfloat16"}


SAMPLERS = {
    "gamma": jax.random.gamma,
    "loggamma": jax.random.loggamma,
    "beta": lambda key, a: jax.random.beta(key, a, a),
    "dirichlet": jax.random.dirichlet,
    "t": jax.random.t,
    "chisquare": jax.random.chisquare,
    "poisson": jax.random.poisson,
}


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_draws_what_it_draws_in_float32(name, low):
    x, w = jnp.full((50, 8), 5.0), jnp.full((8, 4), 0.125)  # the product is 5 in each dtype

    def draw(x):
        return SAMPLERS[name](jax.random.key(0), x @ w)

    np.testing.assert_allclose(jax.jit(autocast(draw, dtype=low))(x), jax.jit(draw)(x), rtol=1e-5)


REMAINDERS = {
    "mod": lambda y: jnp.mod(y, 7.0),
    "fmod": lambda y: jnp.fmod(y, 7.0),
    "a number": lambda y: 20 * y + 273.15,
    "divided": lambda y: y / 3,
    "of two": lambda y: y * y.T,
}


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", REMAINDERS)
def test_a_number_beside_a_product_is_not_rounded(name, low):
    x, w = jnp.array([[30.0, 29.0, 1.0], [1.0, 2.0, 3.0]]), jnp.array([[1.0, 32.0], [2.0, 2.0], [1.0, 1.0]])
    x, w = jnp.pad(x, ((0, 0), (0, 5))), jnp.pad(w, ((0, 5), (0, 0)))
    function = REMAINDERS[name]
    rounded = (x @ w).astype(jnp.float32 if "mod" in name else low).astype(jnp.float32)
    got = jax.jit(autocast(lambda x, w: function(x @ w), dtype=low))(x, w)
    np.testing.assert_allclose(got, function(rounded), rtol=1e-6)


@pytest.mark.parametrize("start", [lambda x, w: jnp.zeros((16, 4)), lambda x, w: jnp.zeros_like(x @ w)])
def test_a_sum_that_starts_as_an_array_is_float32(start):
    ws, x = 0.3 + 0.1 * array(100, 8, 4), jnp.abs(array(16, 8, seed=1))

    def total(ws, x, product):
        found = start(x, ws[0])
        for w in ws:
            found = found + product(x, w, jnp.bfloat16)
        return found

    got, exact = jax.jit(autocast(lambda ws, x: total(ws, x, product)))(ws, x), total(ws, x, product)
    bound = 2 * jnp.abs(total(ws, x, by_hand) - exact).max() + 2.0**-9 * jnp.abs(exact).max()
    assert jnp.abs(got - exact).max() < bound


MASK = jnp.full(6, -1e9)
MASKED = {
    "held": lambda x, w: jax.nn.log_softmax(x @ w + MASK),
    "held inside": lambda x, w: jax.jit(lambda x, w: jax.nn.log_softmax(x @ w + MASK))(x, w),
    "selected": lambda x, w: jax.nn.log_softmax(jnp.where(MASK < 0, x @ w, -1e9)),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_float16_cannot_hold_is_no_bias(name):
    x, w = jnp.ones((4, 16)), jnp.full((16, 6), -4.0)
    got = jax.jit(autocast(MASKED[name], dtype=jnp.float16))(x, w)
    np.testing.assert_allclose(got, MASKED[name](x, w), rtol=1e-3)


# Norms.


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize(
    "unit",
    [
        lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
        lambda h: h * lax.rsqrt(jnp.sum(h * h, -1, keepdims=True)),
        lambda h: h / jnp.sqrt(jnp.sum(jnp.square(h), -1, keepdims=True)),
        lambda h: h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True)) / 4,
    ],
    ids=["norm", "rsqrt", "square", "mean"],
)
def test_squares_do_not_leave_the_range_of_float16(unit, scale):
    x, w = scale * array(32, 16), array(16, 16, seed=1) / 4
    found = jax.jit(autocast(lambda x, w: unit(x @ w), dtype="float16"))(x, w)
    np.testing.assert_allclose(jnp.linalg.norm(found, axis=-1), 1, rtol=5e-3)


@pytest.mark.parametrize("rule", ["linalg_vector_norm", "norm", "linalg_norm"])
def test_a_rule_for_norms_acts(rule):
    x, w = array(4, 8), array(8, 8, seed=1)

    def function(x, w):
        return jnp.linalg.norm(jnp.tanh(x @ w), axis=-1)

    text = str(jax.make_jaxpr(autocast(function, rules={rule: "low"}, strict=True))(x, w))
    assert "f32[4] = sqrt" in text
    assert "bf16[4] = convert_element_type" in text


# Constants in float16.


@pytest.mark.parametrize("small", [1e-10, 1e-6])
def test_small_constants_keep_float32_in_float16(small):
    x, w = jnp.zeros((4, 8)), array(8, 8)

    def logarithm(x):
        return jnp.log(jnp.abs(x @ w) + small)

    def quotient(x):
        return jnp.ones(()) / (jnp.abs(x @ w) + small)

    for function in (logarithm, quotient):
        found = autocast(function, dtype=jnp.float16)(x)
        np.testing.assert_allclose(found, function(x), rtol=1e-5)


def test_a_number_that_takes_more_than_half_of_float16_keeps_float32():
    x, w = jnp.ones((4, 8)), 0.4 * jnp.ones((8, 8))
    functions = [
        lambda w: (x @ w) * 3e4,
        lambda w: (x @ w) / 2e-4,
        lambda w: jax.jit(lambda y, number: y * number)(x @ w, 3e4),
        lambda w: lax.scan(lambda carry, _: (carry, (carry @ w) * 3e4), x, None, length=2)[1],
        lambda w: jax.checkpoint(lambda w: (x @ w) * 3e4)(w),
    ]
    for function in functions:
        found, back = jax.vjp(autocast(function, dtype=jnp.float16), w)
        np.testing.assert_allclose(found, function(w), rtol=1e-3)
        np.testing.assert_allclose(
            back(1e-3 * jnp.ones_like(found))[0], jax.vjp(function, w)[1](1e-3 * found)[0] / found.mean(), rtol=1e-3
        )
    text = str(jax.make_jaxpr(autocast(lambda w: (x @ w) * 128.0 / 64, dtype=jnp.float16))(w))
    assert "f16[4,8] = mul" in text
    assert "f16[4,8] = div" in text


def test_a_float64_result_is_computed_from_operands_that_are_not_rounded():
    with jax.enable_x64(True):
        x, w = (jax.random.normal(jax.random.key(seed), (8, 8), jnp.float32) for seed in (0, 1))

        def product(x, w):
            return jnp.dot(x, w, preferred_element_type=jnp.float64)

        exported = jax.export.export(jax.jit(product))(x, w)
        expected = product(x, w)
        for found in (autocast(product)(x, w), stablehlo.autocast(exported).program.exported.call(x, w)):
            assert found.dtype == jnp.float64
            np.testing.assert_array_equal(found, expected)


def test_a_product_of_few_terms_names_its_reason_and_a_rule_of_the_user_acts():
    def angles(frequencies, positions):
        return jnp.cos(frequencies[:, None] @ positions[None])

    x = jnp.arange(8.0)
    (line,) = autocast(angles).report(x, x).float32
    assert "at most four terms are summed" in line.record.why
    found = stablehlo.autocast(jax.jit(angles).lower(x, x)).report.operations
    assert any("at most four terms are summed" in each.why for each in found)
    assert autocast(angles, rules={"linear": "low"}).report(x, x).low
    one = array(16, 3, 3)
    for rules, wanted in (({}, WIDE), ({"bmm": "low"}, LOW)):
        assert contractions(autocast(jnp.matmul, rules=rules), one, one) == {wanted: 1}
        converted = stablehlo.autocast(jax.jit(jnp.matmul).lower(one, one), rules=rules)
        assert bool(converted.report.casts) == (wanted == LOW)
    low = stablehlo.autocast(jax.jit(angles).lower(x, x), rules={"linear": "low"})
    assert low.report.casts


# Constants inside the jaxpr, as JAX will write them (``JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1``).


@pytest.fixture(params=[False, True], ids=["", "simplified"])
def constants(request):
    before = jax.config.jax_use_simplified_jaxpr_constants
    jax.config.update("jax_use_simplified_jaxpr_constants", request.param)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", before)


@pytest.mark.usefixtures("constants")
@pytest.mark.parametrize("module", [np, jnp])
def test_constants_that_print_alike_are_two(module):
    size = 1024  # whose text leaves numbers out, from 1000 on
    one, other = module.ones(size, np.float32), module.ones(size, np.float32)
    other = module.where(module.arange(size) == size // 2, np.float32(1000), other)
    assert str(one) == str(other)
    x, w = jnp.ones((4, size)) / 64, jnp.eye(size)

    def function(x):
        hidden = x @ w
        return jnp.sum(jnp.exp(hidden) * one), jnp.sum(jnp.exp(hidden) * other)

    for call in (jax.jit(autocast(function)), lambda x: jax.vjp(autocast(function), x)[0]):
        for found, expected in zip(call(x), function(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-2)


@pytest.mark.usefixtures("constants")
def test_a_weight_of_a_closure_is_rounded_once_and_low():
    w, x = jnp.eye(8), jnp.ones((4, 8))

    def function(x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w @ w), None), x, None, length=2)[0].sum()

    assert contractions(jax.grad(autocast(function)), x) == {LOW: 4}
    np.testing.assert_allclose(jax.grad(autocast(function))(x), jax.grad(function)(x), rtol=2e-2)
