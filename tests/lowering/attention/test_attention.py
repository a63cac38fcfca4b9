"""Attention against a float64 reference in torch, and the fused layers against torch on the CPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
import torch
from harness import TOLERANCE, check, compare, lowered_here, lowering_of, sample, to_array, to_tensor, together

from xla_amp.lowering.attention import fused_layers, sdpa  # noqa: F401  (fill the table)
from xla_amp.lowering.linalg import contraction

FORWARD = "_scaled_dot_product_fused_attention_overrideable"
BACKWARD = FORWARD + "_backward"
B, H, L, S, D = 2, 4, 6, 7, 8


def operands(dtype: torch.dtype, shared: int = H) -> list[torch.Tensor]:
    shapes = ((B, H, L, D), (B, shared, S, D), (B, shared, S, 5))
    return [sample(*shape, dtype=dtype, low=-1, high=1, seed=i) for i, shape in enumerate(shapes)]


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention by its definition; a fully masked row is zero."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if bias is not None:
        seen, scores = (seen & bias, scores) if bias.dtype is torch.bool else (seen, scores + bias)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * seen
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ value


def tensors(arrays: list[Any], dtype: torch.dtype) -> list[Any]:
    with jax.enable_x64(True):
        return [None if array is None else to_tensor(array, dtype) for array in arrays]


def mask() -> torch.Tensor:
    seen = sample(B, 1, L, S, dtype=torch.bool)
    seen[0, 0, 2] = False  # a fully masked row
    return seen


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.3},
    "masked": {"bias": mask()},
    "biased": {"bias": sample(B, 1, 1, S, dtype=torch.float64)},
    "biased by a matrix": {"bias": sample(L, S, dtype=torch.float64)},
    "heads that share keys": {"shared": 2, "causal": True},
    "one key head, masked": {"shared": 1, "bias": mask()},
}


@pytest.mark.parametrize(("dtype", "platform"), [(torch.float64, "tpu"), (torch.bfloat16, "cpu")])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, dtype, platform):
    options = {"bias": None, "causal": False, "scale": None, "shared": H} | CASES[case]
    bias, causal, scale = options["bias"], options["causal"], options["scale"]
    low = operands(dtype, options["shared"])
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype)
    exact = [x.double().requires_grad_() for x in low]
    wide_bias = bias.double().requires_grad_() if bias is not None and bias.is_floating_point() else bias
    want = reference(*exact, wide_bias, causal, scale)
    grad = sample(*want.shape, dtype=dtype, low=-1, high=1, seed=9)
    sources = exact + ([wide_bias] if wide_bias is not None and wide_bias.requires_grad else [])
    gradients = torch.autograd.grad(want, sources, grad.double())

    output, logsumexp, *_ = lowered_here(FORWARD, *low, bias, 0.0, causal, False, scale=scale, platform=platform)
    (result,) = tensors([output], dtype)
    wanted = [True, True, True, len(sources) == 4]
    saved = (result, *tensors([logsumexp], torch.float64), None, None, L, S, 0.0, causal, None, None)
    got = tensors(lowered_here(BACKWARD, grad, *low, bias, wanted, *saved, scale=scale, platform=platform), dtype)

    # bfloat16: the weights are rounded once, and so is each sum over S or L of them
    tolerance = TOLERANCE[dtype] if dtype is torch.float64 else 4 * TOLERANCE[dtype]
    for name, x, y in zip(
        ("output", "query", "key", "value", "bias"), [result, *got], [want.detach(), *gradients, None], strict=False
    ):
        if y is not None:
            compare(x, y.to(dtype), rtol=tolerance, atol=tolerance, where=name)
    assert (got[3] is None) == (len(sources) == 3)


@pytest.mark.parametrize("has_units", [True, False])
def test_a_bf16_product_widens_its_operands_only_for_a_cpu_without_units(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contraction, "_multiplies_bfloat16", lambda: has_units)

    def step(*arrays: Any) -> Any:
        options = {"platform": "cpu"}
        forward = lowering_of(FORWARD).function(*arrays, None, 0.0, True, False, **options)
        saved = (forward[0].astype(arrays[0].dtype), forward[1], None, None, L, S, 0.0, True, None, None)
        return lowering_of(BACKWARD).function(saved[0], *arrays, None, [True] * 4, *saved, **options)

    text = jax.jit(step).lower(*map(to_array, operands(torch.bfloat16))).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 7  # two forward, five backward; one of those recomputes a forward product
    low = [line.rsplit(" : ", 1)[1].count("bf16") for line in products]
    assert low.count(2) == (7 if has_units else 2)  # the two weight-like gradients contract rows of both operands
    assert low.count(0) == 7 - low.count(2)


def test_a_program_of_both_passes_computes_the_scores_once():
    def step(*arrays: Any) -> Any:
        options = {"platform": "cpu"}
        forward = lowering_of(FORWARD).function(*arrays, None, 0.0, True, False, **options)
        saved = (forward[0], forward[1], None, None, L, S, 0.0, True, None, None)
        return lowering_of(BACKWARD).function(forward[0], *arrays, None, [True] * 4, *saved, **options)

    compiled = jax.jit(step).lower(*map(to_array, operands(torch.float32))).compile().as_text()
    assert sum(" exponential(" in line for line in compiled.splitlines()) == 1


def test_dropout_drops_the_same_weights_in_both_passes():
    dropout, dtype = 0.4, torch.float64
    query, key, _ = operands(dtype)
    value = torch.eye(S, dtype=dtype).expand(B, H, S, S)
    with jax.enable_x64(True):
        rng = jax.random.key(3)
    options = {"platform": "cpu"}
    forward = lowered_here(FORWARD, query, key, value, None, dropout, False, False, rng=rng, **options)
    output, logsumexp, *_, seed, _, _ = forward
    seed = tensors([seed], torch.int64)[0]
    weights, logsumexp = tensors([output, logsumexp], dtype)
    full = torch.softmax(query @ key.mT / math.sqrt(D), -1)
    kept = (weights != 0).double() / (1 - dropout)
    compare(weights, full * kept)
    assert 0.5 < (weights != 0).double().mean() < 0.7

    sources = [x.clone().requires_grad_() for x in (query, key, value)]
    again = torch.softmax(sources[0] @ sources[1].mT / math.sqrt(D), -1) * kept @ sources[2]
    grad = sample(*again.shape, dtype=dtype, seed=5)
    saved = (weights, logsumexp, None, None, L, S, dropout, False, seed, None)
    got = tensors(lowered_here(BACKWARD, grad, query, key, value, None, [True] * 4, *saved, **options), dtype)
    for x, y in zip(got, torch.autograd.grad(again, sources, grad), strict=False):
        compare(x, y)


# -- fused layers -----------------------------------------------------------------------------------------------------

E = 8


def projections(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((3 * E, E), (3 * E,), (E, E), (E,))
    return [sample(*shape, dtype=dtype, low=-1, high=1, seed=i) for i, shape in enumerate(shapes)]


MASKS = [(None, None), (0, (S, S)), (1, (B, S)), (2, (B, 2, S, S))]


@together(("mask_type", "shape"), MASKS)
def test_multi_head_attention(mask_type, shape):
    x = sample(B, S, E, dtype=torch.float64)
    hidden = None if shape is None else sample(*shape, dtype=torch.bool).index_fill(-1, torch.tensor(0), False)
    for averaged in (True, False):
        check("_native_multi_head_attention", x, x, x, E, 2, *projections(x.dtype), hidden, True, averaged, mask_type)


@together("gelu", [False, True])
@together("norm_first", [False, True])
def test_transformer_encoder_layer(norm_first, gelu):
    x = sample(B, S, E, dtype=torch.float64)
    shapes = ((E,), (E,), (E,), (E,), (16, E), (16,), (E, 16), (E,))
    rest = [sample(*shape, dtype=x.dtype, seed=10 + i) for i, shape in enumerate(shapes)]
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1, 4:] = True
    for masked in ((), (padding, 1)):
        check("_transformer_encoder_layer_fwd", x, E, 2, *projections(x.dtype), gelu, norm_first, 1e-5, *rest, *masked)
