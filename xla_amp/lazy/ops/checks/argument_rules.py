"""Rules for arguments that torch's kernels refuse and its meta kernels accept, checked for each new signature.

Without them an operation on the lazy device would compute something where every other device raises.  An error has the
class that torch's CPU kernel raises; tests/lazy/op_db/test_wrong_calls.py compares the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from xla_amp.lazy.ops.checks import shape_inference
from xla_amp.lazy.ops.checks.meta_results import RANK_REVEALING

_INTEGRAL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GROUPS: Mapping[str, tuple[torch.dtype, ...]] = {
    "integral": _INTEGRAL,
    "floating": _FLOATING,
    "complex": (torch.complex64, torch.complex128),
}
_PROMOTED = ("self", "other", "exponent")
"""Arguments whose Python numbers take part in promotion."""
_OLD = torch.__version__ < "2.14"
_LACKING: type[Exception] = RuntimeError if _OLD else NotImplementedError
"""What some kernels raise for a dtype that they lack; since torch 2.14 it is what the others raise."""


@dataclasses.dataclass(frozen=True)
class ArgumentRule:
    """What operations expect of their arguments."""

    operations: str
    """ATen names of the functional variants; one without overload is for all overloads that have the arguments."""
    arguments: str
    """Names of what `holds` takes.  ``operands`` is the dtype that decides which kernel runs (`_dtype_of_operands`)."""
    expected: str
    holds: Callable[..., bool]
    error: type[Exception] = RuntimeError

    def check(self, operation: str, values: Sequence[Any]) -> None:
        """Raises `error` if these values of `arguments` do not hold."""
        if not self.holds(*values):
            got = ", ".join(f"{name}={_shown(x)}" for name, x in zip(self.arguments.split(), values, strict=True))
            raise self.error(f"{operation}: expected {self.expected}, but got {got}")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _without(
    dtypes: str, operations: str, arguments: str = "operands", *, error: type[Exception] = NotImplementedError
) -> ArgumentRule:
    """The rule for kernels of the CPU that lack `dtypes`."""
    refused = {dtype for word in dtypes.split() for dtype in _GROUPS.get(word) or (getattr(torch, word),)}
    other = torch.int64 if torch.float32 in refused else torch.float32
    expected = f"a dtype other than {', '.join(dtypes.split())} (convert first, for example with .to({other}))"

    def holds(*values: Any) -> bool:
        dtype = values[0] if isinstance(values[0], torch.dtype) else shape_inference.common_dtype(values)
        return dtype not in refused

    return ArgumentRule(operations, arguments, expected, holds, error)


def _has_dim(x: torch.Tensor, dim: int) -> bool:
    return -max(x.dim(), 1) <= dim < max(x.dim(), 1)


def _one_dtype(*values: torch.Tensor | None) -> bool:
    return len({value.dtype for value in values if isinstance(value, torch.Tensor)}) < 2


def _is_bool(value: Any) -> bool:
    return type(value) is bool or getattr(value, "dtype", None) is torch.bool


def _is_integral(value: Any) -> bool:
    return getattr(value, "dtype", None) in _INTEGRAL


def _positive(values: Any) -> bool:
    return min(values if isinstance(values, (list, tuple)) else [values], default=1) > 0


def _within_memory(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    if 0 in size:
        return True
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + (offset or 0)
    return last < max(x.numel(), x.untyped_storage().nbytes() // x.element_size())


def _same_rows(x: torch.Tensor, dim: int, source: torch.Tensor) -> bool:
    if not x.dim() or not source.dim():
        return x.shape == source.shape
    shapes = [[n for axis, n in enumerate(tensor.shape) if axis != dim % x.dim()] for tensor in (x, source)]
    return shapes[0] == shapes[1]


def _integers_fit(x: torch.Tensor, *integers: int | None) -> bool:
    """Whether an integral or boolean tensor holds them; floating ones round."""
    if not (_is_integral(x) or _is_bool(x)):
        return True
    least, greatest = (0, 1) if _is_bool(x) else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    return all(integer is None or least <= integer <= greatest for integer in integers)


def _has_elements(x: torch.Tensor, dim: Any) -> bool:
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return all(d is None or not x.dim() or not _has_dim(x, d) or x.shape[d] > 0 for d in dims)


def _output_padding_fits(
    transposed: bool, padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> bool:
    return not transposed or all(p < max(s, d) for p, s, d in zip(padding, stride, dilation, strict=False))


def _are_groups(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None) -> bool:
    dims = left.dim(), right.dim()
    return set(dims) <= {2, 3} and (offs is None) == (dims == (3, 3))


def _bounds_fit(x: torch.Tensor, low: int, end: int | None) -> bool:
    return _integers_fit(x, low) and (end is None or (low < end and _integers_fit(x, end - 1)))


RULES: Sequence[ArgumentRule] = (
    # Dimensions: torch looks at them before the dtypes.
    ArgumentRule(
        "_log_softmax _logcumsumexp _softmax cummax cummin index_reduce index_select logcumsumexp max min sort",
        "self dim",
        "a dimension of self",
        _has_dim,
        IndexError,
    ),
    # Dtypes that kernels lack.  Half types are absent where float32 is computed: XLA computes them where the CPU's
    # kernels do not.  histc counts integers, as CUDA does, and models rely on that.
    _without(
        "bool",
        "abs addbmm addcmul addmm addmv baddbmm bmm bucketize convolution dot linalg_cross linear mm mv pow "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
        "trace vdot",
    ),
    _without(
        "bool complex",
        "ceil div.Tensor_mode floor floor_divide fmod geometric histc index_reduce kthvalue "
        "max_pool2d_with_indices max_pool3d_with_indices median nanmedian remainder round threshold trunc",
    ),
    _without("bool floating complex", "bitwise_left_shift bitwise_right_shift gcd lcm"),
    _without(
        "bool int8 int16 int32 int64 complex",
        "_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d upsample_bicubic2d "
        "upsample_bilinear2d upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    ),
    _without(
        "bool integral",
        "bernoulli.default histogram lerp linalg_householder_product linalg_lu linalg_lu_factor_ex logaddexp "
        "logcumsumexp normal silu uniform",
    ),
    _without(
        "bool integral complex",
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update _histogramdd_bin_edges "
        "_histogramdd_from_bin_tensors _log_softmax _native_batch_norm_legit _softmax adaptive_max_pool2d "
        "adaptive_max_pool3d binary_cross_entropy_with_logits elu frac gelu glu grid_sampler_2d "
        "grid_sampler_3d hardshrink hardsigmoid hardswish huber_loss hypot igamma igammac leaky_relu log_normal "
        "log_sigmoid_forward logaddexp2 mish mse_loss multi_margin_loss multilabel_margin_loss_forward "
        "native_batch_norm native_group_norm native_layer_norm nextafter nll_loss_forward rrelu_with_noise "
        "softplus softshrink upsample_linear1d upsample_trilinear3d",
    ),
    _without("bool uint8 int8 int16 int32 complex", "avg_pool2d avg_pool3d"),
    _without(
        "complex",
        "_prelu_kernel _safe_softmax amax amin aminmax atan2 bernoulli binary_cross_entropy clamp clamp_max "
        "clamp_min copysign cummax cummin digamma erf erfc erfinv ge "
        "gt hardtanh hash_tensor i0 le lgamma logit lt max.default min.default mode polygamma random relu "
        "sign signbit special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr "
        "special_modified_bessel_i0 special_modified_bessel_i1 special_ndtri special_xlog1py special_zeta xlogy",
    ),
    _without("floating complex", "bitwise_and bitwise_not bitwise_or bitwise_xor"),
    _without(
        "integral",
        "im2col linalg_solve_triangular max_pool2d_with_indices_backward max_unpool2d max_unpool3d round.decimals",
    ),
    _without("bool", "hardtanh relu soft_margin_loss", error=_LACKING),
    _without("bool complex", "argmax argmin isin topk", error=RuntimeError),
    _without("bool integral", "addcdiv linalg_matrix_exp renorm std std_mean var var_mean", error=RuntimeError),
    _without(
        "bool integral complex",
        "_embedding_bag_forward_only _scaled_dot_product_flash_attention_for_cpu cauchy complex exponential frexp "
        "multinomial polar soft_margin_loss",
        error=RuntimeError,
    ),
    _without(
        "complex",
        "fmax fmin heaviside max maximum min minimum nansum normal.Tensor_Tensor sort",
        error=RuntimeError,
    ),
    _without("complex", "_fft_r2c", error=RuntimeError if _OLD else TypeError),
    _without("integral", "embedding_renorm", error=RuntimeError),
    _without("bfloat16", "complex", error=RuntimeError),
    _without("bfloat16", "_fft_r2c", error=_LACKING),
    _without("bool", "cumprod cumsum", "dtype"),
    _without("bool complex", "arange", "dtype"),
    _without("bool integral", "normal", "dtype"),
    _without("bool integral", "normal", "std"),
    _without("bool integral complex", "smooth_l1_loss", "self target"),
    _without("bool uint8 int8 int16 floating complex", "tril_indices triu_indices", "dtype"),
    _without("bool", "clamp", "self min max"),
    _without(
        "bool int8 int16 int32 floating complex", "nll_loss_forward nll_loss2d_forward", "target", error=RuntimeError
    ),
    ArgumentRule(
        "convolution",
        "input transposed",
        "an input that is floating, complex or int64",
        lambda x, transposed: not transposed or x.dtype is torch.int64 or not _is_integral(x),
        NotImplementedError,
    ),
    ArgumentRule(
        "scatter_reduce",
        "self reduce",
        "a dtype with this reduction",
        lambda x, reduce: reduce not in (("amax", "amin") if x.is_complex() else ("mean",) if _is_bool(x) else ()),
        NotImplementedError,
    ),
    ArgumentRule(
        "rsub sub",
        "self other",
        "operands that are not boolean (invert a mask with ~)",
        lambda *operands: not any(map(_is_bool, operands)),
        NotImplementedError,
    ),
    ArgumentRule("masked_scatter", "mask", "a boolean mask", _is_bool),
    # Dtypes that must agree, because the operation does not promote.
    *(
        ArgumentRule(operations, arguments, f"{' and '.join(arguments.split())} of one dtype", _one_dtype)
        for operations, arguments in (
            ("_grouped_mm bmm mm", "self mat2"),
            ("addbmm baddbmm", "self batch1 batch2"),
            ("addmm", "self mat1 mat2"),
            ("addmv", "self mat vec"),
            ("binary_cross_entropy", "self target"),
            ("complex", "real imag"),
            ("convolution linear", "input weight bias"),
            ("dot", "self tensor"),
            ("heaviside index_put", "self values"),
            ("index_add index_copy", "self source"),
            ("linalg_lstsq", "self b"),
            ("mv", "self vec"),
            ("vdot", "self other"),
        )
    ),
    # Shapes.
    ArgumentRule("cat", "tensors", "tensors with dimensions", lambda tensors: all(x.dim() for x in tensors)),
    ArgumentRule("bucketize", "boundaries", "one dimension", lambda boundaries: boundaries.dim() == 1),
    ArgumentRule("embedding", "weight", "two dimensions", lambda weight: weight.dim() == 2),
    ArgumentRule("linalg_lu linalg_lu_factor_ex", "pivot", "pivot=True, as on the CPU", lambda pivot: pivot),
    ArgumentRule("linalg_lstsq", "self", "two dimensions or more", lambda x: x.dim() >= 2),
    ArgumentRule(
        "linalg_lstsq",
        "self b",
        "as many rows in b as in self",
        lambda x, b: b.shape[x.dim() - 2 : x.dim() - 1] == x.shape[-2:-1],
    ),
    ArgumentRule("multinomial", "self", "one or two dimensions", lambda x: 1 <= x.dim() <= 2),
    ArgumentRule("multinomial", "self", "2^24 categories or fewer", lambda x: x.shape[-1] <= 1 << 24),
    ArgumentRule(
        "multinomial",
        "self num_samples replacement",
        "samples, and without replacement no more than categories",
        lambda x, samples, replacement: samples > 0 and (replacement or samples <= x.shape[-1]),
    ),
    ArgumentRule(
        "as_strided_scatter", "self size stride storage_offset", "a window inside the memory of self", _within_memory
    ),
    ArgumentRule("index_add", "self dim source", "one shape, but for the size of dim", _same_rows),
    ArgumentRule(
        "index_add index_copy index_select",
        "index",
        "an index of one dimension or none",
        lambda index: index.dim() < 2,
        IndexError,
    ),
    ArgumentRule(
        "select_scatter",
        "self src dim index",
        "a src of the shape of self[index] in this dimension",
        lambda x, source, dim, index: source.shape == shape_inference.on_meta(x).select(dim, index).shape,
    ),
    ArgumentRule(
        "slice_scatter",
        "self src dim start end step",
        "a src of the shape of this slice",
        lambda x, source, *window: source.shape == torch.ops.aten.slice(shape_inference.on_meta(x), *window).shape,
    ),
    ArgumentRule(
        "amax amin aminmax argmax argmin kthvalue median mode nanmedian",
        "self dim",
        "elements to reduce",
        _has_elements,
        IndexError,
    ),
    ArgumentRule("max.default min.default", "self", "elements to reduce", lambda x: x.numel() > 0),
    ArgumentRule(
        "argmax argmin", "self dim", "elements to reduce", lambda x, dim: x.numel() > 0 or dim is not None, IndexError
    ),
    *(ArgumentRule("convolution", name, "positive numbers", _positive) for name in ("stride", "dilation", "groups")),
    ArgumentRule("convolution", "padding", "no negative number", lambda padding: min(padding, default=0) >= 0),
    ArgumentRule("convolution", "weight", "a kernel with elements", lambda weight: _positive(weight.shape[2:])),
    ArgumentRule(
        "convolution",
        "transposed output_padding stride dilation",
        "an output padding smaller than the stride or the dilation",
        _output_padding_fits,
    ),
    ArgumentRule(
        "_grouped_mm",
        "self mat2 offs",
        "matrices (2-d) or one for each group (3-d), with offs unless both are 3-d",
        _are_groups,
    ),
    ArgumentRule(
        "_grouped_mm",
        "self mat2",
        "matrices that multiply",
        lambda x, y: x.shape[-1] == y.shape[-2] and (x.dim() + y.dim() < 6 or x.shape[0] == y.shape[0]),
    ),
    ArgumentRule(
        "_histogramdd_bin_edges",
        "self bins",
        "one number of bins for each column",
        lambda x, bins: len(bins) == x.shape[-1],
    ),
    ArgumentRule("_scaled_dot_product_flash_attention_for_cpu", "dropout_p", "0, as on the CPU", lambda p: p == 0),
    # Numbers that are constants of the program; `EACH_CALL` has the others.
    ArgumentRule(
        "linalg_lstsq",
        "driver",
        f"a driver of {', '.join(RANK_REVEALING)} or gels",
        lambda driver: driver in (None, "gels", *RANK_REVEALING),
    ),
    ArgumentRule(
        "pow",
        "self exponent",
        "an exponent that is not negative and that the dtype of self holds",
        lambda x, e: not (_is_integral(x) and type(e) is int) or (e >= 0 and _integers_fit(x, e)),
    ),
    ArgumentRule("random.from", "self from to", "a range of integers that the dtype holds", _bounds_fit),
    ArgumentRule(
        "random.to", "self to", "a range of integers that the dtype holds", lambda x, end: _bounds_fit(x, 0, end)
    ),
)
"""Rows of one operation are checked in this order, those of its overload first."""

_BY_OPERATION: dict[str, list[ArgumentRule]] = {}
for _rule in RULES:
    for _name in _rule.operations.split():
        _BY_OPERATION.setdefault(_name, []).append(_rule)

EACH_CALL = (
    ArgumentRule("bernoulli.p bernoulli_.float", "p", "0 <= p <= 1", lambda p=0.5: 0 <= p <= 1),
    ArgumentRule("cauchy_", "median sigma", "sigma > 0", lambda median=0.0, sigma=1.0: sigma > 0),
    ArgumentRule("exponential_", "lambd", "lambd > 0", lambda rate=1.0: rate > 0),
    ArgumentRule("geometric_", "p", "0 < p < 1", lambda p: 0 < p < 1),
    ArgumentRule("log_normal_", "mean std", "std > 0", lambda mean=1.0, std=2.0: std > 0),
    ArgumentRule("normal.Tensor_float", "std", "std >= 0", lambda std=1.0: std >= 0),
    ArgumentRule("normal_", "mean std", "std >= 0", lambda mean=0.0, std=1.0: std >= 0),
    ArgumentRule("uniform_", "from to", "from <= to", lambda low=0.0, high=1.0: low <= high),
)
"""Rules for numbers that follow the tensor and that are inputs of the program, so they are checked in each call."""

_MUST_FIT: Mapping[str, str] = {
    "_foreach_add.List": "alpha",
    "_foreach_clamp_max.Scalar": "scalar",
    "_foreach_clamp_min.Scalar": "scalar",
    "_foreach_maximum.Scalar": "scalar",
    "_foreach_minimum.Scalar": "scalar",
    "_foreach_pow.Scalar": "exponent",
    "_foreach_sub.List": "alpha",
    "add": "alpha",
    "addr": "alpha beta",
    "clamp": "min max",
    "clamp_max": "max",
    "clamp_min": "min",
    "constant_pad_nd": "value",
    "fill": "value",
    "fill_diagonal": "fill_value",
    "full": "fill_value",
    "full_like": "fill_value",
    "hardshrink": "lambd",
    "hardtanh": "min_val max_val",
    "index_fill": "value",
    "masked_fill": "value",
    "new_full": "fill_value",
    "pow.Scalar": "exponent",
    "pow.Tensor_Scalar": "exponent",
    "rsub": "alpha",
    "scalar_tensor": "s",
    "scatter": "value",
    "sub": "alpha",
    "threshold": "threshold value",
}
"""Operation -> numbers that torch's kernels convert to the dtype of the result, and refuse if it does not hold them.

