"""Steps of Flax nnx models with statistics and dropout: gradients and state beside plain nnx in float32."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from source_tree import ROOT

from xla_amp.jax import LossScale, autocast, skip_nonfinite, value_and_grad


class Net(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # the gradient of a bias before a norm is 0
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.lora = nnx.LoRAParam(jnp.zeros((16, 4)))
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        hidden = self.drop(nnx.relu(self.norm(self.body(x))))
        return self.head(hidden) + hidden @ self.lora[...]


X, Y = jax.random.normal(jax.random.key(0), (32, 8)) + 1, jnp.arange(32) % 4


def loss_fn(net, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()


def close(one, other, tolerance):
    """Whether all numbers of two trees are close, and all integers and keys equal."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert ours.dtype == theirs.dtype
        if not jnp.issubdtype(ours.dtype, jnp.floating):
            assert ours.tolist() == theirs.tolist()
        else:
            error = jnp.linalg.norm(ours - theirs) / jnp.maximum(jnp.linalg.norm(theirs), 1e-3)
            assert float(error) < tolerance


def plainly(net, argnums=0):
    return nnx.value_and_grad(loss_fn, argnums=argnums)(net, X, Y)


def scanned(function):
    """`function(scale, net)` as a loop of one iteration, in which the module is the carry."""

    def run(scale, net):
        body = nnx.scan(
            lambda net, _: (net, tuple(function(scale, net))), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
        )
        return jax.tree.map(lambda leaf: leaf[0], body(net, jnp.zeros(1))[1])

    return run


def jitted(function):
    """`function(scale, net)` under `jax.jit`, which gives the module back."""
    inner = jax.jit(lambda scale, net: (function(scale, net), net))

    def run(scale, net):
        result, after = inner(scale, net)
        net.calls = after.calls
        nnx.update(net, nnx.state(after))
        return result

    return run


WRAPPERS = {"eager": lambda f: f, "nnx.jit": nnx.jit, "nnx.scan": scanned, "jax.jit": jitted}


TOLERANCES = {None: 1e-5, "bfloat16": 0.06, "float16": 0.01}
ONCE = {("eager", "float16"), ("nnx.jit", "bfloat16"), ("nnx.scan", "float16"), ("jax.jit", None)}


@pytest.mark.parametrize(
    ("wrapper", "dtype"),
    [
        pytest.param(*case, marks=[] if case in ONCE else pytest.mark.full)
        for case in itertools.product(WRAPPERS, TOLERANCES)
    ],
)
def test_gradients_and_state_are_those_of_nnx(wrapper, dtype):
    tolerance = TOLERANCES[dtype]
    net, expected = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    loss = loss_fn if dtype is None else autocast(loss_fn, dtype=dtype)
    step = WRAPPERS[wrapper](lambda scale, net: value_and_grad(loss)(scale, net, X, Y))
    for _ in range(2):
        value, grads, finite, scale = step(LossScale.dynamic(2.0**10), net)
        value_expected, grads_expected = plainly(expected)
        assert (net.calls, bool(finite), int(scale.growth_tracker)) == (expected.calls, True, 1)
        np.testing.assert_allclose(value, value_expected, rtol=tolerance)
        close(grads, grads_expected, tolerance)
        close(nnx.state(net), nnx.state(expected), tolerance)
    assert float(jnp.abs(net.norm.mean[...]).max()) > 0.05
    assert int(net.drop.rngs.count[...]) == 2


@pytest.mark.parametrize("argnums", [nnx.DiffState(0, nnx.LoRAParam), (nnx.DiffState(0, (nnx.Param, nnx.LoRAParam)),)])
def test_other_variables_are_differentiated(argnums):
    net, expected = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    out = value_and_grad(loss_fn, argnums=argnums)(LossScale.dynamic(), net, x=X, y=Y)
    close(out.grads, plainly(expected, argnums)[1], 1e-5)
    assert len(jax.tree.leaves(out.grads)) in (1, 6)


def test_what_is_called_may_be_a_module_and_a_loss_may_return_modules():
    net, expected = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))

    def loss(nets, x):
        first = nets[0](x)
        return first.sum(), (nets[0], nets[0].head, nnx.Linear(2, 2, rngs=nnx.Rngs(1)), first)

    out = value_and_grad(loss, argnums=(1, 0), has_aux=True)(LossScale.static(8.0), [net], X)
    wanted, _ = nnx.grad(lambda nets, x: (loss(nets, x)[0], None), argnums=(1, 0), has_aux=True)([expected], X)
    close(out.grads, wanted, 1e-5)
    same, head, made, first = out.value[1]
    assert same is net
    assert head is net.head
    assert made(jnp.ones(2)).shape == (2,)
    assert first.shape == (32, 4)
    by_input = value_and_grad(nnx.Sequential(net, jnp.sum))(LossScale.static(), X).grads
    np.testing.assert_allclose(by_input, nnx.grad(lambda x, net: net(x).sum())(X, expected), rtol=1e-4)
    assert (net.calls, int(net.drop.rngs.count[...])) == (2, 2)
    assert autocast(loss, dtype="bfloat16").report([net], X).low
    assert net.calls == 2


