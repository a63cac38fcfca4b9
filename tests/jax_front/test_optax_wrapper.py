"""`skip_nonfinite`: nonfinite steps change no bit of any optimizer's state, without a conditional."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xla_amp.jax.loss_scale import LossScale, value_and_grad
from xla_amp.jax.optax_wrapper import skip_nonfinite

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "lion": lambda: optax.lion(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "muon": lambda: optax.contrib.muon(0.1),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}
"""Common optimizers; the last three rows are a chain, one with loops inside, and one with random state."""


def gradients(seed, poison=0.0):
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(4, 8)).astype(np.float32)
    kernel[2, 3] += poison
    return {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(rng.normal(size=8), jnp.float32), "unused": None}


def parameters():
    tree = gradients(1)
    return {**tree, "kernel": tree["kernel"].at[0, 0].set(-0.0)}  # bitwise: the sign of a zero counts


def stepper(optimizer):
    def step(params, state, grads, **extra):
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def bits(tree):
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
        for x in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit(name):
    plain, ours = OPTIMIZERS[name](), skip_nonfinite(OPTIMIZERS[name]())
    params = expected = parameters()
    state, expected_state = ours.init(params), plain.init(params)
    step, plain_step = jax.jit(stepper(ours)), jax.jit(stepper(plain))
    for number, poison in enumerate([0.0, np.inf, 0.0, np.nan, -np.inf, 0.0]):
        grads = gradients(number, poison)
        before = params, state.inner
        params, state = step(params, state, grads)
        if poison == 0:
            expected, expected_state = plain_step(expected, expected_state, grads)
            assert bool(state.finite)
        else:
            assert bits((params, state.inner)) == bits(before)
            assert not bool(state.finite)
    # A step that is taken equals the plain optimizer's, but not bitwise: XLA may fuse the two programs differently.
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert int(state.skipped) == 3
    assert int(state.skipped_in_a_row) == 0
    counts = [int(x) for x in jax.tree.leaves(state.inner) if x.dtype == jnp.int32 and x.ndim == 0]
    assert set(counts) <= {3}


CONDITIONALS = {**OPTIMIZERS, "every second": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()}


@pytest.mark.parametrize("name", CONDITIONALS)
def test_conditionals_are_those_of_the_wrapped_optimizer(name):
    inner, counts = CONDITIONALS[name](), []
    for optimizer in (inner, skip_nonfinite(inner, loss_scale=LossScale.dynamic())):
        state = optimizer.init(parameters())
        counts.append(str(jax.make_jaxpr(stepper(optimizer))(parameters(), state, gradients(0))).count(" cond["))
    assert counts[0] == counts[1]
    assert (counts[0] > 0) == (name in ("novograd", "every second"))


def test_a_number_is_no_loss_scale():
    with pytest.raises(TypeError, match=r"loss_scale=32768\.0.*write loss_scale=LossScale\.dynamic"):
        skip_nonfinite(optax.sgd(0.1), loss_scale=2.0**15)  # type: ignore[arg-type]


def test_a_new_state_can_be_donated():
    scale, params = LossScale.dynamic(), jnp.ones(3)
    optimizer = skip_nonfinite(optax.adam(0.1), loss_scale=scale)
    step = jax.jit(lambda state, params: optimizer.update(params, state, params)[1], donate_argnums=0)
    for _ in range(2):  # the scale that was given is still there for the second state
        state = step(optimizer.init(params), params)
    assert (int(state.skipped), float(scale.value)) == (0, 2.0**16)


def test_the_flag_of_value_and_grad_is_used():
    """optax's own optimizers take the flag and ignore it, as docs/jax.md says."""
    optimizer = skip_nonfinite(optax.adam(0.1))
    params = {"w": jnp.ones(3)}
    ignored, _ = optax.adam(0.1).update({"w": jnp.full(3, jnp.nan)}, optax.adam(0.1).init(params), finite=False)
    assert np.isnan(ignored["w"]).all()
    out = value_and_grad(lambda p: jnp.sum(p["w"]))(LossScale.dynamic(), params)
    update = jax.jit(optimizer.update)
    updates, state = update(out.grads, optimizer.init(params), params, finite=jnp.asarray(False))
    assert int(state.skipped) == 1
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    _, state = update(out.grads, state, params, finite=out.finite)
    assert int(state.skipped_in_a_row) == 0
    assert int(state.inner[0].count) == 1


def test_a_loss_scale_in_the_state_unscales_and_follows_the_flag():
    scale = LossScale.dynamic(4.0, growth_interval=2, min_scale=2.5, max_scale=7.0)
    optimizer, params = skip_nonfinite(optax.sgd(0.5), loss_scale=scale), {"w": jnp.ones(3)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    seen = []
    for value in (1.0, 1.0, np.inf, np.nan, 1.0, -np.inf, 1.0):
        updates, state = update(state.loss_scale.scale({"w": jnp.full(3, value)}), state, params)
        assert updates["w"].tolist() == [-0.5 if value == 1 else 0.0] * 3
        counts = [(int(each.skipped), int(each.skipped_in_a_row)) for each in (state.loss_scale, state)]
        assert counts[0] == counts[1]
        seen.append((float(state.loss_scale.value), *counts[0]))
    assert seen == [(4, 0, 0), (7, 0, 0), (3.5, 1, 1), (2.5, 2, 2), (2.5, 2, 0), (2.5, 3, 1), (2.5, 3, 0)]


def test_extra_arguments_reach_the_inner_transformation():
    optimizer = skip_nonfinite(optax.polyak_sgd())
    params = {"w": jnp.ones(3)}
    updates, _ = optimizer.update({"w": jnp.ones(3)}, optimizer.init(params), params, value=jnp.asarray(3.0))
    np.testing.assert_allclose(updates["w"], -np.ones(3))


@pytest.mark.parametrize("check", [True, False])
def test_devices_agree(check):
    x, params = jnp.ones((4, 2, 8)), {"w": jnp.arange(1.0, 9.0)}
    bad = x.at[2, 1, 2].set(jnp.inf)  # on device 2 only

    def step(axis):
        optimizer = skip_nonfinite(optax.adam(0.1), axis_name=axis)

        def run(x):
            loss = value_and_grad(lambda p: jnp.mean((x * p["w"]) ** 2), axis_name=axis)
            out = loss(LossScale.dynamic(), params)
            updates, state = optimizer.update(out.grads, optimizer.init(params), params)
            return optax.apply_updates(params, updates)["w"], state.skipped, out.loss_scale.skipped

        return run

    for data, skipped in ((x, 0), (bad, 1)):
        new, *counts = jax.vmap(step("i"), axis_name="i")(data)
        assert [each.tolist() for each in counts] == [[skipped] * 4] * 2
        assert (new == params["w"]).all() == bool(skipped)
    assert jax.vmap(step(None), axis_name="i")(bad)[1].tolist() == [0, 0, 1, 0]  # without the axis they diverge
    # Of the types that `jax.shard_map` checks: what is the same on all devices.
    auto = (jax.sharding.AxisType.Auto,)
    mesh, part = jax.sharding.AbstractMesh((4,), ("i",), axis_types=auto), jax.sharding.PartitionSpec("i")
    whole = jax.sharding.PartitionSpec() if check else part
    mapped = jax.shard_map(
        lambda x: [each if check else each[None] for each in step("i")(x[0])[1:]],
        mesh=mesh, in_specs=part, out_specs=whole, check_vma=check,
    )  # fmt: skip
    assert [each.shape for each in jax.eval_shape(mapped, x)] == [() if check else (4,)] * 2
