"""The loss scale as a pytree: lossless round trips, and correct gradients for every dtype and step."""

from __future__ import annotations

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.errors import PolicyError
from xla_amp.jax.loss_scale import LossScale, all_finite, reduce_gradients, select, value_and_grad
from xla_amp.jax.optax_wrapper import SkipNonfiniteState

SETTINGS = {
    "init_scale": 64.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "min_scale": 4.0,
    "max_scale": 4096.0,
}


def fields(loss_scale: LossScale) -> dict[str, float]:
    return {name: np.asarray(value).item() for name, value in loss_scale._asdict().items()}


def assert_same(one: LossScale, other: LossScale) -> None:
    assert fields(one) == fields(other)
    assert isinstance(one, LossScale)
    assert [x.dtype for x in jax.tree.leaves(one)] == [x.dtype for x in jax.tree.leaves(other)]


def through_orbax(loss_scale: LossScale, folder) -> LossScale:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", {"scale": loss_scale})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", {"scale": LossScale.dynamic()})["scale"]


def through_flax(loss_scale: LossScale, _) -> LossScale:
    from flax import serialization

    state = {"optimizer": (SkipNonfiniteState((), *jnp.zeros((3,), jnp.int32), loss_scale),)}
    other = jax.tree.map(lambda leaf: leaf + 1, state)
    assert serialization.to_state_dict(state)["optimizer"]["0"]["loss_scale"].keys() == fields(loss_scale).keys()
    data = serialization.to_bytes(state)
    return serialization.from_bytes(other, data)["optimizer"][0].loss_scale


JOURNEYS = {
    "jit": lambda s, _: jax.jit(lambda x: x)(s),
    "scan": lambda s, _: jax.lax.scan(lambda carry, _: (carry, None), s, None, length=2)[0],
    "pickle": lambda s, _: pickle.loads(pickle.dumps(s)),
    "orbax": through_orbax,
    "flax": through_flax,
    "state dict": lambda s, _: LossScale.from_state_dict(s.state_dict()),
}


@pytest.mark.parametrize("journey", JOURNEYS)
# orbax's worker threads outlive the call and it uses asyncio in ways that Python 3.11 warns of
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_round_trips_are_lossless(journey, tmp_path):
    loss_scale = LossScale.dynamic(**SETTINGS).update(True).update(False).update(True)
    assert_same(JOURNEYS[journey](loss_scale, tmp_path), loss_scale)