# ---- the functional pattern ------------------------------------------------------------------------------------------


def functional(graph, copy):
    def loss(params, rest, x):
        net = nnx.merge(graph, params, rest, copy=copy)
        return loss_fn(net, x, Y), nnx.state(net, nnx.Not(nnx.Param))

    return loss


TRANSFORMS = {
    "grad": lambda f, p, r: jax.grad(f, has_aux=True)(p, r, X),
    "jit of grad": lambda f, p, r: jax.jit(jax.grad(f, has_aux=True))(p, r, X),
    "jit": lambda f, p, r: jax.jit(f)(p, r, X),
    "vmap": lambda f, p, r: jax.vmap(lambda x: f(p, r, x))(jnp.stack([X, 2 * X])),
    "vmap of grad": lambda f, p, r: jax.vmap(lambda x: jax.grad(f, has_aux=True)(p, r, x))(jnp.stack([X, 2 * X])),
}


@pytest.mark.parametrize(
    ("transform", "evaluated"),
    [
        pytest.param(*case, marks=[] if case in (("jit of grad", False), ("vmap of grad", True)) else pytest.mark.full)
        for case in itertools.product(TRANSFORMS, (False, True))
    ],
)
def test_a_function_may_merge_and_split_a_module(transform, evaluated):
    net = Net(nnx.Rngs(0))
    if evaluated:
        net.eval()  # nothing is written, so the variables that come back are those of the caller
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    before = jax.tree.map(jnp.copy, (params, rest))
    plain = functional(graph, copy=not evaluated)
    expected = TRANSFORMS[transform](plain, params, rest)
    close(TRANSFORMS[transform](autocast(plain, dtype="float16"), params, rest), expected, 0.01)
    close((params, rest), before, 1e-9)


@pytest.mark.parametrize("inside", [False, True])
def test_states_are_differentiated_as_they_are(inside):
    net = Net(nnx.Rngs(0))
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    plain, x = functional(graph, copy=True), jnp.stack([X, 2 * X])
    scaled = value_and_grad(autocast(plain, dtype="float16") if inside else plain, has_aux=True)
    out = jax.vmap(lambda x: scaled(LossScale.static(2.0**10), params, rest, x))(x)
    expected = jax.vmap(lambda x: jax.value_and_grad(plain, has_aux=True)(params, rest, x))(x)
    close(((out.value[0], out.value[1]), out.grads), expected, 0.01 if inside else 1e-5)
    assert int(rest["drop"]["rngs"]["count"][...]) == 0


def test_a_module_of_another_trace_cannot_be_changed():
    net = Net(nnx.Rngs(0))
    with pytest.raises(Exception, match="different trace level") as caught:
        jax.jit(lambda x: value_and_grad(loss_fn)(LossScale.static(), net, x, Y).grads)(X)
    assert any("where the module is an argument" in note for note in caught.value.__notes__)
    assert (net.calls, net.body.kernel.shape) == (0, (8, 16))


# ---- the recipe ------------------------------------------------------------------------------------------------------


def recipe():
    """Variables of docs/recipes.md's programs for nnx."""
    section = (ROOT / "docs/recipes.md").read_text().split("### Flax nnx")[1].split("\n### ")[0]
    variables: dict = {}
    exec("".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), variables)
    return variables


def test_jax_jit_drops_what_a_step_changes():
    """Flax's own behaviour, without autocast too; docs/recipes.md says to use nnx.jit."""
    net = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    def step(net, optimizer, x):
        loss, grads = nnx.value_and_grad(autocast(lambda net: jnp.mean(net(x) ** 2), dtype="bfloat16"))(net)
        optimizer.update(net, grads)
        return loss

    losses = {jit: [float(jit(step)(net, optimizer, jnp.ones((3, 4)))) for _ in range(2)] for jit in (jax.jit, nnx.jit)}
    assert losses[jax.jit][0] == losses[jax.jit][1] == losses[nnx.jit][0] > losses[nnx.jit][1]


def test_the_recipe_trains():
    """200 steps in float16 with the program of the page, and in float32 with plain nnx."""
    page = recipe()
    net, loss_fn, x, y = page["Net"](nnx.Rngs(0)), page["loss_fn"], page["x"], page["y"]
    expected = page["Net"](nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, skip_nonfinite(optax.adamw(1e-3)), wrt=nnx.Param)
    plain = nnx.Optimizer(expected, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(net, x, y)
        optimizer.update(net, grads)
        return loss

    scale = LossScale.dynamic()
    for _ in range(200):
        loss, scale = page["step"](net, optimizer, scale, x, y)
        last = step(expected, plain)
    close(nnx.state(net), nnx.state(expected), 0.01)
    np.testing.assert_allclose(loss, last, rtol=3e-3)  # 200 steps in float16
    assert last < 0.5
