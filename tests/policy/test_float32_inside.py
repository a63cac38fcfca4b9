"""The casts ``fp32_inside`` and ``low_fp32_out``: numbers, saved tensors and refusals on each front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
import torch
from jax import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.common import events
from xla_amp.jax import autocast

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x, w: F.layer_norm(x, (64,), w, w),
    "group_norm": lambda x, w: F.group_norm(x, 4, w[:8], w[:8]),
    "batch_norm": lambda x, w: F.batch_norm(x, w[:8].detach().clone(), w[:8].detach().clone(), w[:8], w[:8], True),
    "instance_norm": lambda x, w: F.instance_norm(x, None, None, w[:8], w[:8]),
    "rms_norm": lambda x, w: F.rms_norm(x, (64,), w),
    "softmax": lambda x, w: F.softmax(x, -1),
    "log_softmax": lambda x, w: F.log_softmax(x, -1),
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "pow": lambda x, w: x**3,
    "exp": lambda x, w: torch.exp(x),
    "sum": lambda x, w: x.sum(-1),
    "cumsum": lambda x, w: x.cumsum(-1),
    "var": lambda x, w: x.var(-1),
    "logsumexp": lambda x, w: x.logsumexp(-1),
}


class Float32(TorchDispatchMode):
    """Counts float32 tensors of a size that are alive."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.numel() >= self.size:
                self.made.append(StorageWeakRef(value.untyped_storage()))
        return out

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.made)


def probe(shape: torch.Size) -> torch.Tensor:
    return (torch.arange(shape.numel()) * 1.7).cos().reshape(shape)


def test_torch_rounds_once_and_saves_low_tensors(device: torch.device) -> None:
    host = (torch.arange(2 * 8 * 64) * 0.37).sin().reshape(2, 8, 64).bfloat16()
    weight = torch.linspace(0.5, 1.5, 64)
    found: dict[str, list[torch.Tensor]] = {}
    with policy.override(dict.fromkeys(OPERATIONS, "fp32_inside")):  # type: ignore[arg-type]
        for name, function in OPERATIONS.items():
            x = host.to(device).requires_grad_()
            w = weight.to(device).requires_grad_()
            with xla_amp.autocast(device, policy="tpu"), Float32(host.numel()) as float32:
                out = function(x, w)
            assert (out.dtype, float32.alive()) == (torch.bfloat16, 0), name
            (gradient,) = torch.autograd.grad(out, x, probe(out.shape).bfloat16().to(device))
            assert gradient.dtype == torch.bfloat16
            found[name] = [out.detach(), gradient]
            with xla_amp.autocast(device, policy="tpu"):
                assert function(w.expand(2, 8, 64).contiguous(), w).dtype == torch.float32, "a float32 input stays"
    for name, function in OPERATIONS.items():
        exact = host.double().requires_grad_()
        wanted = function(exact, weight.double())
        (gradient,) = torch.autograd.grad(wanted, exact, probe(wanted.shape).bfloat16().double())
        for got, value in zip(found[name], (wanted.detach(), gradient), strict=True):
            size = float(value.abs().max())
            error = float((got.cpu().double() - value).abs().max()) / size
            assert error < 0.008, (name, error)  # two roundings to bfloat16


def test_torch_under_checkpoint_and_func() -> None:
    x, w = torch.randn(4, 8).bfloat16(), torch.linspace(0.5, 1.5, 8)

    def norm(x: torch.Tensor) -> torch.Tensor:
        with policy.override(rms_norm="fp32_inside"), xla_amp.autocast("cpu"):
            return F.rms_norm(x, (8,), w).float().square().sum()

    plain = x.clone().requires_grad_()
    norm(plain).backward()
    again = x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(norm, again, use_reentrant=False).backward()
    assert plain.grad is not None
    assert again.grad is not None
    torch.testing.assert_close(plain.grad, again.grad, rtol=0.02, atol=0.02)
    torch.testing.assert_close(torch.func.grad(norm)(x), plain.grad, rtol=0.02, atol=0.02)


X = jnp.linspace(-3, 3, 4 * 6, dtype=jnp.float32).reshape(4, 6)
W = jnp.cos(jnp.arange(48.0)).reshape(6, 8)