def test_a_static_scale_is_constant():
    loss_scale = LossScale.static(8.0)
    for finite in [True, False] * 4:
        loss_scale = loss_scale.update(finite)
    assert float(loss_scale.value) == 8.0
    assert int(loss_scale.skipped) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0.0),
        ("init_scale", float("nan")),
        ("init_scale", "65536"),
        ("growth_factor", 0.5),
        ("backoff_factor", 2.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("growth_interval", 2.5),
        ("growth_interval", True),
        ("min_scale", 0.0),
        ("max_scale", 2.0**127),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(PolicyError, match=re.escape(f"LossScale({name}={value!r}): expected a")):
        LossScale.dynamic(**{name: value})


def test_a_state_with_other_fields_is_rejected():
    with pytest.raises(PolicyError, match=r"expected the fields value, .* got loss_scale"):
        LossScale.from_state_dict({"loss_scale": 1.0})


# -- scaling and unscaling --------------------------------------------------------------------------------------------

LEAVES = [
    # leaf, dtype after unscale, dtype with keep_dtype
    (jnp.float16(6.0), jnp.float32, jnp.float16),
    (jnp.bfloat16(6.0), jnp.float32, jnp.bfloat16),
    (jnp.float32(6.0), jnp.float32, jnp.float32),
    (np.float32(6.0), jnp.float32, jnp.float32),
    (np.full(2, 6.0, np.float16), jnp.float32, jnp.float16),
    (jnp.complex64(6.0), jnp.complex64, jnp.complex64),
    (jnp.asarray(6.0, jnp.float8_e5m2), jnp.float32, jnp.float8_e5m2),
]


@pytest.mark.parametrize(("leaf", "wide", "kept"), LEAVES, ids=[str(row[0].dtype) for row in LEAVES])
def test_unscale_computes_in_float32(leaf, wide, kept):
    loss_scale = LossScale.static(2.0)
    assert loss_scale.unscale(leaf).dtype == wide
    assert loss_scale.unscale(leaf, keep_dtype=True).dtype == kept
    np.testing.assert_array_equal(np.asarray(loss_scale.unscale(leaf)), np.full(np.shape(leaf), 3.0))
    assert loss_scale.scale(leaf).dtype == wide


def test_float64_is_unscaled_in_float64():
    with jax.enable_x64(True):
        third = jnp.asarray(1 / 3, jnp.float64)
        assert LossScale.static(4.0).unscale({"w": third})["w"] == (1 / 3) / 4


def test_leaves_that_are_not_floating_point_are_unchanged():
    same = {
        "int": jnp.arange(3),
        "bool": jnp.array(True),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "function": abs,
        "text": "relu",
        "none": None,
    }
    loss_scale = LossScale.dynamic()
    for result in (loss_scale.scale(same), loss_scale.unscale(same), select(jnp.array(False), same, same)):
        assert result["function"] is abs
        assert result["text"] == "relu"
        assert result["none"] is None
        assert result["int"].tolist() == [0, 1, 2]
        assert result["float0"].dtype == jax.dtypes.float0
    assert bool(all_finite(same))


# -- value_and_grad ---------------------------------------------------------------------------------------------------


def quadratic(params, x):
    return jnp.sum((x @ params["w"] + params["b"]) ** 2)


def problem(dtype):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 2)) / 4, dtype), "b": jnp.asarray(rng.normal(size=2) / 4, dtype)}
    return params, jnp.asarray(rng.normal(size=(3, 4)) / 4, dtype)


def reference(params, x):
    w, b, x = (np.asarray(a, np.float64) for a in (params["w"], params["b"], x))
    residual = x @ w + b
    return (residual**2).sum(), {"w": 2 * x.T @ residual, "b": 2 * residual.sum(0)}


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-2), (jnp.float16, 4e-3)])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_equal_those_in_float64(dtype, rtol, transform):
    params, x = problem(dtype)
    loss_scale = LossScale.dynamic(2.0**10, growth_interval=1)  # grows on this step
    value, grads, finite, after = transform(value_and_grad(quadratic))(loss_scale, params, x)
    expected_value, expected = reference(params, x)
    assert bool(finite)
    assert float(after.value) == 2.0**11
    np.testing.assert_allclose(float(value), expected_value, rtol=rtol)
    for name in grads:
        assert grads[name].dtype == jnp.float32
        np.testing.assert_allclose(grads[name], expected[name], rtol=rtol, atol=rtol * abs(expected[name]).max())
    kept = transform(value_and_grad(quadratic, keep_dtype=True))(loss_scale, params, x).grads
    assert {kept[name].dtype for name in kept} == {jnp.dtype(dtype)}


def test_an_overflow_backs_off_and_keeps_the_value():
    loss_scale = LossScale.dynamic(2.0**16)
    out = jax.jit(value_and_grad(lambda w: (w * 100).astype(jnp.float16).sum()))(loss_scale, jnp.ones(3, jnp.float16))
    assert not bool(out.finite)
    assert float(out.value) == 300.0
    assert float(out.loss_scale.value) == 2.0**15
    assert int(out.loss_scale.skipped) == 1


