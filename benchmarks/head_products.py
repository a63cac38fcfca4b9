"""Milliseconds of the three products of a language model's head: as they are, padded, and without Triton's kernels.

    python benchmarks/head_products.py [--rows 16384 --columns 50257 --width 768] [--rounds 10]

GPT-2's vocabulary of 50257 is odd.  On a GPU, XLA then computes the products with Triton; a padding to a multiple of 8
lets it take cuBLAS, as torch.compile does.  The operands are bfloat16; a result is sliced to what was asked for.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from results import interleaved, machine

NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def _padded(x: jax.Array, axis: int, extent: int) -> jax.Array:
    return jnp.pad(x, [(0, extent - size if each == axis else 0) for each, size in enumerate(x.shape)])


def products(columns: int, extent: int) -> dict[str, tuple[Callable[..., jax.Array], str]]:
    """Product -> (function, names of its operands): x [rows, width], w [columns, width], g [rows, columns].

    Args:
        columns: of the vocabulary.
        extent: what it is padded to; `columns` pads nothing.
    """
    return {
        "forward": (lambda x, w: (x @ _padded(w, 0, extent).T)[:, :columns], "xw"),
        "data gradient": (lambda g, w: _padded(g, 1, extent) @ _padded(w, 0, extent), "gw"),
        "weight gradient": (lambda g, x: (_padded(g, 1, extent).T @ x)[:columns], "gx"),
    }


def _timed(run: Callable[..., Any], operands: list[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*operands))
    return time.perf_counter() - start


def main() -> None:
    """Print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 16384), ("columns", 50257), ("width", 768), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rows, columns, width = options.rows, options.columns, options.width
    shapes = {"x": (rows, width), "w": (columns, width), "g": (rows, columns)}
    arrays = {
        name: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    ways: dict[str, tuple[int, Mapping[str, Any]]] = {"plain": (columns, {})}
    ways |= {f"to {extent}": (extent, {}) for extent in (-(-columns // 8) * 8, -(-columns // 64) * 64)}
    if jax.default_backend() == "gpu":
        ways["without Triton"] = (columns, NO_TRITON)
    contestants = {}
    for way, (extent, flags) in ways.items():
        for product, (function, names) in products(columns, extent).items():
            operands = [arrays[name] for name in names]
            run = jax.jit(function).lower(*operands).compile(compiler_options=dict(flags) or None)
            jax.block_until_ready(run(*operands))
            contestants[way, product] = functools.partial(_timed, run, operands)
    times = interleaved({f"{way}: {product}": run for (way, product), run in contestants.items()}, options.rounds)
    print(machine())
    for way in ways:
        found = [f"{product} {1e3 * times[f'{way}: {product}']:.2f} ms" for product in products(columns, columns)]
        print(f"{way}: {', '.join(found)}")
    print(
        "; ".join(f"{way} {1e3 * sum(t for key, t in times.items() if key.startswith(f'{way}:')):.2f}" for way in ways)
    )


if __name__ == "__main__":
    main()
