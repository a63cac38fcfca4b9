"""Matrix products against torch on the CPU, and their form on each platform."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import check, lowering_of, sample, together

from xla_amp import hardware
from xla_amp.lowering import Permuted, forms
from xla_amp.lowering.linalg import contraction
from xla_amp.lowering.operand import Biased

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

ROWS = {
    "addmm": ((5, 3), (5, 7), (7, 3)),
    "addmv": ((5,), (5, 7), (7,)),
    "baddbmm": ((2, 5, 3), (2, 5, 7), (2, 7, 3)),
    "addbmm": ((5, 3), (2, 5, 7), (2, 7, 3)),
    "addr": ((5, 3), (5,), (3,)),
}


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [sample(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(ROWS[name])]


@together("platform", ["cpu", "gpu"])
def test_a_product_is_rounded_once(platform: str) -> None:
    for name in ROWS if platform == "cpu" else [name for name in ROWS if name != "addr"]:  # torch composes it
        check(name, *operands(name, BF16), beta=0.5, alpha=2.0, wide=True, platform=platform)
    check("addmm", sample(3, dtype=BF16), *operands("addmm", BF16)[1:], wide=True, platform=platform)


def test_a_product_of_bytes_is_exact() -> None:
    left, right = (torch.full((17, 64), value, dtype=torch.int8) for value in (-128, 127))
    check("_int_mm", left, right.t())
    check("_int_mm", sample(17, 64, dtype=torch.int8), sample(64, 8, dtype=torch.int8, seed=2))


@together("name", ["addmm", "baddbmm"])
def test_beta_zero_ignores_the_start(name: str) -> None:
    start, *factors = operands(name, F32)
    for beta in (0.0, 1.0):
        check(name, torch.full_like(start, float("nan")), *factors, beta=beta, alpha=2)


def test_addmm_activation() -> None:
    for use_gelu in (False, True):
        check("_addmm_activation", sample(3), sample(5, 7), sample(7, 3), use_gelu=use_gelu)


def test_bias_is_added_before_the_one_rounding() -> None:
    # 1 + 2**-8 is a tie between two bfloat16 numbers; the bias decides it, unless the product was rounded first.
    left = torch.tensor([[1.0, 2.0**-8]], dtype=BF16)
    right = torch.ones(2, 1, dtype=BF16)
    check("addmm", torch.tensor([[2.0**-9]], dtype=BF16), left, right, rtol=0, atol=0, wide=True)
    twice_rounded = (left @ right) + torch.tensor([[2.0**-9]], dtype=BF16)
    once_rounded = (left.double() @ right.double() + 2.0**-9).to(BF16)
    assert twice_rounded.item() != once_rounded.item()


def test_the_bias_of_a_large_product_is_added_in_its_dtype_on_gpu() -> None:
    """XLA turns product and sum of one dtype into cuBLAS's epilogue; a sum that stays in cache is wide."""

    def text(rows: int, bias: tuple[int, ...], **factors: float) -> str:
        low = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (bias, (rows, 64), (64, 1024))]
        return jax.jit(lambda *x: contraction.addmm(*x, platform="gpu", **factors)).lower(*low).as_text()

    for bias in ((1024,), (1, 1024)):
        assert "f32" not in text(1024, bias)
    for kept_wide in (text(512, (1024,)), text(1024, (1,)), text(1024, (1024, 1024)), text(1024, (1024,), alpha=2)):
        assert "-> tensor<1024x1024xf32>" in kept_wide or "-> tensor<512x1024xf32>" in kept_wide