Other operations convert to float32 for halves (`addcmul`), or round to infinity (`mul`, `where`)."""
SMALL = 128
"""Each dtype holds the numbers from 0 to here, and signed ones their negatives."""

_EXACT_OUT = (
    "addbmm addmm addmv amax amin aminmax baddbmm bmm complex gather index_select kthvalue masked_select max min mm "
    "mode multinomial nonzero sort take topk where"
)
"""Operations whose ``out=`` tensors must have the dtypes of the results; others convert."""


def _dtype_of_operands(operator: Any, arguments: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that decides whether a kernel of torch exists; None without tensors or if ``dtype`` is given.

    That is the common dtype of the operands of a pointwise operation, and the first tensor's dtype of any other.
    """
    found = list(shape_inference.tensors(arguments.values()))
    if not found or arguments.get("dtype") is not None:
        return None
    if torch.Tag.pointwise not in operator.tags and "other" not in arguments:  # floor_divide has no tag
        return found[0].dtype
    return shape_inference.common_dtype([*found, *(arguments.get(name) for name in _PROMOTED)])


def check(operator: Any, arguments: Mapping[str, Any]) -> None:
    """Raises an error of the class that torch's CPU kernel raises for these arguments.

    Args:
        operator: the functional or in-place variant.
        arguments: by name, without ``out``.

    Raises:
        IndexError, NotImplementedError, RuntimeError, TypeError: they break a rule of `RULES`.
    """
    name: str = operator._schema.name.removeprefix("aten::").removesuffix("_overrideable")
    name = name if name.endswith("__") else name.removesuffix("_")
    rules = [
        rule
        for key in (f"{name}.{operator._schema.overload_name or 'default'}", name)
        for rule in _BY_OPERATION.get(key, ())
    ]
    if rules:
        scope = {**arguments, "operands": _dtype_of_operands(operator, arguments)}
        for rule in rules:
            names = rule.arguments.split()
            if all(name in scope for name in names):
                rule.check(name, [scope[name] for name in names])


