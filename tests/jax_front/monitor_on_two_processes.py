"""A monitored step whose batch is in parts in two processes; for test_jax_monitor_processes.py.

python monitor_on_two_processes.py RANK PORT DIRECTORY
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.jax import LossScale, monitor, select, statistics, value_and_grad

BAD, ROW = 3, 3  # the row of process 1


def loss(w, x):
    with jax.named_scope("up"):
        h = (x @ w).astype(jnp.float16).astype(jnp.float32)
    return jnp.mean(h**2)


@jax.jit
def step(w, scale, x):
    out = value_and_grad(loss)(scale, w, x)
    found = statistics({"up": out.grads}, loss=out.value, loss_scale=scale, skipped=~out.finite)
    return select(out.finite, w - 0.01 * out.grads, w), out.loss_scale, found


def main(rank: int, port: str, directory: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    recorder = monitor(directory=directory)
    mesh = jax.make_mesh((2,), ("data",))
    whole, rows = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ([], ["data"]))
    w = jax.make_array_from_callback((4, 4), whole, lambda at: np.ones((4, 4), np.float32)[at])
    scale = jax.jit(lambda: LossScale.dynamic(16.0), out_shardings=whole)()
    for index in range(6):
        x = np.random.default_rng(index).standard_normal((4, 4)).astype(np.float32)
        x[ROW] *= 1e6 if index == BAD else 1.0
        x = jax.make_array_from_callback((4, 4), rows, lambda at, x=x: x[at])
        w, scale, found = step(w, scale, x)
        recorder.record(found, w, scale, x)
    print(recorder.read().of("gradient_norm"), recorder.kept.name)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
