"""What a user's program keeps under autocast: custom rules, kernels, dtypes, weak types, and the number of programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import COMPILED, jax_events
from equinox.internal import while_loop
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import pallas as pl
from jax.experimental.jet import jet

import xla_amp
from xla_amp.common import events
from xla_amp.errors import RuleWarning
from xla_amp.jax import autocast

W = jnp.asarray(np.random.RandomState(0).randn(8, 8) / 3, jnp.float32)
X = jnp.asarray(np.random.RandomState(1).randn(4, 8), jnp.float32)


def low_products(function, *args):
    return str(jax.make_jaxpr(autocast(function))(*args)).count("low_dot_general")


def distance(found, expected):
    """Of two trees of arrays: the norm of their difference, relative to that of the second."""
    found, expected = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
        for tree in (found, expected)
    )
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def perturbed(w):
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    def forward(w, x):
        return w.value.T.T @ w.value * 0 + x.value @ w.value, (w.value, x.value, w.perturbed, x.perturbed)

    def backward(saved, g):
        w, x, w_perturbed, x_perturbed = saved
        assert (w_perturbed, x_perturbed) == (True, False)  # Python's, so a rule may branch on them
        return x.T @ g if w_perturbed else None, g @ w.T if x_perturbed else None

    product.defvjp(forward, backward, symbolic_zeros=True)
    return jnp.sum(jnp.tanh(product(w, W)))


def symbolic_jvp(w):
    @jax.custom_jvp
    def product(w, x):
        return x @ w

    def rule(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        assert type(dx) is jax.custom_derivatives.SymbolicZero
        return product(w, x), x @ dw

    product.defjvp(rule, symbolic_zeros=True)
    return jnp.sum(jnp.tanh(product(w, X)))


def checkpointed_loop(w):
    def step(state):
        return state[0] + 1, jnp.tanh(state[1] @ w)

    return jnp.sum(while_loop(lambda state: state[0] < 5, step, (0, X), max_steps=16, kind="checkpointed")[1])


@pytest.mark.parametrize("loss", [perturbed, symbolic_jvp, checkpointed_loop])
def test_rules_with_symbolic_zeros(loss):
    expected = jax.jit(jax.grad(loss))(W)
    assert low_products(loss, W) > 0
    gradients = [jax.jit(autocast(jax.grad(loss)))]
    if loss is not checkpointed_loop:  # slow to compile
        gradients += [jax.grad(autocast(loss)), jax.grad(jax.jit(autocast(loss)))]
    for gradient in gradients:
        found = gradient(W)
        assert found.dtype == jnp.float32
        assert 0 < distance(found, expected) < 3e-2


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def multiply(x_ref, y_ref, out_ref):
    out_ref[...] = lax.mul(x_ref[...], y_ref[...])  # refuses operands of two dtypes


def kernel(body, *args, dtype=None):
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype or args[0].dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(*args)


@jax.custom_vjp
def doubled(x):
    return kernel(double, x)


doubled.defvjp(lambda x: (kernel(double, x), None), lambda _, g: (kernel(double, g),))


@jax.custom_vjp
def multiplied(x, y):
    return kernel(multiply, x, y)


multiplied.defvjp(
    lambda x, y: (kernel(multiply, x, y), (x, y)), lambda s, g: (kernel(multiply, s[1], g), kernel(multiply, s[0], g))
)


def test_a_function_with_kernels_keeps_its_dtypes():
    def layer(w):
        return {"y": doubled(X @ w), "low": jnp.bfloat16(3), "count": jnp.arange(3), "rate": 0.5}

    found = autocast(layer)(W)
    assert jax.tree.map(lambda leaf: getattr(leaf, "dtype", leaf), found) == {
        "y": jnp.float32,
        "low": jnp.bfloat16,
        "count": jnp.int32,
        "rate": 0.5,
    }
    gradient = jax.grad(lambda w: jnp.sum(autocast(layer)(w)["y"]))(W)
    assert distance(gradient, jax.grad(lambda w: jnp.sum(layer(w)["y"]))(W)) < 1e-2


def selective(x_ref, out_ref):
    @pl.when(x_ref[0, 0] < 1e9)
    def _():
        out_ref[...] = x_ref[...] * 3


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (lambda w: jnp.sum(doubled(X @ w) * (X @ w)), "float32"),
        (lambda w: jnp.sum(multiplied(X @ w, X)), "float32"),
        (lambda w: jnp.sum(kernel(selective, X @ w)), "float32"),
        (lambda w: jnp.sum(doubled((X @ w).astype(jnp.bfloat16)).astype(jnp.float32)), "bfloat16"),
    ],
)
def test_a_kernel_runs_as_it_was_written(loss, dtype):
    with events.capture() as records:
        found = autocast(loss)(W)
    (record,) = (record for record in records if record.operation == "pallas_call")
    assert (record.used[0], found.dtype) == (dtype, jnp.float32)
    assert low_products(loss, W) > 0
    assert 0 < distance(found, loss(W)) < 2e-2


def compilations(function):
    with jax_events() as events:
        function()
    return events.count(COMPILED)


def test_python_numbers_compile_nothing_new():
    step = autocast(jax.jit(lambda x, rate: jnp.tanh(x @ x * rate)))
    square = jnp.eye(8)
    step(square, 0.5)
    assert compilations(lambda: [step(square, rate) for rate in (1.0, 2.0, 3.0)]) == 0
    np.testing.assert_allclose(step(square, 2.0), np.tanh(2 * np.eye(8)), atol=2e-2)
    static = autocast(jax.jit(lambda x, rate: x @ x if rate > 0.5 else x, static_argnames="rate"))
    assert (float(static(2 * square, rate=0.7)[0, 0]), float(static(2 * square, rate=0.2)[0, 0])) == (4.0, 2.0)


def test_eager_calls_of_a_jit_function_are_traced_once():
    traces, x = [], X

    @autocast
    @jax.jit
    def product(x):
        traces.append(x)
        return x @ W

    for _ in range(3):
        product(x)
    count = len(traces)
    product(x + 1)
    assert len(traces) == count
    assert product(x[:2]).shape == (2, 8)
    with xla_amp.policy.override({"matmul": "fp32"}):
        assert distance(product(x), x @ W) < 1e-6
    assert distance(product(x), x @ W) > 1e-6
    donated = autocast(jax.jit(lambda x: jnp.sum(x @ W) + x, donate_argnums=0))
    given = x + 0
    donated(given)
    assert given.is_deleted()


@pytest.mark.parametrize("activation", [jax.nn.gelu, lambda h: scaled(2.0, h)])
def test_an_eager_call_gives_what_a_compiled_one_gives(activation):
    def function(x):
        return activation(x @ W) * 1.0

    eager, compiled = autocast(function)(X), jax.jit(autocast(function))(X)
    assert eager.dtype == compiled.dtype == jnp.float32
    np.testing.assert_allclose(eager, compiled, rtol=1e-2, atol=1e-3)
    with jax.disable_jit():
        np.testing.assert_allclose(autocast(function)(X), compiled, rtol=1e-2, atol=1e-3)
    gradient = jax.grad(lambda x: autocast(function)(x).sum())
    np.testing.assert_allclose(gradient(X), jax.jit(gradient)(X), rtol=1e-2, atol=1e-2)
    with events.capture() as records:
        autocast(function)(X)
    product = next(record for record in records if record.operation == "matmul")
    assert product.used == ("bfloat16", "bfloat16")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, x):
    return factor * x


scaled.defvjp(lambda factor, x: (factor * x, None), lambda factor, _, g: (factor * g,))


@jax.custom_batching.custom_vmap
def batched(w, x):
    return x @ w


@batched.def_vmap
def _(size, in_batched, w, x):
    return jax.vmap(jnp.matmul, (0 if in_batched[1] else None, 0 if in_batched[0] else None))(x, w), True


sequential = jax.custom_batching.sequential_vmap(lambda w, x: x @ w)
FUNCTIONS = {
    "custom_vmap": batched,
    "sequential_vmap": sequential,
    "composite": lambda w, x: lax.composite(lambda w, x: x @ w, name="my.product")(w, x),
    "linear_call": lambda w, x: linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_inside_of_other_calls_are_low(name):
    function = FUNCTIONS[name]
    assert low_products(function, W, X) == 1
    assert autocast(function)(W, X).dtype == jnp.float32
    assert 0 < distance(autocast(function)(W, X), X @ W) < 1e-2
    if "vmap" in name:
        for mapped in (jax.vmap(autocast(function), (None, 0)), autocast(jax.vmap(function, (None, 0)))):
            found = mapped(W, jnp.stack([X, -X]))
            assert found.dtype == jnp.float32
            assert 0 < distance(found, jnp.stack([X @ W, -X @ W])) < 1e-2
    if name == "linear_call":
        gradient = jax.grad(lambda x: jnp.sum(autocast(function)(W, x) * X))(X)
        assert 0 < distance(gradient, X @ W.T) < 1e-2
        assert "low_dot_general" in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(autocast(function)(W, x) * X)))(X))


def test_linear_solvers_stay_float32_and_are_reported():
    matrix = W @ W.T + 4 * jnp.eye(8)

    def solve(b):
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b)[0]

    with events.capture() as records:
        found = autocast(solve)(X[0])
    np.testing.assert_allclose(found, solve(X[0]), rtol=1e-5)
    assert any("residuals" in record.why for record in records if record.operation == "custom_linear_solve")


def test_weak_types_are_kept():
    def scaled(s, x):
        return s * 2.0, x * s, jnp.sin(1.0)

    s = jnp.asarray(3.0)
    plain, found = scaled(1 * s, X), autocast(scaled)(1 * s, X)
    assert [y.weak_type for y in found] == [y.weak_type for y in plain]
    assert autocast(jax.jit(lambda: jnp.sin(1.0)))().weak_type


def test_explain_sees_functions_that_are_compiled_already():
    outside, inside = jax.jit(autocast(lambda x: x @ W)), autocast(jax.jit(lambda x: x @ W))
    for function in (outside, inside):
        function(X)
        for _ in range(2):
            with xla_amp.explain() as report:
                function(X)
            assert "matmul" in {row["operation"] for row in report.rows()}


def test_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        mixed, gradient = jax.value_and_grad(autocast(lambda w: jnp.sum((X @ w) * (X @ w) + jnp.exp(X @ w))))(W)
    assert mixed.dtype == gradient.dtype == jnp.float32


def test_a_function_of_jit_has_its_methods():
    @functools.partial(jax.jit, static_argnums=1, donate_argnames="buffer")
    def function(x, power, *, buffer):
        return jnp.tanh(x @ W) ** power + buffer

    low, shape = autocast(function), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    for lowered in (low.lower(shape, 3, buffer=shape), low.trace(shape, 3, buffer=shape).lower()):
        assert "bf16" in lowered.as_text()
        assert lowered.compile().memory_analysis().alias_size_in_bytes == X.nbytes
    assert low.eval_shape(shape, 3, buffer=shape) == function.eval_shape(shape, 3, buffer=shape)
    assert low.region.enabled
    with xla_amp.policy.override(mm="fp32"):
        assert "bf16" not in low.lower(shape, 3, buffer=shape).as_text()
    assert "bf16" not in autocast(function, enabled=False).lower(shape, 3, buffer=shape).as_text()
    assert not hasattr(autocast(lambda x: x), "lower")
    low(X, 3, buffer=X + 0)
    low.clear_cache()
    assert compilations(lambda: low(X, 3, buffer=X + 0)) > 0
    assert compilations(lambda: low(X, 3, buffer=X + 0)) == 0


def test_the_rule_of_a_derivative_follows_the_overrides_that_are_open_when_it_runs():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, grad: (grad @ saved[1].T, saved[0].T @ grad))
    _, backward = jax.vjp(autocast(lambda x: product(x, W)), X)
    with xla_amp.policy.override({"matmul": "fp32"}):
        assert distance(backward(X @ W), X @ W @ W.T) < 1e-6
    assert distance(backward(X @ W), X @ W @ W.T) > 1e-6


# ---- symbolic sizes --------------------------------------------------------------------------------------------------

LAYER = {"w": jnp.full((8, 16), 0.1), "b": jnp.linspace(-1.0, 1.0, 16), "q": jnp.eye(16), "scale": jnp.ones(16)}
KERNEL = jnp.full((3, 3, 4, 16), 0.1)


def attended(p, x):
    query = x @ p["w"]
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), jnp.einsum("bqd,bkd->bqk", query, query), -1e9)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), query) @ p["q"] + p["b"]


def normed(p, x):
    y = x @ p["w"] + p["b"]
    centred = y - y.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["b"]


def recurrent(p, x):
    def body(carry, each):
        carry = jnp.tanh(carry @ p["q"] + each @ p["w"] + p["b"])
        return carry, carry

    return lax.scan(body, jnp.zeros((x.shape[1], 16)), x)[1]


SYMBOLIC = {
    "linear": (lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), "b, 8"),
    "linear of two": (lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), "b, t, 8"),
    "convolution": (
        lambda p, x: (
            lax.conv_general_dilated(x, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + p["b"]
        ),
        "b, t, 8, 4",
    ),
    "attention": (attended, "b, 5, 8"),
    "attention of two": (attended, "b, t, 8"),
    "norm": (normed, "b, t, 8"),
    "embedding": (lambda p, x: p["q"][(x[..., 0] > 0).astype(int)] @ p["q"] + p["b"], "b, t, 1"),
    "scan": (recurrent, "5, b, 8"),
    "scan of two": (recurrent, "t, b, 8"),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes_are_exported(name):
    function, sizes = SYMBOLIC[name]

    def loss(p, x):
        return (function(p, x) ** 2).mean()

    known = {"b": 3, "t": 5}
    x = jax.random.normal(jax.random.key(0), [known.get(size) or int(size) for size in sizes.split(", ")])
    given = jax.ShapeDtypeStruct(jax.export.symbolic_shape(sizes), jnp.float32)
    for way in (jax.jit(jax.value_and_grad(autocast(loss))), autocast(jax.jit(jax.value_and_grad(loss)))):
        exported = jax.export.export(way)(LAYER, given)
        assert "bf16" in exported.mlir_module()
        for one, other in zip(*map(jax.tree.leaves, (exported.call(LAYER, x), way(LAYER, x))), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


# ---- what JAX has in float32 only ------------------------------------------------------------------------------------

WIDE_ONLY = {
    "complex": lambda y: jnp.abs(lax.complex(y, y)),
    "conj": lambda y: jnp.abs(lax.conj(y)),
    "rfft": lambda y: jnp.abs(jnp.fft.rfft(y)),
    "irfft": jnp.fft.irfft,
    "cholesky": lambda y: jnp.linalg.cholesky(y @ y.T),
    "solve": lambda y: jnp.linalg.solve(y, y[0]),
    "svd": lambda y: jnp.linalg.svd(y, compute_uv=False),
    "qr": lambda y: jnp.abs(jnp.linalg.qr(y)[1]),
    "eigh": lambda y: jnp.linalg.eigh(y + y.T)[0],
}


@pytest.mark.parametrize("policy", ["tpu", "cuda", "hpu"])
@pytest.mark.parametrize("name", WIDE_ONLY)
def test_what_jax_has_in_float32_only_is_float32_after_a_product(name, policy):
    y = jnp.eye(6) * 6 + jnp.arange(36.0).reshape(6, 6) / 36
    expected = WIDE_ONLY[name](y)
    result = jax.jit(autocast(lambda y: WIDE_ONLY[name](y @ jnp.eye(6)), policy=policy))(y)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=2e-2, atol=2e-2 * float(jnp.abs(expected).max()))


def test_a_rule_that_asks_for_what_jax_has_not_is_told():
    with pytest.warns(RuleWarning, match=r"linalg_cholesky = low.*JAX has it in float32 and wider dtypes only"):
        found = autocast(jnp.linalg.cholesky, rules={"linalg_cholesky": "low"})(jnp.eye(4))
    assert found.dtype == jnp.float32


def test_jet_says_where_autocast_belongs():
    with pytest.raises(TypeError, match=r"autocast\(lambda \*primals: jet\(f, primals, series\)\)"):
        jet(autocast(lambda x: jnp.tanh(x @ W)), (X,), ((X, X),))
    inside, _ = autocast(lambda *primals: jet(lambda x: jnp.tanh(x @ W), primals, ((X, X),)))(X)
    np.testing.assert_allclose(inside, jnp.tanh(X @ W), atol=2e-2)
