"""Statistics of a data-parallel step on eight virtual devices equal NumPy's; `find_overflow` looks into shard_map.

Prints ``same``.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xla_amp.jax import find_overflow, monitor, observe
from xla_amp.tools.monitor.history import ValueKey

MESH = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
X = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
W = {"layer": {"kernel": np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)}}


def loss(w, x):
    with jax.named_scope("layer"):
        y = x @ w["layer"]["kernel"]
    return jnp.mean(y**2)


def shard(w, x):
    value, grads = jax.value_and_grad(loss)(jax.lax.pcast(w, "d", to="varying"), x)
    grads = observe("gradient", jax.lax.pmean(grads, "d"))
    return observe("loss", jax.lax.pmean(value, "d")), grads


def plain(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return observe("loss", value), observe("gradient", grads)


def check(step, w, x):
    step = monitor(step, sample=1)
    value, grads = step(w, x)
    record = step.read().steps[0]
    y = X.astype(np.float64) @ W["layer"]["kernel"]
    gradient = np.asarray(grads["layer"]["kernel"], np.float64)
    for kind, exact in (("activation", y), ("gradient", gradient)):
        found = record.statistics[ValueKey("layer", kind)]
        np.testing.assert_allclose(found.rms, np.sqrt((exact**2).mean()), rtol=1e-6)
        np.testing.assert_allclose(found.amax, np.abs(exact).max(), rtol=1e-6)
    np.testing.assert_allclose(record.gradient_norm, np.linalg.norm(gradient), rtol=1e-6)
    assert record.loss == float(value)


mapped = jax.shard_map(shard, mesh=MESH, in_specs=(P(), P("d")), out_specs=(P(), P()))
check(jax.jit(mapped), W, X)
check(mapped, W, X)
sharded = jax.device_put(X, NamedSharding(MESH, P("d")))
check(jax.jit(plain), W, sharded)

logarithm = jax.jit(jax.shard_map(lambda x: jax.lax.psum(jnp.log(x), "d"), mesh=MESH, in_specs=P("d"), out_specs=P()))
report = find_overflow(logarithm, jnp.arange(16.0))
assert (report.first.place.operation, report.first.made, report.not_watched) == ("log", "inf", ())
print("same")
