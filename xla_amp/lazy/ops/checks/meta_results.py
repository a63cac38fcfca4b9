"""Meta functions for operations whose torch meta kernel is missing or differs from what the engine needs.

Each function gets all arguments of the operation, with tensors on ``meta``, and returns its results on ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_amp.lazy.ops import operators

aten = torch.ops.aten
SHAPES: dict[Any, Callable[..., Any]] = {}
"""Operator -> its meta function; `shape_inference.results` looks here first."""


def _of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    operator = operators.find(name)  # private operations come and go with torch's versions

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if operator is not None:
            SHAPES[operator] = function
        return function

    return decorate


# -- linear algebra ---------------------------------------------------------------------------------------------------


@_of("geqrf")
def _geqrf(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


@_of("linalg_lstsq")
def _lstsq(a: torch.Tensor, b: torch.Tensor, rcond: float | None, *, driver: str | None) -> tuple[torch.Tensor, ...]:
    rows, columns = a.shape[-2:]
    vector = b.dim() == a.dim() - 1
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-1] if vector else b.shape[:-2])
    width = () if vector else b.shape[-1:]
    solution = b.new_empty((*batch, columns, *width))
    real = solution.real.dtype if a.is_complex() else a.dtype
    with_residuals = rows > columns and driver != "gelsy"
    residuals = b.new_empty((*batch, *width) if with_residuals else (0,), dtype=real)
    rank = b.new_empty(batch if driver in RANK_REVEALING else (0,), dtype=torch.int64)
    values = b.new_empty((*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else (0,), dtype=real)
    return solution, residuals, rank, values


RANK_REVEALING = ("gelsd", "gelss", "gelsy")
"""Least-squares drivers that return the rank."""


@_of("linear_backward")
def _linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    shapes = x.shape, weight.shape, weight.shape[:-1]
    return tuple(grad.new_empty(shape) if want else None for shape, want in zip(shapes, wanted, strict=True))


# -- recurrent cells --------------------------------------------------------------------------------------------------


@_of("_thnn_fused_lstm_cell")
def _lstm_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


@_of("_thnn_fused_gru_cell")
def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


@_of("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    gates = grad.new_empty((grad.shape[0], 3 * grad.shape[1]))
    bias = grad.new_empty(gates.shape[1:]) if has_bias else None
    return gates, torch.empty_like(gates), torch.empty_like(grad), bias, bias


# -- attention --------------------------------------------------------------------------------------------------------


@_of("_scaled_dot_product_fused_attention_overrideable")
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, dropout: float, *_: Any, **__: Any
) -> tuple[Any, ...]:
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    seed = query.new_empty((2,), dtype=torch.int64) if dropout > 0 else None
    return output, logsumexp, None, None, None, None, seed, None, None


@_of("_scaled_dot_product_fused_attention_overrideable_backward")
def _attention_backward(grad: torch.Tensor, *rest: Any, **_: Any) -> tuple[torch.Tensor | None, ...]:
    operands, wanted = rest[:4], rest[4]
    return tuple(
        torch.empty_like(x) if want and x is not None else None for x, want in zip(operands, wanted, strict=True)
    )


# -- the rest ---------------------------------------------------------------------------------------------------------


def _batch_norm_of(operator: Any) -> Callable[..., Any]:
    def shapes(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        y, *saved = operator(x, *rest)
        training = rest[-3]
        # torch's kernels save nothing in evaluation mode, but its meta kernel returns the statistics
        return y, *(kept if training else kept.new_empty((0,)) for kept in saved)

    return shapes


for _operator in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
    SHAPES[_operator] = _batch_norm_of(_operator)


@_of("_ctc_loss.Tensor")
def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * targets.shape[1] + 1))


@_of("_ctc_loss_backward.Tensor")
def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


@_of("_logcumsumexp")
@_of("_sample_dirichlet")
@_of("_standard_gamma")  # torch 2.13 has a meta kernel of this and the last
@_of("_standard_gamma_grad")
@_of("glu_jvp")
def _like_the_first(x: torch.Tensor, *rest: Any, **_: Any) -> torch.Tensor:
    return torch.empty_like(x)


@_of("binomial")
def _binomial(count: torch.Tensor, prob: torch.Tensor, *rest: Any) -> torch.Tensor:
    return count.new_empty(torch.broadcast_shapes(count.shape, prob.shape))


@_of("histogram.bins_tensor")
def _histogram(x: torch.Tensor, bins: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((bins.shape[0] - 1,)), torch.empty_like(bins)


@_of("histogram.bin_ct")
def _histogram_of_equal_bins(x: torch.Tensor, bins: int = 100, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((bins,)), x.new_empty((bins + 1,))


@_of("_histogramdd_bin_edges")
def _edges_of_equal_bins(x: torch.Tensor, bins: list[int], **_: Any) -> list[torch.Tensor]:
    return [x.new_empty((count + 1,)) for count in bins]


@_of("_histogramdd_from_bin_cts")
def _histogram_of_points_in_equal_bins(x: torch.Tensor, bins: list[int], **_: Any) -> torch.Tensor:
    return x.new_empty(bins)


@_of("_histogramdd_from_bin_tensors")
def _histogram_of_points(x: torch.Tensor, bins: list[torch.Tensor], **_: Any) -> torch.Tensor:
    return x.new_empty([edges.shape[0] - 1 for edges in bins])


# -- convolutions as composites ask for them on an out-of-tree device: torch._convolution ------------------------------


@_of("convolution_overrideable")
def _convolution(*args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = aten.convolution(*args, **kwargs)
    return result


@_of("convolution_backward_overrideable")
def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    bias_sizes = [grad.shape[1]]
    return aten.convolution_backward(grad, x, weight, bias_sizes, *rest, **kwargs)


@_of("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
@_of("fake_quantize_per_channel_affine_cachemask")
@_of("fake_quantize_per_tensor_affine_cachemask")
def _with_a_mask(x: torch.Tensor, *rest: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


# -- grouped matrix products ------------------------------------------------------------------------------------------


@_of("_grouped_mm")
def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None, bias: Any, out_dtype: torch.dtype | None
) -> torch.Tensor:
    # torch's meta kernel takes bfloat16 alone and rows of whole 16 bytes, which are rules of its CUDA kernel.
    dims = left.dim(), right.dim()
    groups: tuple[int, ...] = () if offs is None or 3 in dims else (offs.shape[0],)
    batch = left.shape[:1] if dims == (3, 3) else groups
    return left.new_empty((*batch, left.shape[-2], right.shape[-1]), dtype=out_dtype)
