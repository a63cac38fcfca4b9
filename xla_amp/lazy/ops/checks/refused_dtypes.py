"""Dtypes that torch's CPU kernels refuse although its meta kernels accept them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from xla_amp.lazy.ops.checks import shape_inference

_INTEGRAL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GROUPS: Mapping[str, tuple[torch.dtype, ...]] = {
    "integral": _INTEGRAL,
    "floating": _FLOATING,
    "complex": (torch.complex64, torch.complex128),
}
ALIASES = {"convolution_overrideable": "convolution"}
"""Our name of an operation -> torch's."""


REFUSED: tuple[tuple[type[Exception], str, str], ...] = (
    (
        NotImplementedError,
        "bool",
        "abs addbmm addcmul addmm addmv baddbmm bmm bucketize convolution dot linalg_cross mm mv pow "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
        "trace vdot",
    ),
    (
        NotImplementedError,
        "bool complex",
        "ceil div.Tensor_mode floor floor_divide fmod geometric kthvalue max_pool2d_with_indices "
        "max_pool3d_with_indices median nanmedian remainder round threshold trunc",
    ),
    (
        NotImplementedError,
        "bool floating complex",
        "bitwise_left_shift bitwise_right_shift gcd lcm",
    ),
    (
        NotImplementedError,
        "bool int16 int32 int64",
        "logcumsumexp",
    ),
    (
        NotImplementedError,
        "bool int8 int16 int32 int64 complex",
        "_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d upsample_bicubic2d "
        "upsample_bilinear2d upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    ),
    (
        NotImplementedError,
        "bool integral",
        "bernoulli.default histogram lerp linalg_householder_product linalg_lu linalg_lu_factor_ex logaddexp normal "
        "silu uniform",
    ),
    (
        NotImplementedError,
        "bool integral complex",
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update _histogramdd_bin_edges "
        "_histogramdd_from_bin_tensors _log_softmax _native_batch_norm_legit _softmax adaptive_max_pool2d "
        "adaptive_max_pool3d binary_cross_entropy_with_logits celu elu frac gelu glu grid_sampler_2d "
        "grid_sampler_3d hardshrink hardsigmoid hardswish huber_loss hypot igamma igammac leaky_relu log_normal "
        "log_sigmoid_forward logaddexp2 mish mse_loss multi_margin_loss multilabel_margin_loss_forward "
        "native_batch_norm native_group_norm native_layer_norm nextafter nll_loss_forward rrelu_with_noise "
        "segment_reduce softplus softshrink upsample_linear1d upsample_trilinear3d",
    ),
    (
        NotImplementedError,
        "bool uint8 int8 int16 int32 complex",
        "avg_pool2d avg_pool3d",
    ),
    (
        NotImplementedError,
        "complex",
        "_prelu_kernel _safe_softmax amax amin aminmax atan2 bernoulli binary_cross_entropy clamp clamp_max "
        "clamp_min copysign cummax cummin digamma erf erfc erfinv fractional_max_pool2d fractional_max_pool3d ge gt "
        "hardtanh hash_tensor i0 le lgamma logit lt mode mvlgamma polygamma relu sign signbit special_airy_ai "
        "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t "
        "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr "
        "special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 "
        "special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr "
        "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 "
        "special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta xlogy",
    ),
    (
        NotImplementedError,
        "floating complex",
        "bitwise_and bitwise_not bitwise_or bitwise_xor",
    ),
    (
        NotImplementedError,
        "int8 int16 int32 int64 complex",
        "smooth_l1_loss",
    ),
    (
        NotImplementedError,
        "integral",
        "im2col linalg_solve_triangular max_pool2d_with_indices_backward max_unpool2d max_unpool3d round.decimals",
    ),
    (
        RuntimeError,
        "bool",
        "hardtanh neg relu rsub soft_margin_loss sub",
    ),
    (
        RuntimeError,
        "bool complex",
        "argmax argmin isin topk",
    ),
    (
        RuntimeError,
        "bool integral",
        "_linalg_solve_ex _linalg_svd addcdiv linalg_matrix_exp linalg_vector_norm mean renorm std std_mean var "
        "var_mean",
    ),
    (
        RuntimeError,
        "bool integral complex",
        "_cdist_forward _embedding_bag_forward_only cauchy complex exponential frexp multinomial polar",
    ),
    (
        RuntimeError,
        "complex",
        "_fft_r2c deg2rad fmax fmin heaviside isneginf isposinf max maximum min minimum nansum normal.Tensor_Tensor "
        "rad2deg sort",
    ),
    (
        RuntimeError,
        "integral",
        "embedding_renorm",
    ),
)
"""(error's class, dtypes, operations), as in torch 2.13.

The dtype is that of the first operand, for pointwise operations the one after promotion.  An operation has its ATen
name, with the overload where overloads differ.  Half types are absent where float32 is computed: XLA computes them
where the CPU's kernels lack them.  tests/lazy/op_db/test_wrong_calls.py compares with the CPU.
"""


OPERANDS = ("self", "other", "exponent")
"""Arguments whose Python numbers take part in promotion."""


class Kernel(NamedTuple):
    """A kernel of the CPU that `refusals` cannot express: another argument, or a form of the operation, decides."""

    argument: str
    """Whose dtype decides; ``dtype`` itself, or a tensor."""
    dtypes: str
    """That it lacks."""
    form: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    """Whether a call with these arguments runs this kernel."""


_NOT_INDEX = "bool uint8 int8 int16 floating complex"
KERNELS: Mapping[str, tuple[Kernel, ...]] = {
    "arange": (Kernel("dtype", "bool complex"),),
    "clamp": (Kernel("self", "bool", lambda a: _all_bool(a["min"], a["max"])),),
    "convolution": (Kernel("input", "uint8 int8 int16 int32", lambda a: a["transposed"]),),
    "cumprod": (Kernel("dtype", "bool"),),
    "cumsum": (Kernel("dtype", "bool"),),
    "histc": (Kernel("self", "bool complex"),),
    "index_reduce": (Kernel("self", "bool complex"),),
    "logcumsumexp": (Kernel("self", "uint8 int8"),),
    "max": (Kernel("self", "complex", lambda a: len(a) == 1),),
    "min": (Kernel("self", "complex", lambda a: len(a) == 1),),
    "normal": tuple(Kernel(name, "bool integral") for name in ("dtype", "mean", "std")),
    "scatter_reduce": (
        Kernel("self", "complex", lambda a: a["reduce"] in ("amax", "amin")),
        Kernel("self", "bool", lambda a: a["reduce"] == "mean"),
    ),
    "smooth_l1_loss": (Kernel("self", "bool uint8"),),
    "tril_indices": (Kernel("dtype", _NOT_INDEX),),
    "triu_indices": (Kernel("dtype", _NOT_INDEX),),
}
"""ATen name without overload -> kernels; histc counts integers, as CUDA does, and models rely on that."""


def _all_bool(*values: Any) -> bool:
    return all(v is None or type(v) is bool or getattr(v, "dtype", None) is torch.bool for v in values)


def _members(words: str) -> Iterator[torch.dtype]:
    for word in words.split():
        yield from GROUPS.get(word) or (getattr(torch, word),)


def _check_kernels(operation: str, arguments: Mapping[str, Any]) -> None:
    for kernel in KERNELS.get(operation, ()):
        value = arguments.get(kernel.argument)
        dtype: torch.dtype | None = value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)
        if dtype is not None and dtype in _members(kernel.dtypes) and kernel.form(arguments):
            raise NotImplementedError(_message(operation, dtype))


