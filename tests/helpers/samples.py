"""Arguments for every operation that a built-in policy has a rule for, by exact ATen name.

A row is called with a maker of floating tensors, ``t(2, 3)``, whose values lie between 0.1 and 0.9 with all the bits
that their dtype has; everything else is written out.  It gives positional arguments, in a tuple of which the last may
be a dict of keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Maker:
    """Makes floating tensors on one device, whose dtypes are those of `dtypes` in turn."""

    def __init__(self, device: torch.device | str, dtypes: Sequence[torch.dtype]) -> None:
        self.device = device
        self.dtypes = dtypes
        self.made = 0
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return self.put(torch.rand(shape, generator=self.generator) * 0.8 + 0.1)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """`values` on the device, in the next dtype."""
        self.made += 1
        return values.to(self.dtypes[(self.made - 1) % len(self.dtypes)]).to(self.device)

    def spd(self, size: int) -> torch.Tensor:
        """A symmetric positive definite matrix, well conditioned and with distinct eigenvalues."""
        half = torch.rand(size, size, generator=self.generator) * 0.2
        return self.put(half + half.T + torch.diag(torch.arange(1.0, size + 1) * 1.5))

    def ints(self, *values: Any) -> torch.Tensor:
        return torch.tensor(values).to(self.device)


def arguments(operation: str, t: Maker) -> Arguments:
    """What `operation` is called with."""
    given = SAMPLES[operation](t)
    if given and isinstance(given[-1], dict):
        return given[:-1], given[-1]
    return given, {}


def call(operation: str, given: Arguments) -> Any:
    packet, _, overload = operation.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")(*given[0], **given[1])


Row = Callable[[Maker], tuple[Any, ...]]
SAMPLES: dict[str, Row] = {}


def _rows(names: str, row: Row) -> None:
    for name in names.split():
        if name in SAMPLES:
            raise ValueError(f"{name} has two rows")
        SAMPLES[name] = row


# elementwise, one operand and two
_rows("acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal relu rsqrt sinh tan", lambda t: (t(2, 3),))
_rows("leaky_relu softplus", lambda t: (t(2, 3) - 0.5,))
_rows("add.Scalar sub.Scalar mul.Scalar div.Scalar divide.Scalar true_divide.Scalar", lambda t: (t(2, 3), 1.7))
_rows("div.Scalar_mode divide.Scalar_mode", lambda t: (t(2, 3), 0.07, {"rounding_mode": "floor"}))
_rows("add.Tensor sub.Tensor mul.Tensor div.Tensor divide.Tensor true_divide.Tensor", lambda t: (t(2, 3), t(3)))
_rows("atan2 pow.Tensor_Tensor", lambda t: (t(2, 3), t(2, 3)))
_rows("div.Tensor_mode divide.Tensor_mode", lambda t: (t(2, 3), t(3), {"rounding_mode": "trunc"}))
_rows("addcdiv addcmul", lambda t: (t(2, 3), t(2, 3), t(2, 3), {"value": 0.5}))
_rows("pow.Scalar", lambda t: (1.3, t(2, 3)))
_rows("pow.Tensor_Scalar", lambda t: (t(2, 3), 1.5))
_rows("prelu", lambda t: (t(2, 3) - 0.5, t(3)))
_rows("polar", lambda t: (t(2, 3), t(2, 3)))
_rows("view_as_complex", lambda t: (t(2, 3, 2),))
_rows("fake_quantize_per_tensor_affine", lambda t: (t(2, 3), 0.05, 3, 0, 15))
_rows("dropout feature_dropout", lambda t: (t(4, 6), 0.5, True))

# contractions
_rows("mm matmul", lambda t: (t(3, 4), t(4, 2)))
_rows("bmm", lambda t: (t(2, 3, 4), t(2, 4, 2)))
_rows("mv", lambda t: (t(3, 4), t(4)))
_rows("dot vdot", lambda t: (t(5), t(5)))
_rows("linalg_vecdot", lambda t: (t(2, 5), t(2, 5)))
_rows("addmm _addmm_activation", lambda t: (t(2), t(3, 4), t(4, 2)))
_rows("addmv", lambda t: (t(3), t(3, 4), t(4)))
_rows("addr", lambda t: (t(3, 4), t(3), t(4)))
_rows("addbmm", lambda t: (t(3, 5), t(2, 3, 4), t(2, 4, 5), {"beta": 0.5}))
_rows("baddbmm", lambda t: (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)))
_rows("linear", lambda t: (t(3, 4), t(2, 4), t(2)))
_rows("bilinear", lambda t: (t(3, 4), t(3, 5), t(2, 4, 5), t(2)))
_rows("einsum", lambda t: ("bij,bjk->bik", [t(2, 3, 4), t(2, 4, 5)]))
_rows("chain_matmul linalg_multi_dot", lambda t: ([t(3, 4), t(4, 5), t(5, 2)],))
_rows("tensordot", lambda t: (t(2, 3, 4), t(4, 3, 2), [1, 2], [1, 0]))
_rows("cross", lambda t: (t(4, 3), t(4, 3), 1))
_rows("scaled_dot_product_attention", lambda t: (t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)))
_rows("_scaled_dot_product_flash_attention", lambda t: (t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)))
_rows(
    "_native_multi_head_attention",
    lambda t: (*(t(2, 3, 8) for _ in range(3)), 8, 2, t(24, 8), t(24), t(8, 8), t(8), None, False),
)

# convolutions
_rows("conv1d", lambda t: (t(2, 3, 8), t(4, 3, 3), t(4)))
_rows("conv2d", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), t(4)))
_rows("conv3d", lambda t: (t(1, 2, 4, 4, 4), t(3, 2, 2, 2, 2), t(3)))
_rows("conv1d.padding", lambda t: (t(2, 3, 8), t(4, 3, 3), t(4), [1], "same"))
_rows("conv2d.padding", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), t(4), [1, 1], "same"))
_rows("conv3d.padding", lambda t: (t(1, 2, 4, 4, 4), t(3, 2, 3, 3, 3), t(3), [1, 1, 1], "same"))
_rows("conv_tbc", lambda t: (t(6, 2, 3), t(3, 3, 4), t(4), 1))
_rows("conv_transpose1d", lambda t: (t(2, 3, 5), t(3, 4, 3), t(4)))
_rows("conv_transpose2d.input", lambda t: (t(2, 3, 4, 4), t(3, 4, 3, 3), t(4)))
_rows("conv_transpose3d.input", lambda t: (t(1, 2, 3, 3, 3), t(2, 3, 2, 2, 2), t(3)))
_rows("convolution", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), t(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
_CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, True)
_rows("_convolution", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), t(4), *_CONVOLUTION, True))
_rows("_convolution.deprecated", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), t(4), *_CONVOLUTION))
_rows("_mps_convolution", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), t(4), [0, 0], [1, 1], [1, 1], 1))
_rows("cudnn_convolution", lambda t: (t(2, 3, 6, 6), t(4, 3, 3, 3), [0, 0], [1, 1], [1, 1], 1, False, True, True))
_rows(
    "cudnn_convolution_transpose",
    lambda t: (t(2, 3, 6, 6), t(3, 4, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True),
)


# recurrent: the weights of one layer and direction, and what comes before and after them
def _weights(t: Maker, gates: int) -> list[torch.Tensor]:
    return [t(gates * 4, 3), t(gates * 4, 4), t(gates * 4), t(gates * 4)]


_ONE_LAYER = (True, 1, 0.0, False, False)
_rows("gru.input", lambda t: (t(5, 2, 3), t(1, 2, 4), _weights(t, 3), *_ONE_LAYER, False))
_rows("rnn_tanh.input rnn_relu.input", lambda t: (t(5, 2, 3), t(1, 2, 4), _weights(t, 1), *_ONE_LAYER, False))
_rows("lstm.input", lambda t: (t(5, 2, 3), [t(1, 2, 4), t(1, 2, 4)], _weights(t, 4), *_ONE_LAYER, False))
_BATCHES = torch.tensor([2, 2, 1])  # packed sequences keep their batch sizes on the CPU
_rows("gru.data", lambda t: (t(5, 3), _BATCHES, t(1, 2, 4), _weights(t, 3), *_ONE_LAYER))
_rows("rnn_tanh.data rnn_relu.data", lambda t: (t(5, 3), _BATCHES, t(1, 2, 4), _weights(t, 1), *_ONE_LAYER))
_rows("lstm.data", lambda t: (t(5, 3), _BATCHES, [t(1, 2, 4), t(1, 2, 4)], _weights(t, 4), *_ONE_LAYER))
_rows("gru_cell", lambda t: (t(2, 3), t(2, 4), *_weights(t, 3)))
_rows("rnn_tanh_cell rnn_relu_cell", lambda t: (t(2, 3), t(2, 4), *_weights(t, 1)))
_rows("lstm_cell", lambda t: (t(2, 3), [t(2, 4), t(2, 4)], *_weights(t, 4)))
_rows("_thnn_fused_lstm_cell", lambda t: (t(2, 16), t(2, 16), t(2, 4)))
_rows("_thnn_fused_gru_cell", lambda t: (t(2, 12), t(2, 12), t(2, 4)))
_rows(
    "mkldnn_rnn_layer",
    lambda t: (t(5, 2, 3), *_weights(t, 4), t(1, 2, 4), t(1, 2, 4), False, [], 2, 4, 1, True, False, False, False),
)
_rows(
    "_cudnn_rnn",
    lambda t: (
        (t(5, 2, 3), _weights(t, 4), 4, None, t(1, 2, 4), t(1, 2, 4), 2, 4, 0, 1, False, 0.0, False, False) + ([], None)
    ),
)

# reductions
_rows("sum prod mean", lambda t: (t(3, 4),))
_rows("sum.dim_IntList mean.dim", lambda t: (t(3, 4), [1], True))
_rows("prod.dim_int cumsum cumprod", lambda t: (t(3, 4), 1))
_rows("logsumexp", lambda t: (t(3, 4), [1]))
_rows("norm.Scalar", lambda t: (t(3, 4), 3))
_rows("norm.ScalarOpt_dim", lambda t: (t(3, 4), 2, [1]))
_rows("linalg_vector_norm", lambda t: (t(3, 4), 2, [1]))
_rows("linalg_matrix_norm", lambda t: (t(3, 4), 1))
_rows("linalg_matrix_norm.str_ord nuclear_norm", lambda t: (t(3, 4),))
_rows("frobenius_norm.dim nuclear_norm.dim", lambda t: (t(3, 4), [0, 1]))
_rows("trace", lambda t: (t(4, 4),))
_rows("dist", lambda t: (t(3, 4), t(3, 4), 3))
_rows("cdist", lambda t: (t(3, 4), t(2, 4)))
_rows("pdist", lambda t: (t(4, 3),))
_rows("cosine_similarity", lambda t: (t(3, 4), t(3, 4)))
_rows("renorm", lambda t: (t(3, 4), 2, 0, 0.5))
_rows("quantile nanquantile", lambda t: (t(3, 4), t(2), 1))
_rows("quantile.scalar nanquantile.scalar", lambda t: (t(3, 4), 0.3, 1))
_rows("topk", lambda t: (t(3, 6), 2))

# normalization
_rows("softmax.int log_softmax.int", lambda t: (t(3, 5), 1))
_rows("_softmax", lambda t: (t(3, 5), 1, False))
_rows("layer_norm", lambda t: (t(3, 5), [5], t(5), t(5)))
_rows("native_layer_norm", lambda t: (t(3, 5), [5], t(5), t(5), 1e-5))
_rows("rms_norm", lambda t: (t(3, 5), [5], t(5), 1e-5))
_rows("group_norm", lambda t: (t(2, 4, 3), 2, t(4), t(4)))
_STATISTICS = (True, 0.1, 1e-5, False)
_rows("batch_norm instance_norm", lambda t: (t(4, 3, 2), t(3), t(3), t(3), t(3), *_STATISTICS))

# losses
_rows("mse_loss l1_loss huber_loss smooth_l1_loss", lambda t: (t(3, 4), t(3, 4)))
_rows("soft_margin_loss hinge_embedding_loss", lambda t: (t(4), t.ints(1, -1, -1, 1)))
_rows("binary_cross_entropy binary_cross_entropy_with_logits kl_div", lambda t: (t(3, 4), t(3, 4)))
_rows("poisson_nll_loss", lambda t: (t(3, 4), t(3, 4), True, False, 1e-8, 1))
_rows("cross_entropy_loss nll_loss multi_margin_loss", lambda t: (t(3, 4), t.ints(0, 3, 1)))
_rows("nll_loss2d", lambda t: (t(1, 4, 1, 2), t.ints([[0, 3]])))
_rows("multilabel_margin_loss", lambda t: (t(2, 4), t.ints([3, 0, -1, 1], [1, -1, 0, 0])))
_rows("multilabel_margin_loss_forward", lambda t: (t(2, 4), t.ints([3, 0, -1, 1], [1, -1, 0, 0]), 1))
_rows("margin_ranking_loss", lambda t: (t(4), t(4), t.ints(1, -1, -1, 1)))
_rows("cosine_embedding_loss", lambda t: (t(4, 3), t(4, 3), t.ints(1, -1, -1, 1)))
_rows("triplet_margin_loss", lambda t: (t(4, 3), t(4, 3), t(4, 3)))
_rows("ctc_loss.IntList", lambda t: (-t(6, 2, 5), t.ints([1, 2, 3], [4, 2, 0]), [6, 5], [3, 2]))
_rows("ctc_loss.Tensor", lambda t: (-t(6, 2, 5), t.ints([1, 2, 3], [4, 2, 0]), t.ints(6, 5), t.ints(3, 2)))

# linear algebra
_rows(
    "cholesky cholesky_inverse inverse pinverse linalg_cholesky linalg_cholesky_ex linalg_inv linalg_inv_ex "
    "linalg_cond linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals linalg_svdvals linalg_svd svd linalg_qr qr "
    "linalg_matrix_sqrth geqrf _lu_with_info linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor",
    lambda t: (t.spd(3),),
)
_rows("linalg_cond.p_str", lambda t: (t.spd(3), "fro"))
_rows("linalg_matrix_rank", lambda t: (t.spd(3), 1e-3))
_rows("linalg_matrix_rank.tol_tensor", lambda t: (t.spd(3), t()))
_rows("cholesky_solve", lambda t: (t(3, 2), t.spd(3).tril()))
_rows("linalg_solve", lambda t: (t.spd(3), t(3, 2)))
_rows("triangular_solve", lambda t: (t(3, 2), t.spd(3)))
_rows("linalg_lstsq", lambda t: (t.spd(4)[:, :3], t(4, 2)))
_rows("lu_solve", lambda t: (t(3, 2), t.spd(3), torch.tensor([1, 2, 3], dtype=torch.int32).to(t.device)))
_rows("linalg_householder_product orgqr", lambda t: (t(4, 3), t(3)))
_rows("ormqr", lambda t: (t(4, 3), t(3), t(4, 2)))
_rows("linalg_tensorinv", lambda t: (t.spd(4).reshape(2, 2, 4), 2))
_rows("linalg_tensorsolve", lambda t: (t.spd(4).reshape(4, 2, 2), t(4)))

# fourier
_rows("fft_fft fft_ifft fft_rfft fft_ihfft fft_fftn fft_ifftn fft_rfftn", lambda t: (t(4, 8),))
_rows("fft_irfft fft_hfft fft_irfftn", lambda t: (t(4, 5),))
_rows("fft_fft2 fft_ifft2 fft_rfft2", lambda t: (t(2, 4, 4),))
_rows("fft_irfft2", lambda t: (t(2, 4, 3),))
_rows("stft", lambda t: (t(16), 8, 4, 8, t(8), False, True, True))
_rows("stft.center", lambda t: (t(16), 8, 4, 8, t(8), True, "reflect", False, True, True))

# pooling, interpolation, padding
_rows("max_pool2d", lambda t: (t(1, 2, 6, 6), [2, 2]))
_rows("max_pool3d avg_pool3d", lambda t: (t(1, 2, 4, 4, 4), [2, 2, 2]))
_rows("adaptive_avg_pool3d adaptive_max_pool3d", lambda t: (t(1, 2, 4, 4, 4), [2, 2, 2]))
_rows("fractional_max_pool2d", lambda t: (t(1, 2, 6, 6), [2, 2], [3, 3], t(1, 2, 2)))
_rows("fractional_max_pool3d", lambda t: (t(1, 2, 5, 5, 5), [2, 2, 2], [2, 2, 2], t(1, 2, 3)))
_rows("max_unpool2d", lambda t: (t(1, 1, 2, 2), t.ints([[[[0, 3], [9, 15]]]][0]), [4, 4]))
_rows("max_unpool3d", lambda t: (t(1, 1, 1, 2, 2), t.ints([[[[0, 3], [9, 15]]]]), [2, 4, 4], [2, 2, 2], [0, 0, 0]))
_rows(
    "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback", lambda t: (t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, True)
)
_rows("grid_sampler_3d", lambda t: (t(1, 2, 3, 3, 3), t(1, 2, 2, 2, 3), 0, 0, True))
_rows("reflection_pad1d replication_pad1d", lambda t: (t(1, 2, 5), [1, 2]))
_rows("reflection_pad2d replication_pad2d", lambda t: (t(1, 2, 4, 4), [1, 2, 1, 2]))
_rows("reflection_pad3d replication_pad3d", lambda t: (t(1, 2, 3, 3, 3), [1, 2, 1, 2, 1, 2]))
_rows("upsample_nearest1d _upsample_nearest_exact1d", lambda t: (t(1, 2, 4), [7]))
_rows("upsample_nearest2d _upsample_nearest_exact2d", lambda t: (t(1, 2, 4, 4), [7, 6]))
_rows("upsample_nearest3d _upsample_nearest_exact3d", lambda t: (t(1, 1, 3, 3, 3), [5, 4, 6]))
_rows("upsample_linear1d", lambda t: (t(1, 2, 4), [7], False))
_rows("upsample_bilinear2d upsample_bicubic2d", lambda t: (t(1, 2, 4, 4), [7, 6], True))
_rows("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", lambda t: (t(1, 2, 6, 6), [3, 4], False))
_rows("upsample_trilinear3d", lambda t: (t(1, 1, 3, 3, 3), [5, 4, 6], True))

# data movement and indexing
_rows("cat stack", lambda t: ([t(2, 3), t(2, 3)], 1))
_rows("index_copy", lambda t: (t(4, 3), 0, t.ints(2, 0), t(2, 3)))
_rows("index_put", lambda t: (t(4, 3), [t.ints(2, 0), None], t(2, 3), True))
_rows("scatter_add", lambda t: (t(3, 4), 1, t.ints([0, 1], [2, 2], [1, 3]), t(3, 2)))
_rows("embedding", lambda t: (t(5, 3), t.ints(4, 0, 2)))
_rows("embedding_bag", lambda t: (t(5, 3), t.ints(4, 0, 2, 1), t.ints(0, 2)))
_rows("embedding_bag.padding_idx", lambda t: (t(5, 3), t.ints(4, 0, 2), t.ints(0, 1), False, 0, False, None, False, 2))


class Watch(TorchDispatchMode):
    """Notes what floating tensors are converted to until the first other operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.dtype, torch.dtype]] = []
        self.over = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        converts = function is torch.ops.aten._to_copy.default and kwargs["dtype"].is_floating_point
        self.over = self.over or not converts
        if not self.over:
            self.found.append((args[0].dtype, kwargs["dtype"]))
        if function is torch.ops.aten.mkldnn_rnn_layer.default and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            args = tree_map_only(torch.Tensor, torch.Tensor.float, args)  # oneDNN has it in float32 only on this CPU
        return function(*args, **(kwargs or {}))
