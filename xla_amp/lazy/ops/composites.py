"""Kernels for composite operations of torch and torchvision that this device runs as one operation, and the reverse.

Each is registered on the device's autograd key and replaces torch's composite, so that autograd records one operation.
A call with unsupported arguments runs the composite.  The fused layers of inference are composed of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import unpack_dual

from xla_amp.lazy.ops import missing
from xla_amp.lazy.ops.checks import argument_rules, shape_inference
from xla_amp.lazy.ops.operators import KernelTable
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE, PLAIN

aten = torch.ops.aten
_KEY = torch.DispatchKey.AutogradPrivateUse1
KERNELS = KernelTable()
"""ATen name -> function for tensors of the device, with or without gradients."""
WITH_KEYSET = frozenset({"_scaled_dot_product_fused_attention_overrideable_backward", "linear"})
"""Those that also take the dispatcher's key set, first."""


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Whether a transform (torch.func, forward AD) or a tensor subclass sees this call.

    These support torch's decomposed operations only: ours have no batching rule and no forward derivative.
    The fake tensors of torch.compile are such; its graphs name torch's functions, which run on the device.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return True
    for x in tensors:  # noqa: SIM110  (each layer asks, and a generator takes longer)
        if type(x) not in PLAIN or unpack_dual(x).tangent is not None:
            return True
    return False


# -- attention --------------------------------------------------------------------------------------------------------

_attention: Callable[..., tuple[torch.Tensor, ...]] = aten._scaled_dot_product_fused_attention_overrideable.default
_attention_backward: Any = aten._scaled_dot_product_fused_attention_overrideable_backward.default.redispatch
_composite_attention: Callable[..., torch.Tensor] = aten.scaled_dot_product_attention.default.decompose


def _may_fuse() -> bool:
    """Whether the user allows a fused attention (``torch.nn.attention.sdpa_kernel``); not only torch's composite."""
    kinds = torch.backends.cuda
    fused = kinds.flash_sdp_enabled() or kinds.mem_efficient_sdp_enabled() or kinds.cudnn_sdp_enabled()
    return fused or not kinds.math_sdp_enabled()


def _fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, gqa: bool
) -> bool:
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, heads, _, width = query.shape
    shared, columns = key.shape[1:3]
    return (
        batch == key.shape[0] == value.shape[0]
        and shared == value.shape[1] > 0
        and (heads == shared or (gqa and heads % shared == 0))
        and columns == value.shape[2]
        and width == key.shape[3]
        and query.dtype is key.dtype is value.dtype
        and query.dtype.is_floating_point
        and (mask is None or (not causal and mask.dtype in (torch.bool, query.dtype)))
        and _may_fuse()
    )


@KERNELS.implements("scaled_dot_product_attention")
def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # torch chooses attention by a C++ table that has no entry for a device written in Python.
    if _fits(query, key, value, attn_mask, is_causal, enable_gqa) and not is_transformed(query, key, value):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return _composite_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@KERNELS.implements("_scaled_dot_product_fused_attention_overrideable_backward")
def _differentiable_attention_backward(
    keyset: torch.DispatchKeySet,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    wanted: list[bool],
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *seed: torch.Tensor | None,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The backward pass; runs the composite if it is differentiated itself (``create_graph=True``)."""
    operands = [query, key, value] if bias is None else [query, key, value, bias]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (grad, *operands))):
        sizes = (cum_seq_q, cum_seq_k, max_q, max_k)
        arguments = (grad, *operands[:3], bias, wanted, output, logsumexp, *sizes, dropout_p, is_causal, *seed)
        results: tuple[torch.Tensor | None, ...] = _attention_backward(keyset.remove(_KEY), *arguments, scale=scale)
        return results
    if dropout_p > 0:
        raise RuntimeError(
            "scaled_dot_product_attention with dropout cannot be differentiated twice as one operation; call it inside "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )
    gqa = query.shape[1] != key.shape[1]
    again = _composite_attention(query, key, value, bias, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    asked: list[Any] = [x for x, want in zip((query, key, value, bias), wanted, strict=True) if want]
    gradients = iter(torch.autograd.grad(again, asked, grad, create_graph=True))
    return tuple(next(gradients) if want else None for want in wanted)


# -- fused layers, which torch.nn takes for inference on any device that is registered --------------------------------

_PADDING_MASK = 1
"""`mask_type` of [batch, columns]; others are [rows, columns], [batch * heads, ...] and [batch, heads, ...]."""


@KERNELS.implements("_native_multi_head_attention")
def _multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output [batch, rows, embed_dim], weights [batch, rows, columns], per head unless averaged)."""
    if mask is not None and mask.dim() == 4:
        mask = mask.flatten(0, 1)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    bias_k = bias_v = None
    output, weights = F.multi_head_attention_forward(
        *(q, k, v, embed_dim, num_head, qkv_weight, qkv_bias, bias_k, bias_v, False, 0.0, proj_weight, proj_bias),
        training=False,
        key_padding_mask=mask if mask_type == _PADDING_MASK else None,
        need_weights=need_weights,
        attn_mask=None if mask_type == _PADDING_MASK else mask,
        average_attn_weights=average_attn_weights,
    )
    return output.transpose(0, 1), weights


@KERNELS.implements("_transformer_encoder_layer_fwd")
def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> torch.Tensor:
    """One encoder layer; `rest`: weight and bias of two norms and of two linear layers, mask, mask_type."""
    norms, layers, (mask, mask_type) = (rest[:2], rest[2:4]), (rest[4:6], rest[6:8]), (*rest[8:], None, None)[:2]

    def norm(x: torch.Tensor, number: int) -> torch.Tensor:
        weight, bias = norms[number]
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, False, mask_type)[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, *layers[0])
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), *layers[1])

    if norm_first:
        x = src + attend(norm(src, 0))
        return x + feed_forward(norm(x, 1))
    x = norm(src + attend(src), 0)
    return norm(x + feed_forward(x), 1)


