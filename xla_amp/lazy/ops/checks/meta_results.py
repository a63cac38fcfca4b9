"""Meta functions for operations whose torch meta kernel is missing or differs from what the engine needs.

Each function gets all arguments of the operation, with tensors on ``meta``, and returns its results on ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import empty_like as _like

from xla_amp.lazy.ops import operators

aten = torch.ops.aten
RANK_REVEALING = ("gelsd", "gelss", "gelsy")
"""Least-squares drivers that return the rank."""


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


def _linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    shapes = x.shape, weight.shape, weight.shape[:-1]
    return tuple(grad.new_empty(shape) if want else None for shape, want in zip(shapes, wanted, strict=True))


def _gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    gates = grad.new_empty((grad.shape[0], 3 * grad.shape[1]))
    bias = grad.new_empty(gates.shape[1:]) if has_bias else None
    return gates, _like(gates), _like(grad), bias, bias


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, dropout: float, *_: Any, **__: Any
) -> tuple[Any, ...]:
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    seed = query.new_empty((2,), dtype=torch.int64) if dropout > 0 else None
    return output, logsumexp, None, None, None, None, seed, None, None


def _attention_backward(grad: torch.Tensor, *rest: Any, **_: Any) -> tuple[torch.Tensor | None, ...]:
    operands, wanted = rest[:4], rest[4]
    return tuple(_like(x) if want and x is not None else None for x, want in zip(operands, wanted, strict=True))


def _batch_norm_of(operator: Any) -> Callable[..., Any]:
    def shapes(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        y, *saved = operator(x, *rest)
        training = rest[-3]
        # torch's kernels save nothing in evaluation mode, but its meta kernel returns the statistics
        return y, *(kept if training else kept.new_empty((0,)) for kept in saved)

    return shapes


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    bias_sizes = [grad.shape[1]]
    return aten.convolution_backward(grad, x, weight, bias_sizes, *rest, **kwargs)


def _with_a_mask(x: torch.Tensor, *rest: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x), _like(x, dtype=torch.bool)


def _like_the_first(x: torch.Tensor, *rest: Any, **_: Any) -> torch.Tensor:
    return _like(x)


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None, bias: Any, out_dtype: torch.dtype | None
) -> torch.Tensor:
    # torch's meta kernel takes bfloat16 alone and rows of whole 16 bytes, which are rules of its CUDA kernel.
    dims = left.dim(), right.dim()
    groups: tuple[int, ...] = () if offs is None or 3 in dims else (offs.shape[0],)
    batch = left.shape[:1] if dims == (3, 3) else groups
    return left.new_empty((*batch, left.shape[-2], right.shape[-1]), dtype=out_dtype)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_ctc_loss.Tensor": lambda x, targets, *_: (
        x.new_empty(x.shape[1:2]),
        x.new_empty((x.shape[1], x.shape[0], 2 * targets.shape[1] + 1)),
    ),
    "_ctc_loss_backward.Tensor": lambda grad, log_probs, *_: _like(log_probs),
    **dict.fromkeys(
        (
            "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            "fake_quantize_per_channel_affine_cachemask",
            "fake_quantize_per_tensor_affine_cachemask",
        ),
        _with_a_mask,
    ),
    "_aminmax": lambda x: (x.new_empty(()), x.new_empty(())),
    "_aminmax.dim": lambda x, dim, keepdim=False: aten.aminmax(x, dim=dim, keepdim=keepdim),
    "_grid_sampler_2d_cpu_fallback": lambda image, grid, *_: image.new_empty((*image.shape[:2], *grid.shape[1:3])),
    "_grid_sampler_2d_cpu_fallback_backward": lambda grad, image, grid, *_: (_like(image), _like(grid)),
    "_grouped_mm": _grouped_mm,
    "_histogramdd_bin_edges": lambda x, bins, **_: [x.new_empty((count + 1,)) for count in bins],
    "_histogramdd_from_bin_cts": lambda x, bins, **_: x.new_empty(bins),
    "_histogramdd_from_bin_tensors": lambda x, bins, **_: x.new_empty([edges.shape[0] - 1 for edges in bins]),
    # torch 2.13 has meta kernels of the second and the third
    **dict.fromkeys(
        (
            "_dirichlet_grad",
            "_logcumsumexp",
            "_masked_softmax",
            "_masked_softmax_backward",
            "_sample_dirichlet",
            "_standard_gamma",
            "_standard_gamma_grad",
            "glu_jvp",
        ),
        _like_the_first,
    ),
    "_native_batch_norm_legit": _batch_norm_of(aten._native_batch_norm_legit.default),
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "_thnn_fused_gru_cell": lambda x, h, hx, *_: (_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))),
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_thnn_fused_lstm_cell": lambda x, h, cx, *_: (_like(cx), _like(cx), _like(x)),
    "binomial": lambda count, prob, *_: count.new_empty(torch.broadcast_shapes(count.shape, prob.shape)),
    # convolutions as composites ask for them on an out-of-tree device: torch._convolution
    "convolution_backward_overrideable": _convolution_backward,
    "convolution_overrideable": aten.convolution,
    "geqrf": lambda a: (_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))),
    "histogram.bin_ct": lambda x, bins=100, **_: (x.new_empty((bins,)), x.new_empty((bins + 1,))),
    "histogram.bins_tensor": lambda x, bins, **_: (x.new_empty((bins.shape[0] - 1,)), _like(bins)),
    "linalg_lstsq": _lstsq,
    "linear_backward": _linear_backward,
    "native_batch_norm": _batch_norm_of(aten.native_batch_norm.default),
}
"""ATen name -> meta function; private operations come and go with torch's versions."""
SHAPES: dict[Any, Callable[..., Any]] = {
    operator: function for name, function in _FUNCTIONS.items() if (operator := operators.find(name)) is not None
}
"""Operator -> its meta function; `shape_inference.results` looks here first."""
