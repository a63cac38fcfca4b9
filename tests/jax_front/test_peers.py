"""Issues that users of other JAX loss scalers reported, run with jmp or mpx and with ours.

Each row holds one task, the result of the peer at the stated version, and the correct result.  When a peer fixes its
issue, its half fails here; then delete the row.
"""

from __future__ import annotations

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.jax.loss_scale import LossScale, select, value_and_grad

jmp = pytest.importorskip("jmp")
mpx = pytest.importorskip("mpx")
eqx = pytest.importorskip("equinox")

VERSIONS = {"jmp": "0.0.4", "mixed_precision_for_jax": "0.1.8"}


@pytest.mark.parametrize("name", VERSIONS)
def test_the_peers_are_those_described_here(name):
    assert importlib.metadata.version(name) == VERSIONS[name]


# -- a lower bound of the scale, through jit (github.com/google-deepmind/jmp/pull/44) ---------------------------------


def lower_bound_jmp():
    adjust = jax.jit(lambda s: s.adjust(jnp.array(False)))
    loss_scale = jmp.DynamicLossScale(jnp.float32(16.0), min_loss_scale=jnp.float32(4.0))
    for _ in range(5):
        loss_scale = adjust(loss_scale)
    return float(loss_scale.loss_scale)


def lower_bound_ours():
    update = jax.jit(lambda s: s.update(False))
    loss_scale = LossScale.dynamic(16.0, min_scale=4.0)
    for _ in range(5):
        loss_scale = update(loss_scale)
    return float(loss_scale.value)


# -- a scale made in float16, as jmp's own README does (github.com/google-deepmind/jmp/issues/47) ---------------------


def half_scale_jmp():
    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15))
    return float(loss_scale.adjust(jnp.array(False)).loss_scale)


def half_scale_ours():
    return float(LossScale.dynamic(float(jnp.float16(2**15))).update(jnp.array(False)).value)


# -- float16 gradients divided by the scale ---------------------------------------------------------------------------

SMALL = jnp.float16(3e-3)


def unscale_jmp():
    return float(jmp.StaticLossScale(jnp.float16(2**15)).unscale(SMALL)) / (float(SMALL) / 2**15)


def unscale_ours():
    return float(LossScale.static(2.0**15).unscale(SMALL)) / (float(SMALL) / 2**15)


# -- integers among what is scaled ------------------------------------------------------------------------------------


def integers_jmp():
    return str(jmp.StaticLossScale(jnp.float32(2.0)).scale({"loss": jnp.float32(1.0), "n": jnp.int32(3)})["n"].dtype)


def integers_ours():
    return str(LossScale.static(2.0).scale({"loss": jnp.float32(1.0), "n": jnp.int32(3)})["n"].dtype)


# -- modules whose leaves are not all arrays --------------------------------------------------------------------------


def module():
    return eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))


def module_jmp():
    return jmp.select_tree(jnp.array(False), module(), module()).activation is module().activation


def module_ours():
    model = LossScale.static().unscale(module())
    return select(jnp.array(False), model, module()).activation is module().activation


# -- gradients of the step on which the scale grows -------------------------------------------------------------------

POINT = jnp.array([0.5, 1.0, 1.5])


def growth_mpx():
    scaling = mpx.DynamicLossScaling(jnp.float32(1024.0), jnp.float32(1.0), period=1)
    _, _, _, grads = mpx.filter_value_and_grad(lambda w: jnp.sum(w * w), scaling)(POINT)
    return np.asarray(grads).tolist()


def growth_ours():
    loss_scale = LossScale.dynamic(1024.0, growth_interval=1)
    return np.asarray(value_and_grad(lambda w: jnp.sum(w * w))(loss_scale, POINT).grads).tolist()


def growth_value_mpx():
    scaling = mpx.DynamicLossScaling(jnp.float32(1024.0), jnp.float32(1.0), period=1)
    return float(mpx.filter_value_and_grad(lambda w: jnp.sum(w * w), scaling)(POINT)[0])


def growth_value_ours():
    loss_scale = LossScale.dynamic(1024.0, growth_interval=1)
    return float(value_and_grad(lambda w: jnp.sum(w * w))(loss_scale, POINT).value)


# -- scales above float16's range, which bfloat16 and float32 losses can have -----------------------------------------


def large_scale_mpx():
    scaling = mpx.DynamicLossScaling(jnp.float32(2.0**17), jnp.float32(1.0))
    return float(scaling.scale(jnp.float32(1.0)))


def large_scale_ours():
    return float(LossScale.dynamic(2.0**17).scale(jnp.float32(1.0)))


def top_mpx():
    scaling = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1.0), period=1)
    return float(scaling.adjust(jnp.array(True)).loss_scaling)


def top_ours():
    return float(LossScale.dynamic(2.0**15, growth_interval=1).update(True).value)


CASES = [
    # peer's, its result (an error's type and words, or a value), ours, correct result
    (lower_bound_jmp, 1.0, lower_bound_ours, 4.0),
    (half_scale_jmp, (TypeError, "float32.*float16"), half_scale_ours, 2.0**14),
    (unscale_jmp, pytest.approx(1.3, abs=0.2), unscale_ours, pytest.approx(1.0, abs=1e-6)),
    (integers_jmp, "float32", integers_ours, "int32"),
    (module_jmp, (TypeError, "was passed to select_n"), module_ours, True),
    (growth_mpx, [0.5, 1.0, 1.5], growth_ours, [1.0, 2.0, 3.0]),
    (growth_value_mpx, 1.75, growth_value_ours, 3.5),
    (large_scale_mpx, float("inf"), large_scale_ours, 2.0**17),
    (top_mpx, 65504.0, top_ours, 65536.0),
]


@pytest.mark.parametrize(("theirs", "given", "ours", "right"), CASES, ids=[case[0].__name__ for case in CASES])
def test_ours_is_right_where_the_peer_is_not(theirs, given, ours, right):
    if isinstance(given, tuple):
        kind, words = given
        with pytest.raises(kind, match=words):
            theirs()
    else:
        assert theirs() == given
        assert given != right
    assert ours() == right
