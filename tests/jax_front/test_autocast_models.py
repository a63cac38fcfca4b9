"""Unmodified models of JAX libraries under autocast: dtypes of contractions, losses, gradients, state."""

from __future__ import annotations

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contractions import contractions
from flax import linen, nnx
from flax.errors import TraceContextError

from xla_amp.jax import autocast

LOW = {("bf16", "bf16")}


class NnxCnn(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.second = nnx.Conv(4, 8, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(8 * 4 * 4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.second(x))
        return self.head(x.reshape(x.shape[0], -1))


def haiku_network():
    def forward(x):
        x = hk.Conv2D(4, 3)(x)
        x = jax.nn.relu(hk.LayerNorm((1, 2, 3), create_scale=True, create_offset=True)(x))
        return hk.Linear(3)(hk.Flatten()(x))

    return hk.transform(forward)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def cosine(one, other):
    one, other = flat(one), flat(other)
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


def test_haiku():
    network = haiku_network()
    x, y = jax.random.normal(jax.random.key(0), (4, 8, 8, 1)), jnp.array([0, 1, 2, 1])
    weights = network.init(jax.random.key(1), x)

    def loss(weights, x, y):
        return cross_entropy(network.apply(weights, None, x), y)

    plain, mixed = (jax.value_and_grad(each) for each in (loss, autocast(loss)))
    wide, found = contractions(plain, weights, x, y), contractions(mixed, weights, x, y)
    assert (set(wide), set(found)) == ({("f32", "f32")}, LOW)
    assert sum(found.values()) == sum(wide.values())
    (value, gradients), (expected, expected_gradients) = jax.jit(mixed)(weights, x, y), jax.jit(plain)(weights, x, y)
    assert {leaf.dtype for leaf in jax.tree.leaves((value, gradients))} == {jnp.dtype("float32")}
    assert 0 < abs(float(value - expected)) <= 1e-2 * float(expected)
    assert 0.999 <= cosine(gradients, expected_gradients) < 1 - 1e-9


def images():
    return jax.random.normal(jax.random.key(0), (8, 8, 8, 1)), jnp.array([0, 1, 2, 1, 0, 2, 2, 1])


def nnx_loss(model, x, y):
    return cross_entropy(model(x), y)


def test_an_nnx_cnn_with_batch_norm():
    x, y = images()
    model = NnxCnn(nnx.Rngs(0))
    plain = nnx.clone(model)
    value, gradients = nnx.jit(nnx.value_and_grad(autocast(nnx_loss)))(model, x, y)
    expected, expected_gradients = nnx.jit(nnx.value_and_grad(nnx_loss))(plain, x, y)
    assert abs(value - expected) < 1e-2 * expected
    assert cosine(gradients, expected_gradients) > 0.999
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    # The running statistics are float32 and close to those of a float32 run.
    assert model.norm.mean[...].dtype == jnp.float32
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=2e-2, atol=1e-4)
    np.testing.assert_allclose(model.norm.var[...], plain.norm.var[...], rtol=1e-2)
    assert not np.allclose(model.norm.var[...], 1)

    graph, state = nnx.split(nnx.clone(model))

    def pure(state, x, y):
        rebuilt = nnx.merge(graph, state)
        return nnx.value_and_grad(autocast(nnx_loss))(rebuilt, x, y)[1]

    assert set(contractions(pure, state, x, y)) == LOW


def test_an_nnx_training_step_as_a_whole():
    x, y = images()
    model = NnxCnn(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    @autocast
    def step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(nnx_loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, x, y)) for _ in range(10)]
    assert int(optimizer.step[...]) == 10
    assert losses[-1] < 0.5 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm, self.seen = nnx.BatchNorm(4, rngs=rngs), nnx.Variable(jnp.zeros((), int))
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        self.seen[...] += 1
        return self.norm(self.drop(self.layer(x)))


def switched_to_evaluation(model, x):
    model.eval()
    return model(x)


def given_attributes(model, x):
    model.mode, model.bias = "wide", nnx.Param(2 * x[0])
    del model.seen
    return model.layer(x) + model.bias


def given_a_submodule(model, x):
    model.layer, model.before = nnx.Linear(4, 4, rngs=nnx.Rngs(3)), model.layer
    return model.before(x)


def popped(model, x):
    model.kept = nnx.Intermediate(3 * x)
    return model.layer(x), nnx.pop(model, nnx.Intermediate)


def differentiated(model, x):
    return nnx.grad(lambda model, x: (model(x) ** 2).sum())(model, x)


def scanned(model, x):
    return nnx.scan(lambda model, x: (model, model(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, x)[1]


def with_a_cache(model, x):
    model.attention = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=True)
    model.attention.init_cache((1, 6, 4))
    return model.attention(x[:1, None])


MUTATING = (
    switched_to_evaluation, given_attributes, given_a_submodule, popped, differentiated, scanned, with_a_cache
)  # fmt: skip


def described(model):
    """What a module holds: static attributes, and each array by its path, with sums."""
    arrays = {
        jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, float(jnp.abs(leaf.astype(jnp.float32)).sum()))
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Not(nnx.RngState)))
    }
    static = {
        (*path, name): value
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if isinstance(value, bool | int | str)
    }
    return static, arrays