def test_an_activation_adds_the_bias_of_a_large_layer_in_its_own_kernels_on_gpu() -> None:
    """Both passes read the product, so XLA writes no sum; the numbers are those of the sum."""
    random = np.random.default_rng(0)
    shapes = (2, 512, 64), (1024, 64), (1024,), (2, 512, 1024)
    low = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]

    def passes(x: jax.Array, weight: jax.Array, bias: jax.Array, grad: jax.Array, of_sum: bool) -> list[jax.Array]:
        hidden = contraction.linear(x, weight, bias, platform="gpu")
        assert isinstance(hidden, Biased)
        given = hidden.materialize() if of_sum else hidden
        return [
            lowering_of("gelu").function(given, approximate="tanh", platform="gpu"),
            lowering_of("gelu_backward").function(grad, given, approximate="tanh", platform="gpu"),
        ]

    deferred, of_sum = (jax.jit(functools.partial(passes, of_sum=flag)).lower(*low) for flag in (False, True))
    barrier = re.compile(r"optimization_barrier %(\w+)")
    for lowered, kind in ((deferred, "stablehlo.reshape"), (of_sum, "stablehlo.add")):
        (kept,) = barrier.findall(lowered.as_text())
        assert f"%{kept} = {kind}" in lowered.as_text()
    rounded = {"xla_allow_excess_precision": False}  # as in programs for a GPU
    compiled = (each.compile(rounded)(*low) for each in (deferred, of_sum))
    for got, expected in zip(*compiled, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_a_large_odd_product_is_padded_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_chosen", {})
    monkeypatch.setattr(contraction, "_LARGE", 520 * 513 * 515)
    low = [
        jnp.asarray(np.random.default_rng(0).integers(-2, 3, shape), jnp.bfloat16) for shape in ((520, 513), (513, 515))
    ]

    def product() -> tuple[str, np.ndarray]:
        compiled = jax.jit(lambda a, b: contraction.mm(a, b, platform="gpu", wide=True))
        return compiled.lower(*low).as_text(), np.asarray(compiled(*low), float)

    padded, got = product()
    (choice,) = forms.chosen("product")
    assert choice.form == "padded"
    monkeypatch.setattr(forms, "refused", {"padded": "to compare"})
    plain, expected = product()
    assert "tensor<513x515xbf16>) -> tensor<520x515xf32>" in plain
    assert "tensor<520x520xbf16>) -> tensor<520x520xf32>" in padded
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(expected, np.matmul(*(np.asarray(x, float) for x in low)))
    monkeypatch.setattr(forms, "_chosen", {})
    contraction.mm(low[0][:, :512], low[1][:512, :512], platform="gpu")  # all in eights
    contraction.mm(low[0][:, :9], low[1][:9], platform="gpu")  # small
    contraction.mm(low[0][:512, :512], low[1][:512], platform="gpu", wide=True)  # fewer multiplications
    contraction.mm(*low, platform="tpu")
    contraction.mm(*(x.astype(jnp.float32) for x in low), platform="gpu")
    assert forms.chosen("product") == ()


PAIRS: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (contraction.mm, (40, 24), (24, 16)),
    "bmm": (contraction.bmm, (3, 40, 24), (3, 24, 16)),
    "mv": (contraction.mv, (40, 24), (24,)),
    "odd mm": (contraction.mm, (37, 11), (11, 5)),
}


def transposed(x: np.ndarray, dtype: object) -> Permuted:
    """`x` as the transpose of an array that is laid out the other way around."""
    order = tuple(reversed(range(x.ndim)))
    return Permuted(jnp.asarray(x.transpose(order), dtype), order)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pair", PAIRS)
def test_folded_transposes(pair: str, dtype: str, platform: str) -> None:
    function, *shapes = PAIRS[pair]
    # small integers: every form must be exact
    left, right = (np.random.default_rng(0).integers(-3, 4, shape).astype(float) for shape in shapes)
    expected = np.matmul(left, right)
    plain = [jnp.asarray(x, dtype) for x in (left, right)]
    for a in (plain[0], transposed(left, dtype)):
        for b in (plain[1], transposed(right, dtype)):
            got = jax.jit(lambda a=a, b=b: function(a, b, platform=platform))()
            np.testing.assert_array_equal(np.asarray(got, float), expected)


def hlo(*operands: jax.Array | Permuted, platform: str) -> str:
    return jax.jit(lambda: contraction.mm(*operands, platform=platform)).lower().as_text()


def test_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contraction, "_SOME_FAIL", False)
    low = jnp.zeros((64, 64), jnp.bfloat16)
    flipped = Permuted(low, (1, 0))
    # CPU: wide result, no transpose left, a blocked one for the left operand
    for right in (low, flipped):
        text = hlo(low, right, platform="cpu")
        assert "-> tensor<64x64xf32>" in text
        assert "stablehlo.transpose" not in text
    text = hlo(flipped, low, platform="cpu")
    assert "optimization_barrier" in text
    assert "contracting_dims = [1] x [0]" in text
    # accelerators: low in, low out, whatever the layout
    for left in (low, flipped):
        text = hlo(left, low, platform="gpu")
        assert "-> tensor<64x64xbf16>" in text
        assert "optimization_barrier" not in text
        assert "stablehlo.transpose" not in text
    # float32 is always float32
    wide = jnp.zeros((64, 64), jnp.float32)
    for platform in ("cpu", "gpu", "tpu"):
        assert "precision = [HIGHEST, HIGHEST]" in hlo(wide, wide, platform=platform)


