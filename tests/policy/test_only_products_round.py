"""Programs that compare values with what they were computed from, on three fronts: only a product is a reason to round.

Without a product that sums something, a program gives the same bits as in float32.  With one, its values are rounded,
but both sides of a comparison alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import export, lax

import xla_amp
from xla_amp import stablehlo
from xla_amp.jax import autocast

X: Final = (1 + np.random.default_rng(0).permutation(8 * 16).reshape(8, 16) * 1e-4).astype(np.float32)
"""Numbers that differ in float32; in bfloat16 there are three of them."""
W: Final = (np.eye(16) + np.random.default_rng(1).normal(size=(16, 16)) * 1e-3).astype(np.float32)

Function = Callable[..., Any]


class Program(NamedTuple):
    """One program of `x` and `w` in JAX and, where torch's lists ask for no low dtype in it, in torch."""

    name: str
    jax: Function
    torch: Function | None = None


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


EXACT: Final = [
    Program("peaks", lambda x, w: jnp.where(_max(x) == x, x, 0)),
    Program("troughs", lambda x, w: jnp.where(_min(x) == x, x, 0)),
    Program("pooled", lambda x, w: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")),
    Program("gradient of pooling", lambda x, w: jax.grad(lambda v: (_max(v) * v).sum())(x)),
    Program("maximum", lambda x, w: x == x.max(), lambda x, w: x == x.max()),
    Program("minimum of rows", lambda x, w: x == x.min(1, keepdims=True), lambda x, w: x == x.amin(1, keepdim=True)),
    Program("argmax", lambda x, w: x.ravel()[x.argmax()] == x.max(), lambda x, w: x.view(-1)[x.argmax()] == x.max()),
    Program("argmin", lambda x, w: x.argmin(1), lambda x, w: x.argmin(1)),
    Program("argsort", lambda x, w: x.argsort(1), lambda x, w: x.argsort(1)),
    Program("sorted", lambda x, w: jnp.sort(x, 0)[-1] == x.max(0), lambda x, w: x.sort(0).values[-1] == x.amax(0)),
    Program(
        "sorted by key", lambda x, w: lax.sort_key_val(x, w[:8], 1), lambda x, w: torch.gather(w[:8], 1, x.argsort(1))
    ),
    Program(
        "threshold of top k", lambda x, w: x >= lax.top_k(x, 3)[0][:, -1:], lambda x, w: x >= x.topk(3).values[:, -1:]
    ),
    Program("indices of top k", lambda x, w: lax.top_k(x, 3)[1], lambda x, w: x.topk(3).indices),
    Program(
        "masked top k",
        lambda x, w: jnp.where(x < lax.top_k(x, 2)[0][:, 1:], -jnp.inf, x),
        lambda x, w: x.masked_fill(x < x.topk(2).values[:, 1:], -torch.inf),
    ),
    Program("running maxima", lambda x, w: lax.cummax(x, 1) == x, lambda x, w: x.cummax(1).values == x),
    Program("running minima", lambda x, w: lax.cummin(x, 0) == x, lambda x, w: x.cummin(0).values == x),
    Program("maxima in a scan", lambda x, w: _running_maximum(x)),
    Program("bisection in a loop", lambda x, w: _found_by_bisection(x)),
    Program(
        "searchsorted",
        lambda x, w: jnp.searchsorted(jnp.sort(x[0]), x[0]),
        lambda x, w: torch.searchsorted(x[0].sort().values, x[0]),
    ),
    Program(
        "digitize", lambda x, w: jnp.digitize(x, jnp.sort(x[3])), lambda x, w: torch.bucketize(x, x[3].sort().values)
    ),
    Program("isclose", lambda x, w: jnp.isclose(x, x[:1], 1e-4, 0), lambda x, w: torch.isclose(x, x[:1], 1e-4, 0)),
    Program(
        "allclose", lambda x, w: jnp.allclose(x, x + 1e-4, 1e-5), lambda x, w: ((x - (x + 1e-4)).abs() < 1e-5).all()
    ),
    Program("median", lambda x, w: jnp.median(x, 1), lambda x, w: x.median(1).values),
    Program("quantile", lambda x, w: jnp.quantile(x, 0.3, method="lower"), lambda x, w: x.view(-1).kthvalue(39).values),
    Program("clipped", lambda x, w: jnp.clip(x, 1.003, 1.009) == x, lambda x, w: x.clamp(1.003, 1.009) == x),
    Program("clipped by a row", lambda x, w: jnp.minimum(x, x[0]) == x[0], lambda x, w: torch.minimum(x, x[0]) == x[0]),
    Program("hinge", lambda x, w: jax.nn.relu(x - x[0]) > 0, lambda x, w: (x - x[0]).clamp(min=0) > 0),
    Program("unique", lambda x, w: jnp.unique(x, size=128), lambda x, w: x.view(-1).sort().values),
    Program("membership", lambda x, w: jnp.isin(x, x[2]), lambda x, w: torch.isin(x, x[2])),
    Program("scatter of maxima", lambda x, w: jnp.zeros(16).at[x.argmax(1)].max(x.max(1))),
    Program("segments", lambda x, w: jax.ops.segment_max(x, jnp.arange(8) % 3, 3)[jnp.arange(8) % 3] == x),
    Program("one hot", lambda x, w: jax.nn.one_hot(x.argmax(1), 16) * x, lambda x, w: F.one_hot(x.argmax(1), 16) * x),
    Program("gradient of a maximum", lambda x, w: jax.grad(lambda v: v.max())(x)),
    Program("gradient of sorting", lambda x, w: jax.grad(lambda v: (jnp.sort(v) * jnp.arange(16.0)).sum())(x)),
    Program("choice", lambda x, w: lax.cond(x.max() == x[0].max(), lambda: x, lambda: -x)),
    Program("rolled", lambda x, w: jnp.roll(x, 1, 0) > x, lambda x, w: x.roll(1, 0) > x),
    Program(
        "normalized", lambda x, w: (x - x.min()) / (x.max() - x.min()), lambda x, w: (x - x.min()) / (x.max() - x.min())
    ),
    Program("outer product", lambda x, w: jnp.outer(x[0], x[1]), lambda x, w: x[0, :, None] * x[1]),
    Program(
        "product over an axis of 1",
        lambda x, w: jnp.cos(1e3 * (x[0][:, None] @ x[1][None])),
        lambda x, w: torch.cos(1e3 * (x[0, :, None] * x[1])),
    ),
    Program(
        "product over an axis of 1, by batch",
        lambda x, w: x[:, :, None] @ x[:, None, :],
        lambda x, w: x[:, :, None] * x[:, None, :],
    ),
    Program("product over two axes of 1", lambda x, w: _dot(x[:, None, None], w[:, None, None], ((1, 2), (1, 2)))),
    Program("product along a batch axis", lambda x, w: _dot(x, x, ((), ()), ((0, 1), (0, 1)))),
    Program("einsum", lambda x, w: jnp.einsum("bi,bj->bij", x, x), lambda x, w: x[:, :, None] * x[:, None]),
    Program("einsum over an axis of 1", lambda x, w: jnp.einsum("bki,kj->bij", x[:, None], w[:1])),
    Program("product over an axis of 0", lambda x, w: x[:, :0] @ w[:0]),
    Program("product over an axis of 1 under vmap", lambda x, w: jax.vmap(lambda v: v[:, None] @ v[None])(x)),
    Program("product over an axis of 1 in a scan", lambda x, w: lax.scan(lambda c, v: (c, v[:, None] @ c), x[:1], x)),
    Program(
        "product over an axis of 1 in a checkpoint", lambda x, w: jax.checkpoint(lambda v: v[:, None] @ v[None])(x[0])
    ),
    Program("convolution of single pixels", lambda x, w: _conv(x[None, None], w[:4, :1, None, None])),
    Program("convolution of one pixel", lambda x, w: _conv(x[:, :1, None, None], w[:3, :3].reshape(1, 1, 3, 3))),
    Program("depthwise convolution of single pixels", lambda x, w: _conv(x[None, :, None], w[:8, :1, None, None], 8)),
    Program("float32 asked for", lambda x, w: jnp.dot(x, w, precision=lax.Precision.HIGHEST)),
    Program("an algorithm asked for", lambda x, w: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)),
    Program("a mask of maxima times data", lambda x, w: jnp.where(x == x.max(1, keepdims=True), x, 0).sum(1)),
]


