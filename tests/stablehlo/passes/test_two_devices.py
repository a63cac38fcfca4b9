"""A program sharded over two devices, converted and run on two CPU devices in a separate process."""

from __future__ import annotations

import os

import forked

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from xla_amp.stablehlo import autocast

mesh = Mesh(np.array(jax.devices()), ("i",))
generator = np.random.default_rng(0)
w = 0.2 * generator.standard_normal((16, 16), np.float32)
x = generator.standard_normal((8, 16), np.float32)

def part(w, x):
    return jax.lax.psum(jnp.sum(jnp.tanh(x @ w) @ w)[None], "i")

def loss(w, x):
    return jnp.sum(jax.shard_map(part, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(w, x))

where = NamedSharding(mesh, P()), NamedSharding(mesh, P("i"))
step = jax.jit(jax.value_and_grad(loss), in_shardings=where)
converted = autocast(jax.export.export(step)(w, x))
text = converted.text()
assert "sdy.manual_computation" in text
assert "tensor<4x16xbf16>" in text
assert all(each.after == "bfloat16" for each in converted.report.operations if each.operation == "dot_general")
got = jax.jit(converted.program.exported.call, in_shardings=where)(w, x)
expected = step(w, x)
error = np.linalg.norm(got[1] - expected[1]) / np.linalg.norm(expected[1])
print("devices", len(jax.devices()), "error below 0.02:", bool(0 < error < 0.02))
"""


def test_a_step_divided_over_two_devices() -> None:
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    }
    run = forked.run(program=PROGRAM, environment={**os.environ, **flags})
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "devices 2 error below 0.02: True"