# -- distances, composed so that their gradients are; torch composes large Euclidean ones -----------------------------


@KERNELS.implements("_cdist_forward")
def _cdist(x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    aten._cdist_forward.default(*map(shape_inference.on_meta, (x, y)), p, compute_mode)  # refuses what torch refuses
    difference = x[..., :, None, :] - y[..., None, :, :]
    # The count of components that differ has a gradient, of zeros; `norm` of order 0 has none.
    return difference.norm(p, -1) if p and x.shape[-1] else difference.sign().abs().sum(-1)


@KERNELS.implements("_pdist_forward")
def _pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    aten._pdist_forward.default(shape_inference.on_meta(x), p)
    i, j = torch.triu_indices(len(x), len(x), 1).to(x.device)
    return _cdist(x[i, None], x[j, None], p, None)[:, 0, 0]


# -- a gradient for which torch reads whether an element is zero -------------------------------------------------------


@KERNELS.implements("cumprod_backward")
def _cumprod_backward(grad: torch.Tensor, x: torch.Tensor, dim: int, output: torch.Tensor) -> torch.Tensor:
    """``before * after``, the products before an element, and ``after[i] = grad[i] + x[i + 1] * after[i + 1]``."""
    after, x, output = (tensor.movedim(dim, -1) if tensor.dim() else tensor[None] for tensor in (grad, x, output))
    size, terms, factor = x.shape[-1], 1, F.pad(x[..., 1:], (0, 1)).conj()
    while terms < size:  # which `after` is the sum of
        after = after + factor * F.pad(after[..., terms:], (0, terms))
        factor, terms = factor * F.pad(factor[..., terms:], (0, terms)), 2 * terms
    return (F.pad(output[..., :-1], (1, 0), value=1.0).conj() * after).movedim(-1, dim).view(grad.shape)


# -- rare losses, composed so that their gradients are -----------------------------------------------------------------


@KERNELS.implements("multi_margin_loss")
def _multi_margin_loss(x: torch.Tensor, target: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    loss: torch.Tensor = missing.decomposition(aten.multi_margin_loss.default)(x, target, *rest, **options)
    return loss if loss.dim() == 0 else loss.view(target.shape)  # the decomposition makes a number a row


@KERNELS.implements("multilabel_margin_loss_forward")
def _multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, ...]:
    # Torch's decomposition counts targets after the first -1.
    argument_rules.check(aten.multilabel_margin_loss_forward.default, {"self": x, "target": target})
    aten.multilabel_margin_loss_forward.default(*map(shape_inference.on_meta, (x, target)), reduction)  # wrong shapes
    wide, listed = torch.atleast_1d(x.float() if x.itemsize == 2 else x, target)
    valid = ((listed < 0).cumsum(-1) == 0)[..., None]
    named = (valid & (listed[..., None] == torch.arange(wide.shape[-1], device=x.device))).any(-2)
    own = wide.gather(-1, listed.clamp(min=0))[..., None]
    excess = (1 - own + wide[..., None, :]).relu().masked_fill(~valid | named[..., None, :], 0)
    losses = excess.sum((-1, -2)) / wide.shape[-1]
    loss = (losses, losses.mean(), losses.sum())[reduction]
    return loss.to(x.dtype), named.view(target.shape).to(x.dtype)


# -- linear layers ----------------------------------------------------------------------------------------------------

_composite_linear: Callable[..., torch.Tensor] = aten.linear.default.decompose


def _linear(differentiable: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """One operation for autograd, where torch's composite makes a product between views.

    Args:
        differentiable: torch's kernel on the device's autograd key.
    """

    def linear(
        keyset: torch.DispatchKeySet, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        tensors = (x, weight) if bias is None else (x, weight, bias)
        # `linear_backward` has the gradients of a vector of biases and a matrix of real numbers.
        fits = weight.dim() == 2 and (bias is None or bias.dim() < 2) and not weight.is_complex()
        if fits and not is_transformed(*tensors):
            return differentiable(keyset, x, weight, bias)
        return _composite_linear(x, weight, bias)

    return linear


AUTOGRAD_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {"linear": _linear}
"""ATen name -> wrapper of torch's kernel on the device's autograd key."""


# ---- torchvision -----------------------------------------------------------------------------------------------------


operators = torch.ops.torchvision


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """`nms` in float32: a low dtype cannot represent pixel positions."""
    with torch.autocast(DEVICE_TYPE, enabled=False):
        kept: torch.Tensor = operators.nms(_wide(dets), _wide(scores), iou_threshold)
        return kept


def _roi_align(input: torch.Tensor, rois: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`roi_align` in float32, with a result in the dtype of `input`."""
    with torch.autocast(DEVICE_TYPE, enabled=False):
        result: torch.Tensor = operators.roi_align(_wide(input), _wide(rois), *rest)
        return result.to(input.dtype)


AUTOCAST_KERNELS: dict[str, Callable[..., Any]] = {"nms": _nms, "roi_align": _roi_align}