CONSISTENT: Final[list[tuple[str, Function, Function | None]]] = [
    ("maximum", lambda h, x: (h == h.max()).any(), lambda h: (h == h.max()).any()),
    (
        "maxima of rows",
        lambda h, x: (h == h.max(1, keepdims=True)).any(1),
        lambda h: (h == h.amax(1, keepdim=True)).any(1),
    ),
    ("argmax", lambda h, x: h.ravel()[h.argmax()] == h.max(), lambda h: h.reshape(-1)[h.argmax()] == h.max()),
    ("peaks", lambda h, x: (_max(h) == h).any(), lambda h: (F.max_pool2d(h[None], 3, 1, 1)[0] == h).any()),
    ("peaks in every window", lambda h, x: (_max((_max(h) == h).astype(jnp.float32)) >= 0).all(), None),
    ("troughs", lambda h, x: (_min(h) == h).any(), None),
    (
        "running maxima",
        lambda h, x: lax.cummax(h, 1)[:, -1] == h.max(1),
        lambda h: h.cummax(1).values[:, -1] == h.amax(1),
    ),
    (
        "top k",
        lambda h, x: (h >= lax.top_k(h, 3)[0][:, -1:]).sum(1) >= 3,
        lambda h: (h >= h.topk(3).values[:, -1:]).sum(1) >= 3,
    ),
    (
        "values of top k",
        lambda h, x: jnp.take_along_axis(h, lax.top_k(h, 3)[1], 1) == lax.top_k(h, 3)[0],
        lambda h: h.gather(1, h.topk(3).indices) == h.topk(3).values,
    ),
    ("sorted", lambda h, x: jnp.sort(h, 1)[:, 0] == h.min(1), lambda h: h.sort(1).values[:, 0] == h.amin(1)),
    (
        "searchsorted",
        lambda h, x: jnp.sort(h[0])[jnp.searchsorted(jnp.sort(h[0]), h[0])] == h[0],
        lambda h: h[0].sort().values[torch.searchsorted(h[0].sort().values, h[0])] == h[0],
    ),
    ("isclose", lambda h, x: jnp.isclose(h, h * 1), lambda h: torch.isclose(h, h * 1)),
    (
        "median",
        lambda h, x: (jnp.sort(h, 1)[:, 7:8] == h).any(1),
        lambda h: (h.median(1, keepdim=True).values == h).any(1),
    ),
    (
        "clipped above",
        lambda h, x: (jnp.minimum(h, 1.003) == 1.003) == (h >= 1.003),
        lambda h: (h.clamp(max=1.003) == 1.003) == (h >= 1.003),
    ),
    ("clipped by a row of data", lambda h, x: (jnp.minimum(h, x[0]) == x[0]) == (h >= x[0]), None),
    ("clipped by one row, compared with it", lambda h, x: jnp.minimum(h + 9, x[0])[2] == x[0], None),
    ("selected data", lambda h, x: jnp.where(h > 9, h, x[0])[1] == x[0], None),
    ("clamped data", lambda h, x: jax.lax.clamp(x[0][None] * jnp.ones((8, 1)), h - 9, x + 9)[3] == x[0], None),
    ("running maximum in a scan", lambda h, x: _running_maximum(h)[0] == h.max(0), None),
    ("marks of a scan", lambda h, x: _running_maximum(h)[1].any(0), None),
    ("bisection in a loop", lambda h, x: _found_by_bisection(h), None),
    ("gradient of a maximum", lambda h, x: jnp.abs(jax.grad(lambda v: v.max())(h).sum() - 1) < 1e-2, None),
    (
        "gradient of pooling",
        lambda h, x: (
            jax.grad(lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum())(h).sum() == 32
        ),
        None,
    ),
    ("unique", lambda h, x: jnp.isin(h, jnp.unique(h, size=128)), None),
    ("segments", lambda h, x: (jax.ops.segment_max(h, jnp.zeros(8, int), 1) == h).any(0), None),
    (
        "gradient that sums nothing",
        lambda h, x: jax.grad(lambda u: ((x[:1] @ u) * x[1]).sum())(x.T @ x) == jnp.outer(x[0], x[1]),
        None,
    ),
    ("nearest row", lambda h, x: (h[:, None] == h[None]).all(-1)[jnp.arange(8), jnp.arange(8)], None),
]
"""(name, function of a product `h` and of data, function of a product in torch): all of its results are true."""


