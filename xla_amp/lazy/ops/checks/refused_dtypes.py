"""Dtypes that torch's CPU kernels refuse although its meta kernels accept them: the rows of ``refused_dtypes.toml``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

import torch

from xla_amp.lazy.ops.checks import shape_inference

_ERRORS: Mapping[str, type[Exception]] = {"NotImplementedError": NotImplementedError, "RuntimeError": RuntimeError}
_INTEGRAL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GROUPS: Mapping[str, tuple[torch.dtype, ...]] = {
    "integral": _INTEGRAL,
    "floating": _FLOATING,
    "complex": (torch.complex64, torch.complex128),
}
NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
"""dtype -> its name in torch's messages."""
ALIASES = {"convolution_overrideable": "convolution"}
"""Our name of an operation -> torch's."""


OPERANDS = ("self", "other", "exponent")
"""Arguments whose Python numbers take part in promotion."""


class Refusal(NamedTuple):
    """The error of an operation for a dtype."""

    error: type[Exception]
    message: str


class Kernel(NamedTuple):
    """A kernel of the CPU that `refusals` cannot express: another argument, or a form of the operation, decides."""

    argument: str
    """Whose dtype decides; ``dtype`` itself, or a tensor."""
    dtypes: str
    """That it lacks."""
    name: str
    """In torch's message."""
    form: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    """Whether a call with these arguments runs this kernel."""


_NOT_INDEX = "bool uint8 int8 int16 floating complex"
KERNELS: Mapping[str, tuple[Kernel, ...]] = {
    "arange": (Kernel("dtype", "bool complex", "arange_cpu"),),
    "clamp": (Kernel("self", "bool", "clamp_cpu", lambda a: _all_bool(a["min"], a["max"])),),
    "convolution": (
        Kernel("input", "uint8 int8 int16 int32", "slow_conv_transpose2d_out_cpu", lambda a: a["transposed"]),
    ),
    "cumprod": (Kernel("dtype", "bool", "cumprod_out_cpu"),),
    "cumsum": (Kernel("dtype", "bool", "cumsum_out_cpu"),),
    "histc": (Kernel("self", "bool complex", "histogram_cpu"),),
    "index_reduce": (Kernel("self", "bool complex", "index_func_"),),
    "logcumsumexp": (Kernel("self", "uint8 int8", "logcumsumexp_out_cpu"),),
    "max": (Kernel("self", "complex", "max_all", lambda a: len(a) == 1),),
    "min": (Kernel("self", "complex", "min_all", lambda a: len(a) == 1),),
    "normal": tuple(Kernel(name, "bool integral", "normal_kernel_cpu") for name in ("dtype", "mean", "std")),
    "scatter_reduce": (
        Kernel("self", "complex", "scatter_gather_tensor_cpu_reduce_amax", lambda a: a["reduce"] in ("amax", "amin")),
        Kernel("self", "bool", "scatter_gather_tensor_cpu_reduce_mean", lambda a: a["reduce"] == "mean"),
    ),
    "smooth_l1_loss": (Kernel("self", "bool uint8", "smooth_l1_cpu"),),
    "tril_indices": (Kernel("dtype", _NOT_INDEX, "tril_indices"),),
    "triu_indices": (Kernel("dtype", _NOT_INDEX, "triu_indices"),),
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
            raise NotImplementedError(f"\"{kernel.name}\" not implemented for '{NAMES[dtype]}'")


@functools.cache
def refusals() -> Mapping[tuple[str, torch.dtype], Refusal]:
    """(ATen name, dtype) -> the error."""
    rows: dict[tuple[str, torch.dtype], Refusal] = {}
    text = resources.files(__package__).joinpath("refused_dtypes.toml").read_text("utf-8")
    for operation, dtypes, error, message in tomllib.loads(text)["refused"]:
        for dtype in _members(dtypes):
            rows[operation, dtype] = Refusal(_ERRORS[error], message.replace("{}", NAMES[dtype]))
    return rows


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
    """Raises what torch's CPU kernel raises for the dtypes of these arguments (without ``out=``).

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
            raise refusal.error(refusal.message)