@pytest.mark.parametrize(
    ("function", "wrapped"),
    [
        *((function, autocast) for function in MUTATING),
        (switched_to_evaluation, lambda f: nnx.jit(autocast(f))),
        (given_a_submodule, lambda f: autocast(nnx.jit(f))),
    ],
)
def test_a_module_comes_back_as_from_nnx_jit(function, wrapped):
    x = jnp.arange(8.0).reshape(2, 4)
    model, expected = Counted(nnx.Rngs(0)), Counted(nnx.Rngs(0))
    before = model.layer
    nnx.jit(function)(expected, x)
    wrapped(function)(model, x)
    static, arrays = described(model)
    expected_static, expected_arrays = described(expected)
    assert static == expected_static
    assert {name: each[:2] for name, each in arrays.items()} == {n: each[:2] for n, each in expected_arrays.items()}
    for name, (*_, size) in arrays.items():
        np.testing.assert_allclose(size, expected_arrays[name][2], rtol=2e-2, atol=2e-2)
    assert before is (model.before if function is given_a_submodule else model.layer)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: autocast(model)(x),
        lambda model, x: autocast(model.__call__)(x),
        lambda model, x: autocast(functools.partial(model, x))(),
        lambda model, x: autocast(lambda models, x: models[0](x))([model], x),
        lambda model, x: nnx.jit(lambda model, x: autocast(model)(x))(model, x),
        lambda model, x: nnx.grad(lambda model: autocast(model)(x).sum())(model),
    ],
    ids=["module", "method", "partial", "list", "inside jit", "inside grad"],
)
def test_a_module_that_is_called_is_changed(call):
    model, x = Counted(nnx.Rngs(0)), jnp.arange(8.0).reshape(2, 4)
    call(model, x)
    assert (model.calls, int(model.seen[...])) == (1, 1)
    assert float(jnp.abs(model.norm.mean[...]).sum()) > 0
    call(model, x)
    assert (model.calls, int(model.seen[...])) == (2, 2)


def test_objects_that_come_back_are_the_ones_that_were_given():
    model = Counted(nnx.Rngs(0))
    same, layer, new = autocast(lambda model: (model, [model.layer], nnx.Linear(4, 2, rngs=nnx.Rngs(1))))(model)
    assert (same is model, layer[0] is model.layer, isinstance(new, nnx.Linear)) == (True, True, True)


def test_modules_of_a_vmap_are_changed():
    models = nnx.vmap(lambda key: Counted(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    nnx.vmap(autocast(switched_to_evaluation), in_axes=(0, None))(models, jnp.ones((2, 4)))
    assert (models.drop.deterministic, models.calls, models.seen[...].tolist()) == (True, 1, [1, 1, 1])


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: autocast(lambda x: model(x))(x),
        lambda model, x: jax.jit(autocast(model))(x),
        lambda model, x: nnx.jit(lambda x: autocast(lambda model, x: model(x))(model, x))(x),
    ],
    ids=["closure", "module in a closure", "argument in a closure"],
)
def test_a_module_that_cannot_be_changed_stays_as_it_is(call):
    model, x = Counted(nnx.Rngs(0)), jnp.ones((2, 4))
    with pytest.raises(TraceContextError) as caught:
        call(model, x)
    assert any("autocast(lambda model, x: ...)(model, x)" in note for note in caught.value.__notes__)
    assert (model.calls, int(model.seen[...]), model.layer.kernel.shape) == (0, 0, (4, 4))
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))  # what changes nothing may be in a closure
    assert jax.jit(autocast(layer))(x).dtype == jnp.float32


class LinenWithParts(linen.Module):
    """A Linen module with parts under autocast, which it may leave out where it is initialized."""

    careful: bool = True
    norm: bool = False

    @linen.compact
    def __call__(self, x):
        parts = linen.BatchNorm(use_running_average=False) if self.norm else linen.Dense(8)
        if self.careful and self.is_initializing():
            return parts(x)
        return autocast(lambda x: parts(x), dtype="bfloat16")(x)


def test_variables_of_a_linen_module_are_made_outside():
    key, x = jax.random.key(0), jnp.linspace(-1, 1, 64).reshape(4, 16)
    for wrapped in (lambda f: f, jax.jit):
        with pytest.raises(TypeError, match=r"writes .* if self.is_initializing\(\) else autocast"):
            wrapped(LinenWithParts(False).init)(key, x)
    assert LinenWithParts().apply(LinenWithParts().init(key, x), x).shape == (4, 8)
    model = LinenWithParts(norm=True)
    with pytest.raises(TypeError, match=r"writes .*batch_stats.*autocast\(model.apply\)"):
        model.apply(model.init(key, x), x, mutable=["batch_stats"])
