"""monitor for JAX: statistics against NumPy through every transformation, bad steps, replay, cost."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import flax.linen as nn
import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xla_amp.common.types import RANGES
from xla_amp.errors import FileError, StepError
from xla_amp.jax import LossScale, autocast, find_overflow, monitor, observe, replay, select, value_and_grad
from xla_amp.tools.monitor import bad_step, history
from xla_amp.tools.monitor.history import Statistics, ValueKey
from xla_amp.tools.monitor.on_pytorch import replay as replay_step

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((3, 8, 8)).astype(np.float32)


def by_hand(values, low="float32", scale=1.0, weights=None):
    """The statistics in float64."""
    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    nonzero = finite[finite != 0]
    amax = np.abs(finite).max()
    rms = math.sqrt((finite**2).mean())
    return Statistics(
        amax=amax,
        rms=rms,
        underflow=(np.abs(nonzero) * scale <= RANGES[low].zero).sum() / max(1, nonzero.size),
        inf=np.isinf(values).mean(),
        nan=np.isnan(values).mean(),
        headroom=math.log2(RANGES[low].largest / (amax * scale)),
        update_ratio=None if weights is None else rms / math.sqrt((np.asarray(weights, np.float64) ** 2).mean()),
    )


def assert_same(found, expected):
    for name in ("amax", "rms", "underflow", "inf", "nan", "headroom", "update_ratio"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one == other or one == pytest.approx(other, rel=1e-6), name


def layer(x, weight):
    with jax.named_scope("layer"):
        return jnp.tanh(x @ weight)


def unrolled(w, x):
    for weight in w:
        x = -layer(x, weight)
    return jnp.mean(x**2)


def scanned(w, x):
    x, _ = jax.lax.scan(lambda x, weight: (-layer(x, weight), None), x, w)
    return jnp.mean(x**2)


def looped(w, x):
    _, x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, -layer(c[1], w[c[0]])), (0, x))
    return jnp.mean(x**2)


def branching(w, x):
    for weight in w:
        x = -jax.lax.cond(jnp.sum(x) < 1e9, layer, lambda x, weight: x, x, weight)
    return jnp.mean(x**2)


def with_remat(w, x):
    for weight in w:
        x = -jax.checkpoint(layer)(x, weight)
    return jnp.mean(x**2)


def with_jit(w, x):
    for weight in w:
        x = -jax.jit(layer)(x, weight)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def activations():
    found, x = [], X
    for weight in W:
        x = -np.tanh(x.astype(np.float64) @ weight)
        found.append(x)
    return by_hand(np.stack(found))


LOSSES = [unrolled, scanned, looped, branching, with_remat, with_jit]
FUNCTIONS = {loss.__name__: loss for loss in LOSSES}
# JAX does not differentiate a while loop.
FUNCTIONS |= {f"{loss.__name__} with gradient": jax.value_and_grad(loss) for loss in LOSSES if loss is not looped}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_activations_through_transformations(function, activations):
    step = monitor(jax.jit(function), sample=1)
    found = step(W, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, jax.jit(function)(W, X))
    (record,) = step.read().steps
    assert list(record.statistics) == [ValueKey("layer", "activation")]
    assert_same(record.statistics[ValueKey("layer", "activation")], activations)


def test_constants_of_a_layer_are_no_activations():
    def function(x):
        with jax.named_scope("layer"):
            most = jnp.full(8, 20.0)
            y = jnp.minimum(2 * x, most)
        return y + most

    step = monitor(function, sample=1)
    step(X)
    assert_same(step.read().steps[0].statistics[ValueKey("layer", "activation")], by_hand(2 * X))


def test_inf_nan_and_underflow_are_counted():
    values = np.array([1e-30, 1e-3, 0.0, np.inf, -np.inf, np.nan, 5.0, -70000.0], np.float32)
    step = monitor(lambda x: observe("activation", x, layer="x"), sample=1, low="float16")
    step(values)
    row = step.read().steps[0].statistics[ValueKey("x", "activation")]
    assert_same(row, by_hand(values, "float16"))
    assert (row.inf, row.nan, row.underflow) == (2 / 8, 1 / 8, 1 / 4)


def test_what_is_observed(tmp_path):
    params = {"params": {"h_0": {"kernel": W[0], "bias": X[0]}, "head": {"kernel": W[1]}}}

    def step(params, x):
        params = observe("weight", params)

        def loss(params):
            h = params["params"]
            return jnp.mean((jnp.tanh(x @ h["h_0"]["kernel"] + h["h_0"]["bias"]) @ h["head"]["kernel"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates = observe("update", jax.tree.map(lambda g: -0.1 * g, observe("gradient", grads)))
        return observe("loss", value), grads, jax.tree.map(jnp.add, params, updates)

    recorded = monitor(step, sample=1, directory=tmp_path)
    value, grads, _ = recorded(params, X)
    record = recorded.read().steps[0]
    own = grads["params"]["h_0"]
    joined = np.concatenate([np.ravel(own["kernel"]), np.ravel(own["bias"])]).astype(np.float64)
    weights = np.concatenate([W[0].ravel(), X[0]])
    assert_same(record.statistics[ValueKey("h_0", "gradient")], by_hand(joined))
    assert_same(record.statistics[ValueKey("h_0", "weight")], by_hand(weights))
    assert_same(record.statistics[ValueKey("h_0", "update")], by_hand(np.float32(-0.1) * joined, weights=weights))
    everything = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)]).astype(np.float64)
    assert record.gradient_norm == pytest.approx(np.linalg.norm(everything), rel=1e-6)
    assert record.loss == float(value)
    assert history.read(tmp_path / "history.jsonl").steps == [record]


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 8, name="wte")(tokens)
        x = nn.relu(nn.Dense(8, name="up")(x))
        return nn.Dense(1, name="head")(nn.Dense(8, name="scores")(x))[..., 0].mean()


NET, TX = Net(), optax.adam(1e-3)
TOKENS = jnp.arange(12).reshape(4, 3)
BAD, RARE = 7, 49


def trained(step, state, steps):
    for number in range(steps):
        batch = TOKENS if number != BAD else TOKENS.at[2, 1].set(RARE)
        *state, loss = step(*state, batch)
    return state, loss


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(params, opt_state, loss_scale, batch):
    out = value_and_grad(autocast(NET.apply, dtype=jnp.float16))(loss_scale, observe("weight", params), batch)
    updates, new_state = TX.update(out.grads, opt_state, params)
    new = optax.apply_updates(params, observe("update", updates))
    return select(out.finite, new, params), select(out.finite, new_state, opt_state), out.loss_scale, out.value


def start():
    params = NET.init(jax.random.key(0), TOKENS)
    table = params["params"]["wte"]["embedding"]
    params["params"]["wte"]["embedding"] = table.at[RARE].set(6e4)  # overflows in the layer after it
    return [params, TX.init(params), LossScale.dynamic(1024.0)]


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    step = monitor(train_step, sample=BAD, directory=directory, save_state=True)
    state, loss = trained(step, start(), 10)
    step.read()
    return step, state, loss, directory


def test_another_loss_scale_is_no_replay(bad_run):
    _, _, _, directory = bad_run

    def other(params, state, scale, batch):
        return train_step(params, state, LossScale.dynamic(4.0), batch)

    with pytest.raises(StepError, match="ran at a loss scale of 1024, the arguments have 4, so it cannot be replayed"):
        replay(other, directory, *start(), TOKENS)


def test_the_first_bad_step_is_kept_and_replayed(bad_run):
    step, _, _, directory = bad_run
    assert step.bad_step == directory / f"bad_step_{BAD:07d}" / "rank_0"
    skipped = [record.step for record in step.history.steps if record.skipped]
    assert skipped == [BAD]
    record = next(record for record in step.history.steps if record.step == BAD)
    assert record.statistics[ValueKey("up", "activation")].inf > 0
    assert record.statistics[ValueKey("wte", "activation")].inf == 0
    assert record.loss_scale == 1024
    found = replay(step, directory, *start(), TOKENS)
    assert found.reproduced
    assert (found.bad.step, found.bad.reason, found.bad.state) == (BAD, "loss", "kept")
    assert found.overflow.first.place.module == "Net.up"
    assert found.overflow.first.element[:2] == (2, 1)  # of the batch, and the token
    step.to_html(directory / "page.html")
    assert "up" in (directory / "page.html").read_text()
    with pytest.raises(FileError, match=r"xla_amp\.jax\.replay"):
        replay_step.replay(directory, "json:loads")
    text = (directory / f"bad_step_{BAD:07d}" / "report.txt").read_text()
    assert "Is the step the same, bit for bit?\n  yes, " in text
    assert "first in element [2, 1," in text


def test_the_monitor_changes_nothing_and_adds_no_executable(bad_run):
    _, state, loss, _ = bad_run
    expected, last = trained(train_step, start(), 10)
    # XLA fuses a program with more results in another way, so the last bit may differ.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), state, expected)
    assert float(loss) == pytest.approx(float(last), rel=1e-6)
    step = monitor(train_step, sample=1)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    state = start()
    state = list(step(*state, TOKENS))[:3]
    jax.block_until_ready(state)
    before = len(compiled)
    for _ in range(3):
        *state, _ = step(*state, TOKENS)
    step.read()
    assert len(compiled) == before


def test_donated_arguments_are_donated_and_then_not_kept(tmp_path):
    step = monitor(train_step, sample=1, directory=tmp_path)
    state = start()
    given = state[0]["params"]["wte"]["embedding"]
    trained(step, state, BAD + 2)
    assert given.is_deleted()
    step.read()
    bad = bad_step.read(step.bad_step)
    assert bad.state == "none"
    assert list(bad.options["leaves"].values()) == ["int32"]  # the batch
    with pytest.raises(StepError, match="pass arguments as the step had them"):
        replay(train_step, tmp_path, *start(), TOKENS[:1])


def test_batches_of_two_sizes_and_find_overflow_of_a_monitor():
    def step(x, number):
        with jax.named_scope("small" if len(x) < 3 else "large"):
            y = x / number
        return jnp.sum(y)

    recorded = monitor(step, sample=1)
    for number, size in enumerate([2, 4, 2, 4]):
        recorded(np.ones(size, np.float32), number + 1)
    names = [next(iter(record.statistics)).layer for record in recorded.read().steps]
    assert names == ["small", "large", "small", "large"]
    assert find_overflow(recorded, jnp.ones(2), 0).first.place.module == "small"
    assert len(recorded.read().steps) == 4


def test_a_growth_probe_is_no_bad_step(tmp_path):
    def step(scale, x):
        out = value_and_grad(lambda w, x: jnp.sum(w * x).astype(jnp.float32))(scale, jnp.float16(1), x)
        return out.loss_scale

    recorded = monitor(step, sample=1, directory=tmp_path)
    scale = LossScale.dynamic(2.0**13, growth_interval=2)
    for _ in range(6):
        scale = recorded(scale, jnp.float16(4.0))
    assert any(record.skipped for record in recorded.read().steps)
    assert recorded.bad_step is None


def test_nnx_and_layers(tmp_path):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.body = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(8, 1, rngs=nnx.Rngs(1))
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.head(nnx.relu(self.body(x)))

    model = Model()
    step = monitor(nnx.jit(lambda model, x: jnp.mean(model(x))), sample=1, layers="head", kinds=("activation",))
    values = [model.body(X), step(model, X), step(model, X)]
    assert float(model.calls[...]) == 2
    record = step.read().steps[-1]
    assert list(record.statistics) == [ValueKey("head", "activation")]
    assert record.statistics[ValueKey("head", "activation")].amax > 0
    assert float(values[1]) == float(values[2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sample": 0}, ValueError, r"sample=0\): expected an integer of at least 1"),
        ({"kinds": ["grads"]}, ValueError, "unknown"),
        ({"low": "int8"}, ValueError, "expected one of"),
        ({"save_state": True}, ValueError, "pass directory="),
    ],
    ids=["sample", "kinds", "low", "save_state"],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        monitor(unrolled, **arguments)


def test_what_is_refused_when_it_runs(tmp_path):
    with pytest.raises(StepError, match="nothing is recorded"):
        monitor(lambda x: x + 1)(X)
    with pytest.raises(ValueError, match="no layer of the step matches"):
        monitor(unrolled, layers="head")(W, X)
    with pytest.raises(ValueError, match="expected one of"):
        observe("grads", X)
    with pytest.raises(FileError, match="no bad step here"):
        replay(unrolled, tmp_path)


def test_eight_devices():
    script = Path(__file__).with_name("monitor_on_eight_devices.py")
    done = forked.run(script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "same"