def _exact(x: Any, w: Any) -> dict[str, list[Any]]:
    return {program.name: jax.tree.leaves(program.jax(x, w)) for program in EXACT}


def _consistent(x: Any, w: Any) -> dict[str, Any]:
    return {name: (function(x @ w, x), (x @ w).sum())[0] for name, function, _ in CONSISTENT}


def _on_stablehlo(function: Function, *args: Any) -> Any:
    return stablehlo.autocast(export.export(jax.jit(function))(*args)).program.exported.call(*args)


@pytest.fixture(scope="module")
def float32() -> dict[str, list[Any]]:
    return jax.jit(_exact)(X, W)


@pytest.mark.parametrize("front", ["jax", "stablehlo"])
def test_programs_without_gain_are_those_of_float32(front: str, float32: dict[str, list[Any]]) -> None:
    found = jax.jit(autocast(_exact))(X, W) if front == "jax" else _on_stablehlo(_exact, X, W)
    for name, values in float32.items():
        for got, want in zip(found[name], values, strict=True):
            assert got.dtype == want.dtype, name
            np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("program", EXACT, ids=lambda program: program.name)
def test_no_program_without_gain_has_a_low_value(program: Program) -> None:
    assert "bf16" not in str(jax.make_jaxpr(autocast(program.jax))(X, W))
    assert "bf16" not in stablehlo.autocast(jax.jit(program.jax).lower(X, W)).text()


