"""Programs that compare values with what they were computed from: only a product is a reason to round.

Without a product that sums something, a program gives the same bits as in float32.  With one, its values are rounded,
but both sides of a comparison alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from xla_amp import stablehlo
from xla_amp.jax import autocast

X: Final = (1 + np.random.default_rng(0).permutation(8 * 16).reshape(8, 16) * 1e-4).astype(np.float32)
"""Numbers that differ in float32; in bfloat16 there are three of them."""
W: Final = (np.eye(16) + np.random.default_rng(1).normal(size=(16, 16)) * 1e-3).astype(np.float32)

Function = Callable[..., Any]


def _windows(x: Any, function: Any, start: float) -> Any:
    return lax.reduce_window(x, start, function, (3, 3), (1, 1), "SAME")


_max = functools.partial(_windows, function=lax.max, start=-jnp.inf)
_min = functools.partial(_windows, function=lax.min, start=jnp.inf)


def _dot(left: Any, right: Any, contracted: Any, batch: Any = ((), ())) -> Any:
    return lax.dot_general(left, right, (contracted, batch))


def _conv(x: Any, w: Any, groups: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups)


def _running_maximum(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        largest = jnp.maximum(carry, row)
        return largest, largest == row

    return lax.scan(step, jnp.full(x.shape[1:], -jnp.inf), x)


def _found_by_bisection(x: Any) -> Any:
    ordered = jnp.sort(x.ravel())

    def body(state: Any) -> Any:
        low, high = state
        middle = (low + high) // 2
        less = ordered[middle] < x[0, 0]
        return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

    found, _ = lax.while_loop(lambda s: s[0] < s[1], body, (0, ordered.size))
    return ordered[found] == x[0, 0]


EXACT: Final[dict[str, Function]] = {
    "peaks": lambda x, w: jnp.where(_max(x) == x, x, 0),
    "argmax": lambda x, w: x.ravel()[x.argmax()] == x.max(),
    "sorted by key": lambda x, w: lax.sort_key_val(x, w[:8], 1),
    "threshold of top k": lambda x, w: x >= lax.top_k(x, 3)[0][:, -1:],
    "running maxima": lambda x, w: lax.cummax(x, 1) == x,
    "maxima in a scan": lambda x, w: _running_maximum(x),
    "bisection in a loop": lambda x, w: _found_by_bisection(x),
    "isclose": lambda x, w: jnp.isclose(x, x[:1], 1e-4, 0),
    "quantile": lambda x, w: jnp.quantile(x, 0.3, method="lower"),
    "scatter of maxima": lambda x, w: jnp.zeros(16).at[x.argmax(1)].max(x.max(1)),
    "gradient of sorting": lambda x, w: jax.grad(lambda v: (jnp.sort(v) * jnp.arange(16.0)).sum())(x),
    "choice": lambda x, w: lax.cond(x.max() == x[0].max(), lambda: x, lambda: -x),
    "normalized": lambda x, w: (x - x.min()) / (x.max() - x.min()),
    "product over an axis of 1": lambda x, w: jnp.cos(1e3 * (x[0][:, None] @ x[1][None])),
    "product over two axes of 1": lambda x, w: _dot(x[:, None, None], w[:, None, None], ((1, 2), (1, 2))),
    "product along a batch axis": lambda x, w: _dot(x, x, ((), ()), ((0, 1), (0, 1))),
    "product over an axis of 0": lambda x, w: x[:, :0] @ w[:0],
    "product over an axis of 1 in a scan": lambda x, w: lax.scan(lambda c, v: (c, v[:, None] @ c), x[:1], x),
    "product over an axis of 1 in a checkpoint": lambda x, w: jax.checkpoint(lambda v: v[:, None] @ v[None])(x[0]),
    "convolution of one pixel": lambda x, w: _conv(x[:, :1, None, None], w[:3, :3].reshape(1, 1, 3, 3)),
    "depthwise convolution of single pixels": lambda x, w: _conv(x[None, :, None], w[:8, :1, None, None], 8),
    "rotations": lambda x, w: (
        x[:3, :3] @ x[3:6, :3].T,
        jnp.einsum("bij,bjk->bik", x.reshape(-1, 4, 4), x.reshape(-1, 4, 4)),
    ),
    "rays": lambda x, w: jnp.sin(500 * jnp.concatenate([x[:, :2], jnp.ones((8, 1))], -1) @ w[:3]),
    "gradient of rays": lambda x, w: jax.grad(lambda w: jnp.sin(x[:4, :3] @ w).sum())(w[:3]),
    "colours": lambda x, w: _conv(x.reshape(1, 4, -1, 4), w[:4, :4, None, None]),
    "depthwise convolution of four pixels": lambda x, w: _conv(x[None, :, :, None], w[:8, None, :4, None], 8),
    "float32 asked for": lambda x, w: jnp.dot(x, w, precision=lax.Precision.HIGHEST),
    "an algorithm asked for": lambda x, w: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32),
}
"""Programs of `x` and `w` without a product that sums more than four terms, or that ask for float32."""


CONSISTENT: Final[dict[str, Function]] = {
    "maxima of rows": lambda h, x: (h == h.max(1, keepdims=True)).any(1),
    "peaks in every window": lambda h, x: (_max((_max(h) == h).astype(jnp.float32)) >= 0).all(),
    "troughs": lambda h, x: (_min(h) == h).any(),
    "running maxima": lambda h, x: lax.cummax(h, 1)[:, -1] == h.max(1),
    "searchsorted": lambda h, x: jnp.sort(h[0])[jnp.searchsorted(jnp.sort(h[0]), h[0])] == h[0],
    "clipped by a row of data": lambda h, x: (jnp.minimum(h, x[0]) == x[0]) == (h >= x[0]),
    "clipped by one row, compared with it": lambda h, x: jnp.minimum(h + 9, x[0])[2] == x[0],
    "selected data": lambda h, x: jnp.where(h > 9, h, x[0])[1] == x[0],
    "clamped data": lambda h, x: jax.lax.clamp(x[0][None] * jnp.ones((8, 1)), h - 9, x + 9)[3] == x[0],
    "marks of a scan": lambda h, x: _running_maximum(h)[1].any(0),
    "bisection in a loop": lambda h, x: _found_by_bisection(h),
    "gradient of a maximum": lambda h, x: jnp.abs(jax.grad(lambda v: v.max())(h).sum() - 1) < 1e-2,
    "segments": lambda h, x: (jax.ops.segment_max(h, jnp.zeros(8, int), 1) == h).any(0),
    "gradient that sums nothing": lambda h, x: (
        jax.grad(lambda u: ((x[:1] @ u) * x[1]).sum())(x.T @ x) == jnp.outer(x[0], x[1])
    ),
}
"""Programs of a product `h` and of data: all of their results are true."""


def _exact(x: Any, w: Any) -> dict[str, list[Any]]:
    return {name: jax.tree.leaves(function(x, w)) for name, function in EXACT.items()}


def _consistent(x: Any, w: Any) -> dict[str, Any]:
    return {name: (function(x @ w, x), (x @ w).sum())[0] for name, function in CONSISTENT.items()}


def _autocast(front: str, function: Function, *args: Any) -> tuple[str, Any]:
    """The program of a front, and what it gives."""
    if front == "jax":
        lowered = jax.jit(autocast(function)).lower(*args)
        return lowered.as_text(), lowered.compile()(*args)
    converted = stablehlo.autocast(export.export(jax.jit(function))(*args))
    return converted.text(), converted.program.exported.call(*args)


@pytest.fixture(scope="module")
def float32() -> dict[str, list[Any]]:
    return jax.jit(_exact)(X, W)


@pytest.mark.parametrize("front", ["jax", "stablehlo"])
def test_programs_without_gain_are_those_of_float32(front: str, float32: dict[str, list[Any]]) -> None:
    text, found = _autocast(front, _exact, X, W)
    assert "bf16" not in text
    for name, values in float32.items():
        for got, want in zip(found[name], values, strict=True):
            assert got.dtype == want.dtype, name
            np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("front", ["jax", "stablehlo"])
def test_both_sides_of_a_comparison_are_rounded_alike(front: str) -> None:
    text, found = _autocast(front, _consistent, X, W)
    assert "bf16" in text
    assert not [name for name, value in found.items() if not np.all(value)]