def test_arguments_auxiliary_values_and_leaves_without_gradient():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    tree = {"model": model, "steps": jnp.arange(2), "nothing": None}

    def loss(scale, x, tree):
        y = jax.vmap(tree["model"])(x)
        return scale * jnp.sum(y**2), {"y": y}

    x = jnp.ones((3, 2))
    step = eqx.filter_jit(value_and_grad(loss, argnums=(2, 0), has_aux=True))
    (value, aux), (grads, by_factor), finite, _ = step(LossScale.dynamic(), jnp.float32(2.0), x, tree)
    assert aux["y"].shape == (3, 1)
    assert bool(finite)
    assert by_factor.shape == ()
    assert grads["steps"] is None
    assert grads["model"].activation is None
    expected = eqx.filter_jit(eqx.filter_grad(lambda m: loss(2.0, x, {"model": m})[0]))(model)
    for ours, theirs in zip(jax.tree.leaves(grads["model"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(by_factor, value / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: value_and_grad(quadratic)({"w": 1}, 2), "takes the loss scale first: .* got dict"),
        (lambda: value_and_grad(lambda w: w * 2)(LossScale.static(), jnp.ones(2)), r"scalar loss, got float32\[2\]"),
        (lambda: value_and_grad(lambda w: w > 2)(LossScale.static(), 1.0), r"scalar loss, got bool\[\]"),
        (lambda: value_and_grad(lambda w: None)(LossScale.static(), 1.0), "scalar loss, got None"),
        (lambda: value_and_grad(lambda w: (w, None))(LossScale.static(), 1.0), r"loss, got \('float32\[\]', None\)"),
        (
            lambda: value_and_grad(lambda w: w * w, has_aux=True)(LossScale.static(), jnp.float32(1)),
            r"expected fn to return \(loss, aux\), got float32\[\]; leave has_aux out",
        ),
        (lambda: value_and_grad(quadratic, argnums="w"), "argnums='w'.*expected the position of an argument"),
        (lambda: value_and_grad(quadratic, argnums=2)(LossScale.static(), 1.0, 2.0), "called with 2 positional"),
        (lambda: value_and_grad(quadratic, argnums=(0, -2))(LossScale.static(), 1.0, 2.0), "each argument once"),
    ],
)
def test_misuse_is_named(call, words):
    with pytest.raises(TypeError, match=words):
        call()


# ---- several devices -------------------------------------------------------------------------------------------------


def reduced_in(kind, dtype):
    """dtype of the all-reduce in the program of two devices that reduce a gradient of `kind`."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("d")
    step = jax.shard_map(
        lambda g: reduce_gradients({"w": g}, "d", dtype), mesh=mesh, in_specs=part, out_specs=part, check_vma=False
    )
    gradient = jax.ShapeDtypeStruct((4, 3), kind)
    text = jax.jit(step).trace(gradient).lower(lowering_platforms=("cpu",)).as_text()
    return re.findall(r"stablehlo\.all_reduce.*?\}\) : \(tensor<2x3x(\w+)>", text, re.DOTALL)


def test_gradients_are_reduced_in_float32_unless_a_dtype_is_given():
    for kind in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert reduced_in(kind, None) == ["f32"]
        assert reduced_in(kind, jnp.bfloat16) == ["bf16"]


def test_reduced_gradients_are_the_mean_in_their_own_dtype():
    gradients = {"w": jnp.array([[40000.0, 1.0], [40000.0, -3.0]], jnp.float16), "n": jnp.array([[2], [4]])}
    found = jax.vmap(lambda tree: reduce_gradients(tree, "d"), axis_name="d")(gradients)
    assert found["w"].dtype == jnp.float16
    assert found["w"].tolist() == [[40000.0, -1.0]] * 2
    assert found["n"].tolist() == [[3]] * 2
    low = jax.vmap(lambda tree: reduce_gradients(tree, "d", jnp.float16), axis_name="d")(gradients)
    assert low["w"].tolist() == [[float("inf"), -1.0]] * 2
    for wrong in (jnp.float8_e4m3fn, jnp.int8):
        with pytest.raises(TypeError, match="expected a floating dtype of 16 bits or more"):
            reduce_gradients(gradients, "d", wrong)