@pytest.mark.parametrize("front", ["jax", "stablehlo"])
def test_both_sides_of_a_comparison_are_rounded_alike(front: str) -> None:
    found = jax.jit(autocast(_consistent))(X, W) if front == "jax" else _on_stablehlo(_consistent, X, W)
    assert not [name for name, value in found.items() if not np.all(value)]


@pytest.mark.full
def test_a_program_without_gain_is_that_of_float32_in_torch() -> None:
    device = xla_amp.xla_device()
    x, w = (torch.from_numpy(value).to(device) for value in (X, W))
    programs = [program for program in EXACT if program.torch is not None]
    expected = [program.torch(x, w) for program in programs if program.torch is not None]
    with xla_amp.autocast(device):
        found = [program.torch(x, w) for program in programs if program.torch is not None]
    for program, got, want in zip(programs, found, expected, strict=True):
        assert torch.equal(got.cpu(), want.cpu()), program.name


def test_both_sides_of_a_comparison_are_rounded_alike_in_torch() -> None:
    device = xla_amp.xla_device()
    x, w = (torch.from_numpy(value).to(device) for value in (X, W))
    with xla_amp.autocast(device):
        found = {name: function(x @ w) for name, _, function in CONSISTENT if function is not None}
    assert not [name for name, value in found.items() if not value.cpu().all()]


def test_there_are_fifty_programs_and_bfloat16_would_break_most(float32: dict[str, list[Any]]) -> None:
    assert len(EXACT) >= 50
    low = jax.jit(_exact)(X.astype(jnp.bfloat16).astype(np.float32), W)
    same = [name for name in float32 if all(map(np.array_equal, float32[name], low[name]))]
    assert len(same) < 12, same
