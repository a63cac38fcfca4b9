"""A monitored step whose batch is in parts in two processes; for test_jax_monitor_processes.py.

python monitor_on_two_processes.py RANK PORT DIRECTORY
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.jax import monitor, observe

BAD, ROW = 3, 3  # the row of process 1


def loss(w, x):
    with jax.named_scope("up"):
        h = (x @ w).astype(jnp.float16).astype(jnp.float32)
    return jnp.mean(h**2)


@jax.jit
def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    gradient = observe("gradient", {"up": gradient})["up"]
    return w - 0.01 * gradient, observe("loss", value)


def main(rank: int, port: str, directory: str) -> None:
    recorded = monitor(step, sample=1, directory=directory)
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    mesh = jax.make_mesh((2,), ("data",))
    whole, rows = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ([], ["data"]))
    w = jax.make_array_from_callback((4, 4), whole, lambda at: np.ones((4, 4), np.float32)[at])
    for index in range(6):
        x = np.random.default_rng(index).standard_normal((4, 4)).astype(np.float32)
        x[ROW] *= 1e6 if index == BAD else 1.0
        x = jax.make_array_from_callback((4, 4), rows, lambda at, x=x: x[at])
        w, _ = recorded(w, x)
    recorded.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
