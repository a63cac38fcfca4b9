"""Argument checks that torch's kernels make but its meta kernels omit; run once for each new signature.

Without them an operation on the lazy device would compute something where every other device raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_amp.lazy.ops.checks import argument_rules, shape_inference

SAME_DTYPE: Mapping[str, tuple[str, ...]] = {
    "addbmm": ("self", "batch1", "batch2"),
    "addmm": ("self", "mat1", "mat2"),
    "addmv": ("self", "mat", "vec"),
    "baddbmm": ("self", "batch1", "batch2"),
    "binary_cross_entropy": ("self", "target"),
    "bmm": ("self", "mat2"),
    "convolution": ("input", "weight", "bias"),
    "dot": ("self", "tensor"),
    "index_add": ("self", "source"),
    "index_copy": ("self", "source"),
    "index_put": ("self", "values"),
    "linear": ("input", "weight", "bias"),
    "mm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "vdot": ("self", "other"),
}
"""Operation -> arguments that must share one dtype; none of these promotes."""

FLOATING: Mapping[str, str] = {"_log_softmax": "self", "_softmax": "self", "gelu": "self", "silu": "self"}
"""Operation -> argument that must be floating or complex, because the result has its dtype."""

INDEX: Mapping[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "nll_loss2d_forward": ("target", (torch.int64, torch.uint8)),
    "nll_loss_forward": ("target", (torch.int64, torch.uint8)),
}
"""Operation -> (argument, dtypes that it may have)."""

PER_CHANNEL: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("_native_batch_norm_legit", "native_batch_norm"), ("running_mean", "running_var", "weight", "bias")
)
"""Operation -> arguments with one element per channel of ``input``; torch checks them in ``batch_norm``."""

STATISTICS = ("running_mean", "running_var")
"""Those of `PER_CHANNEL` that evaluation mode requires."""

NEEDS_ELEMENTS = ("amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "median", "mode", "nanmedian")
"""Reductions along ``dim`` that have no result for an empty dimension."""

VECTOR_INDEX = ("index_add", "index_copy", "index_fill", "index_select")
"""Operations whose ``index`` has one dimension, or none."""

DIMENSION: Mapping[str, str] = dict.fromkeys(
    (
        "_log_softmax", "_logcumsumexp", "_softmax", "cummax", "cummin", "index_reduce", "index_select", "logcumsumexp",
        "max", "min", "sort",
    ),
    "self",
)  # fmt: skip
"""Operation -> tensor whose dimension is ``dim``; a 0-d tensor counts as one of one dimension."""


EXACT_OUT = frozenset(
    (
        "addbmm", "addmm", "addmv", "amax", "amin", "aminmax", "baddbmm", "bmm", "complex", "gather", "index_select",
        "kthvalue", "masked_select", "max", "min", "mm", "mode", "multinomial", "nonzero", "sort", "take", "topk",
        "where",
    )
)  # fmt: skip
"""Operations whose ``out=`` tensors must have the dtypes of the results; others convert."""


def check_dimension(dim: int, rank: int) -> None:
    """Raises torch's error for a dimension that a tensor of `rank` dimensions does not have.

    Raises:
        IndexError: naming the legal range.
    """
    room = max(rank, 1)
    if not -room <= dim < room:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-room}, {room - 1}], but got {dim})")


def check_dim(operation: str, arguments: Mapping[str, Any]) -> None:
    """Raises for a ``dim`` that the tensor of `DIMENSION` does not have; torch looks at it before the dtypes.

    Raises:
        IndexError: naming the legal range.
    """
    name = operation.removesuffix("_")
    if name in DIMENSION and "dim" in arguments:
        check_dimension(arguments["dim"], arguments[DIMENSION[name]].dim())


def _check_window(name: str, arguments: Mapping[str, Any]) -> None:
    shape, dim = arguments["self"].shape, arguments["dim"]
    check_dimension(dim, len(shape))
    if name == "select_scatter":
        index, size = arguments["index"], shape[dim]
        if not -size <= index < size:
            raise IndexError(
                f"select(): index {index} out of range for tensor of size {list(shape)} at dimension {dim}"
            )
        window = [extent for axis, extent in enumerate(shape) if axis != dim % len(shape)]
    else:
        window = list(shape)
        window[dim] = len(range(*slice(arguments["start"], arguments["end"], arguments["step"]).indices(shape[dim])))
    if list(arguments["src"].shape) != window:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(arguments['src'].shape)}, "
            f"slice size = {window}"
        )


def _check_convolution(arguments: Mapping[str, Any]) -> None:
    kernel = list(arguments["weight"].shape[2:])
    stride, dilation, padding = (list(arguments[key]) for key in ("stride", "dilation", "padding"))
    if min(padding, default=0) < 0:
        raise RuntimeError(f"negative padding is not supported, but got {padding}")
    if min(stride, default=1) <= 0:
        raise RuntimeError(f"non-positive stride is not supported, but got {stride}")
    if min(dilation, default=1) <= 0:
        raise RuntimeError(f"dilation should be greater than zero, but got {dilation}")
    if arguments["groups"] <= 0:
        raise RuntimeError(f"non-positive groups is not supported, but got {arguments['groups']}")
    if min(kernel, default=1) <= 0:
        raise RuntimeError(f"kernel size should be greater than zero, but got {kernel}")
    extra = list(arguments["output_padding"])
    if arguments["transposed"] and any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=False)):
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, but got {extra}, {stride} and {dilation}"
        )


def _check_multinomial(arguments: Mapping[str, Any]) -> None:
    weights, count = arguments["self"], arguments["num_samples"]
    if not 1 <= weights.dim() <= 2:
        raise RuntimeError(f"prob_dist must be 1 or 2 dim, but got {list(weights.shape)}")
    if count <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples, but got {count}")
    if not arguments.get("replacement") and count > weights.shape[-1]:
        raise RuntimeError(
            f"cannot sample n_sample > prob_dist.size(-1) samples without replacement, but got {count} and "
            f"{weights.shape[-1]}"
        )


def check_out(operation: str, results: Sequence[torch.dtype], outs: Sequence[torch.dtype]) -> None:
    """Raises what torch raises for the dtypes of ``out=`` tensors.

    Args:
        operation: ATen name without overload.
        results: dtypes of what the operation computes.
        outs: dtypes of the tensors to store it in.

    Raises:
        RuntimeError: an operation of `EXACT_OUT` gets another dtype, or a result cannot be stored in a lower category.
        TypeError: the same for ``cat``.
    """
    for result, out in zip(results, outs, strict=True):
        if operation in EXACT_OUT and result is not out:
            raise RuntimeError(f"{operation}: expected out tensor to have dtype {result}, but got {out} instead")
        if not torch.can_cast(result, out):
            kind = TypeError if operation == "cat" else RuntimeError
            raise kind(f"{operation}: result type {result} can't be cast to the desired output type {out}")


def check_inplace(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if the result of a pointwise operation cannot be stored in its first operand, as ``int.mul_(0.5)``.

    Raises:
        RuntimeError: the result's dtype is of a higher category.
    """
    schema = operator._schema
    packet = getattr(torch.ops.aten, schema.name.partition("::")[2].removesuffix("_"), None)
    functional = getattr(packet, schema.overload_name or "default", None)
    if functional is None:
        return
    (result,) = shape_inference.results(functional, args, kwargs)
    if result is not None and not torch.can_cast(result.dtype, args[0].dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {args[0].dtype}")


def check(operation: str, arguments: Mapping[str, Any]) -> None:
    """Raises what torch raises for these arguments.

    Args:
        operation: ATen name without overload; the in-place form counts as the functional one.

    Raises:
        RuntimeError: dtypes or sizes do not match.
    """
    name = operation.removesuffix("_")
    argument_rules.check(name, arguments)
    if name in SAME_DTYPE:
        tensors = {key: arguments.get(key) for key in SAME_DTYPE[name]}
        dtypes = {key: value.dtype for key, value in tensors.items() if isinstance(value, torch.Tensor)}
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{key} is {dtype}" for key, dtype in dtypes.items())
            raise RuntimeError(f"{operation}: expected {' and '.join(dtypes)} to have the same dtype, but {found}")
    if name in ("convolution", "convolution_overrideable"):
        _check_convolution(arguments)
    if name == "multinomial":
        _check_multinomial(arguments)
    if name in ("select_scatter", "slice_scatter"):
        _check_window(name, arguments)
    if name in FLOATING:
        dtype = arguments[FLOATING[name]].dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            raise NotImplementedError(f'"{operation}" not implemented for {dtype}: convert to a floating dtype first')
    if name in INDEX:
        key, legal = INDEX[name]
        dtype = arguments[key].dtype
        if dtype not in legal:
            raise RuntimeError(f"{operation}: expected {key} to be {' or '.join(map(str, legal))}, but got {dtype}")
    for key in PER_CHANNEL.get(name, ()):
        channels, value = arguments["input"].shape[1], arguments[key]
        if value is None and key in STATISTICS and not arguments["training"]:
            raise RuntimeError(f"{key} must be defined in evaluation mode")
        if value is not None and value.numel() != channels:
            raise RuntimeError(f"{key} should contain {channels} elements not {value.numel()}")
    if name in NEEDS_ELEMENTS:
        _require_elements(name, arguments["self"], arguments.get("dim"))
    index = arguments.get("index")
    if name in VECTOR_INDEX and isinstance(index, torch.Tensor) and index.dim() > 1:
        raise IndexError(f"{operation}: expected index to be a vector, but got {list(index.shape)}")
    if name == "pow":
        base, exponent = arguments.get("self"), arguments.get("exponent")
        negative = isinstance(exponent, (int, float)) and not isinstance(exponent, bool) and exponent < 0
        if negative and isinstance(exponent, int) and isinstance(base, torch.Tensor) and _is_integral(base):
            raise RuntimeError(f"{operation}: integers to negative integer powers ({exponent}) are not allowed")
        integral = isinstance(base, torch.Tensor) and _is_integral(base)
        if integral and type(exponent) is int and exponent > torch.iinfo(arguments["self"].dtype).max:
            raise RuntimeError(
                f"value cannot be converted to type {arguments['self'].dtype} without overflow: {exponent}"
            )


def _require_elements(name: str, x: torch.Tensor, dim: Any) -> None:
    for d in dim if isinstance(dim, (list, tuple)) else (dim,):
        if isinstance(d, int) and x.dim() and -x.dim() <= d < x.dim() and not x.shape[d]:
            raise IndexError(f"{name}(): Expected reduction dim {d % x.dim()} to have non-zero size.")
    if name in ("argmax", "argmin") and dim is None and not x.numel():
        raise IndexError(f"{name}(): Expected reduction dim to be specified for input.numel() == 0.")


def _is_integral(x: torch.Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)