JAX_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "log_softmax": nn.log_softmax,
    "exp": jnp.exp,
    "sum": lambda h: jax.lax.reduce(h, np.float32(0), jax.lax.add, (1,)),
}
"""One in parts, and an element's and a sum's own primitives."""


@pytest.mark.parametrize("name", JAX_FUNCTIONS)
def test_jax_computes_in_float32_and_stores_low_values(name: str) -> None:
    def after_a_product(x: Any) -> Any:
        return JAX_FUNCTIONS[name](x @ W)

    with policy.override({name: "fp32_inside"}), events.capture() as records:
        out, pull = jax.vjp(autocast(after_a_product, strict=True), X)
        inside = autocast(jax.grad(lambda x: after_a_product(x).sum()), strict=True)(X)
    record = next(each for each in records if each.layer == "override")
    assert (record.cast, record.given[0], record.used[0], record.result) == (
        "fp32_inside", "bfloat16", "float32", ("bfloat16",)
    )  # fmt: skip
    stored = [each for each in jax.tree.leaves(pull) if each.shape == (4, 8)]
    assert {each.dtype for each in stored} <= {jnp.dtype(jnp.bfloat16)}
    h = (X.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)).astype(jnp.float32)
    # The composite is compared with itself in float32, after the same low product: one rounding is left.
    np.testing.assert_allclose(np.float32(out), JAX_FUNCTIONS[name](h), rtol=1 / 128, atol=0.02)
    exact = jax.jit(jax.grad(lambda x: after_a_product(x).sum()))(X)
    for got in (pull(jnp.ones_like(out))[0], inside):
        np.testing.assert_allclose(got, exact, atol=0.03 * float(jnp.abs(exact).max()) + 0.02)


@pytest.fixture(scope="module")
def with_a_norm() -> tuple[Callable[[Any, Any], Any], Any]:
    """A model of Flax as a function, and positive weights, which take less time than drawn ones."""
    flax = pytest.importorskip("flax.linen")

    class Model(flax.Module):  # type: ignore[misc, name-defined]
        @flax.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            h = flax.BatchNorm(use_running_average=False)(flax.Dense(8)(x))
            return flax.Dense(4)(nn.log_softmax(flax.Dense(8)(h) + h))

    def apply(variables: Any, x: Any) -> Any:
        return Model().apply(variables, x, mutable=["batch_stats"])

    def weight(shape: Any) -> Any:
        return 0.5 + jnp.cos(jnp.arange(shape.size) * 1.7).reshape(shape.shape) / 3

    return apply, jax.tree.map(weight, jax.eval_shape(Model().init, jax.random.key(0), X))


def test_statistics_of_a_flax_norm_stay_float32(with_a_norm: Any) -> None:
    apply, variables = with_a_norm
    with policy.override(batch_norm="fp32_inside"), events.capture() as records:
        _, state = jax.jit(autocast(apply, strict=True))(variables, X * 3 + 1)
    (record,) = [each for each in records if each.operation == "batch_norm"]
    assert record.given[0] == "bfloat16"
    assert sorted(record.result) == ["bfloat16", "float32", "float32"]
    _, exact = jax.jit(apply)(variables, X * 3 + 1)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(exact), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=0.01, atol=0.01)


BATCH_NORM = """
func.func @main(%x: tensor<2x4x4x8xf32>, %k: tensor<1x1x8x8xf32>, %s: tensor<8xf32>) -> (tensor<2x4x4x8xf32>, tensor<8xf32>) {
  %h = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<2x4x4x8xf32>, tensor<1x1x8x8xf32>) -> tensor<2x4x4x8xf32>
  %y, %m, %v = "stablehlo.batch_norm_training"(%h, %s, %s) {epsilon = 1.0e-5 : f32, feature_index = 3 : i64}
    : (tensor<2x4x4x8xf32>, tensor<8xf32>, tensor<8xf32>) -> (tensor<2x4x4x8xf32>, tensor<8xf32>, tensor<8xf32>)
  %z = stablehlo.convolution(%y, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<2x4x4x8xf32>, tensor<1x1x8x8xf32>) -> tensor<2x4x4x8xf32>
  return %z, %m : tensor<2x4x4x8xf32>, tensor<8xf32>
}
"""  # noqa: E501