@functools.cache
def refusals() -> Mapping[tuple[str, torch.dtype], type[Exception]]:
    """(ATen name, dtype) -> the error's class."""
    return {
        (operation, dtype): error
        for error, dtypes, operations in REFUSED
        for operation in operations.split()
        for dtype in _members(dtypes)
    }


def _message(operation: str, dtype: torch.dtype) -> str:
    base = operation.partition(".")[0]
    other = next(d for d in (torch.float32, torch.int64) if not {(operation, d), (base, d)} & refusals().keys())
    return f"{operation} is not implemented for {dtype}; convert the operands first, for example with .to({other})"


def computing_dtype(operator: Any, arguments: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that decides whether a kernel of torch exists; None without tensors.

    That is the common dtype of the operands of a pointwise operation, and the first tensor's dtype of any other.
    """
    found = list(shape_inference.tensors(arguments.values()))
    if not found:
        return None
    if torch.Tag.pointwise not in operator.tags and "other" not in arguments:  # floor_divide has no tag
        return found[0].dtype
    return shape_inference.common_dtype([*found, *(arguments.get(name) for name in OPERANDS)])


def name_of(operator: Any) -> str:
    """The name in the table: that of the functional form, with overload."""
    name: str = operator._schema.name.partition("::")[2]
    name = name if name.endswith("__") else name.removesuffix("_")
    return f"{ALIASES.get(name, name)}.{operator._schema.overload_name or 'default'}"


def check(operator: Any, arguments: Mapping[str, Any]) -> None:
    """Raises an error of the class that torch's CPU kernel raises for the dtypes of these arguments (without ``out=``).

    Raises:
        NotImplementedError, RuntimeError: torch has no kernel of this operation for the dtype.
    """
    if not operator._schema.name.startswith("aten::"):
        return
    _check_kernels(name_of(operator).partition(".")[0], arguments)
    if arguments.get("dtype") is not None:
        return
    dtype = computing_dtype(operator, arguments)
    if dtype is not None:
        name = name_of(operator)
        refusal = refusals().get((name, dtype)) or refusals().get((name.partition(".")[0], dtype))
        if refusal is not None:
            raise refusal(_message(name, dtype))