def must_fit(operator: Any) -> frozenset[str]:
    """The number arguments of `operator` that the dtype of its result must hold."""
    name = operator._schema.name.removeprefix("aten::").removesuffix("_")
    numbers = _MUST_FIT.get(f"{name}.{operator._schema.overload_name}") or _MUST_FIT.get(name, "")
    return frozenset(numbers.split())


def check_fits(number: complex, dtypes: Iterable[torch.dtype], *, elements: int = 2) -> None:
    """Raises torch's error for a number that one of `dtypes` does not hold; torch rounds halves of one element.

    Raises:
        RuntimeError: "value cannot be converted to type ... without overflow".
    """
    for dtype in dtypes:
        small = type(number) is not complex and abs(number) < SMALL and dtype.is_signed
        if not small and not (dtype.is_floating_point and number in (math.inf, -math.inf)):
            torch.empty(elements, dtype=dtype, device="cpu").fill_(number)


def check_out(operation: str, results: Sequence[torch.dtype], outs: Sequence[torch.dtype]) -> None:
    """Raises what torch raises for the dtypes of ``out=`` tensors.

    Args:
        operation: ATen name without overload.
        results: dtypes of what the operation computes.
        outs: dtypes of the tensors to store it in.

    Raises:
        RuntimeError: an operation of `_EXACT_OUT` gets another dtype, or a result cannot be stored in a lower category.
        TypeError: the same for ``cat``.
    """
    for result, out in zip(results, outs, strict=True):
        if not torch.can_cast(result, out) or (operation in _EXACT_OUT.split() and result is not out):
            error = TypeError if operation == "cat" else RuntimeError
            raise error(f"{operation}: expected a tensor that stores its {result}, but got one of {out}")


def check_inplace(functional: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if the result of a pointwise operation cannot be stored in its first operand, as ``int.mul_(0.5)``.

    Raises:
        RuntimeError: the result's dtype is of a higher category.
    """
    (result,) = shape_inference.results(functional, args, kwargs)
    if result is not None:
        check_out(str(functional), [result.dtype], [args[0].dtype])