def test_a_batch_norm_of_stablehlo() -> None:
    converted = stablehlo.autocast(BATCH_NORM, rules={"batch_norm": "fp32_inside"}, strict=True)
    (norm,) = [each for each in converted.report.operations if each.operation == "batch_norm_training"]
    assert (norm.cast, norm.after, *norm.result) == ("fp32_inside", "float32", "bfloat16")
    lines = converted.text().splitlines()
    (line,) = [number for number, text in enumerate(lines) if "batch_norm_training" in text]
    assert "bf16" not in lines[line]
    assert "-> tensor<2x4x4x8xbf16>" in lines[line + 1], "the next convolution reads its result low"
    assert "stays float32" not in str(stablehlo.autocast(BATCH_NORM, rules={"batch_norm": "fp32"}).report)


@pytest.mark.parametrize("by", ["rules", "lean"])
def test_norm_and_log_softmax_of_stablehlo_in_parts(by: str, with_a_norm: Any) -> None:
    apply, variables = with_a_norm
    given: dict[str, Any] = {"policy": "lean"}
    if by == "rules":
        given = {"rules": {"batch_norm": "fp32_inside", "log_softmax": "fp32_inside"}, "strict": True}
    lowered = jax.jit(apply).lower(variables, X * 3 + 1)
    low = stablehlo.autocast(lowered, **given)
    report = low.report
    inside = {each.operation: (each.after, *each.result) for each in report.operations if each.cast == "fp32_inside"}
    expected = {"batch_norm"} if by == "lean" else {"batch_norm", "log_softmax"}
    assert {name: inside[name] for name in expected} == dict.fromkeys(expected, ("float32", "bfloat16"))
    between = [dtype for each in report.operations if each.why == "between two low operations" for dtype in each.result]
    assert between, "what follows stays low"
    assert set(between) == {"bfloat16"}
    parts = {each.after for each in report.operations if "a part of batch_norm" in each.why}
    assert parts == {"float32"}
    assert "amp." not in low.text()
    got = module_runs.run(low.module, jax.tree.leaves((variables, X * 3 + 1)))
    out, state = jax.jit(apply)(variables, X * 3 + 1)
    for one, exact in zip(got, jax.tree.leaves((out, state)), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, exact, rtol=0.02, atol=0.02)


def test_a_sum_of_stablehlo_accumulates_in_float32() -> None:
    def function(x: Any, w: Any) -> Any:
        return ((x @ w).sum(1, keepdims=True) * jnp.ones((1, 6))) @ w

    converted = stablehlo.autocast(jax.jit(function).lower(X, W), rules={"sum": "fp32_inside"}, strict=True)
    text = converted.text()
    (line,) = [each for each in text.splitlines() if "stablehlo.reduce(" in each]
    assert "(tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>" in line
    (after,) = [each for each in converted.report.operations if each.operation == "multiply"]
    assert after.after == "bfloat16"


def test_products_with_float32_results() -> None:
    def function(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    with policy.override(mm="low_fp32_out", tanh="keep"), events.capture() as records:
        out = autocast(function, strict=True)(X, W)
        gradient = jax.jit(jax.grad(lambda w: autocast(function, strict=True)(X, w).sum()))(W)
    products = [each for each in records if each.cast == "low_fp32_out"]
    assert {(each.used, each.result) for each in products} == {(("bfloat16", "bfloat16"), ("float32",))}
    tanh = next(each for each in records if each.operation == "tanh")
    assert tanh.given == ("float32",)
    converted = stablehlo.autocast(jax.jit(function).lower(X, W), rules={"mm": "low_fp32_out"}, strict=True)
    decided = [(each.after, *each.result) for each in converted.report.operations if each.cast == "low_fp32_out"]
    assert decided == [("bfloat16", "float32")] * 2
    np.testing.assert_allclose(out, function(X, W), atol=0.1)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(lambda w: function(X, w).sum()))(W), atol=0.3)