@pytest.mark.parametrize("has_units", [True, False])
def test_bfloat16_operands_are_widened_for_a_cpu_without_units(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = frozenset({"avx512_bf16"} if has_units else ())
    monkeypatch.setattr(hardware, "processor", lambda: hardware.Processor("a CPU", 2, flags))
    monkeypatch.setattr(contraction, "_SOME_FAIL", False)
    x, y = (jax.random.normal(jax.random.key(seed), (64, 64), jnp.bfloat16) for seed in range(2))
    exact = np.asarray(x, float) @ np.asarray(y, float)
    for right in (y, Permuted(y.T, (1, 0))):
        text = hlo(x, right, platform="cpu")
        assert ("(tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>" in text) == has_units
        assert ("(tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>" in text) != has_units
        got = np.asarray(contraction.mm(x, right, platform="cpu"))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)  # a low result would be 4e-3 off
    # a weight gradient has its own form, which needs no units
    assert "(tensor<64x64xbf16>, tensor<64x64xbf16>)" in hlo(Permuted(x, (1, 0)), y, platform="cpu")
    half = jnp.zeros((64, 64), jnp.float16)  # has kernels nowhere: the same form
    assert "(tensor<64x64xf16>, tensor<64x64xf16>)" in hlo(half, half, platform="cpu")


@pytest.mark.parametrize(("flags", "low"), [({"avx512_bf16"}, False), ({"avx512_bf16", "amx_bf16"}, True)])
def test_gradients_of_weights_are_wide_where_xla_has_no_kernel(
    flags: set[str], low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA of JAX 0.10.0 ended with an error in training steps on CPUs without AMX."""
    monkeypatch.setattr(hardware, "processor", lambda: hardware.Processor("a CPU", 2, frozenset(flags)))
    monkeypatch.setattr(contraction, "_SOME_FAIL", True)
    x, y = (jax.random.normal(jax.random.key(seed), (64, 64), jnp.bfloat16) for seed in range(2))
    assert ("(tensor<64x64xbf16>, tensor<64x64xbf16>)" in hlo(Permuted(x, (1, 0)), y, platform="cpu")) == low
    assert "(tensor<64x64xbf16>, tensor<64x64xbf16>)" in hlo(x, y, platform="cpu")


def test_float16_results_keep_their_range() -> None:
    # 300 * 300 overflows float16: torch gives inf, and so must the converted accumulator
    x = torch.full((1, 1), 300.0, dtype=F16)
    check("mm", x, x)
    check("mm", x, x, platform="gpu")


def test_a_transpose_inside_the_program_is_not_folded_into_a_half_dot() -> None:
    """XLA:CPU chooses its bfloat16 kernel before it folds, and a program with the folded form fails when it runs."""

    def program(y: jax.Array, weight: jax.Array) -> jax.Array:
        pooled = jnp.transpose(y, (1, 0, 2)).sum(-1).astype(jnp.bfloat16)
        return contraction.contract(pooled, weight, ((1,), (1,)), platform="cpu")

    y, weight = np.ones((32, 2, 3), np.float32), np.ones((4, 32), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(program)(y, weight), np.full((2, 4), 96))


GROUPED = {
    "rows_with_an_empty_group": ((12, 8), (3, 8, 16), [0, 7, 12]),
    "contracted": ((8, 16), (16, 8), [8, 8, 16]),
    "columns": ((3, 8, 8), (8, 16), [4, 8, 16]),
    "one_each": ((3, 8, 8), (3, 8, 16), None),
}


@together("dtype", [torch.float32, torch.bfloat16])
@together("name", GROUPED)
def test_grouped(name: str, dtype: torch.dtype) -> None:
    left, right, ends = GROUPED[name]
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    operands = sample(*left, dtype=dtype, seed=0), sample(*right, dtype=dtype, seed=1)
    tolerance = {"rtol": 2**-8, "atol": 2**-8} if dtype is torch.bfloat16 else {}
    check("_grouped_mm", *operands, offsets, **tolerance)


def test_rows_after_the_last_group_are_zero() -> None:
    product = contraction.grouped_mm(jnp.ones((8, 4)), jnp.ones((2, 4, 4)), jnp.array([2, 5]), platform="cpu")
    assert product[:, 0].tolist() == [4, 4, 4, 4, 4, 0, 0, 0]
