"""Rules for arguments that torch's kernels refuse and its meta kernels accept, checked for each new signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Rule(NamedTuple):
    """What an operation refuses."""

    refused: Callable[[Any], bool]
    """Whether these arguments, by name, are refused."""
    message: str
    """With the arguments by name."""
    error: type[Exception] = RuntimeError


_MOST_CATEGORIES = 1 << 24


def _end(a: Any) -> int:
    """Elements of memory that a strided window needs."""
    if 0 in a.size:
        return 0
    last: int = sum((n - 1) * stride for n, stride in zip(a.size, a.stride, strict=True))
    return 1 + last + (a.storage_offset or 0)


def _room(tensor: torch.Tensor) -> int:
    return max(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())


def _rows_differ(a: Any) -> bool:
    if not a.self.dim() or not a.source.dim():
        return bool(a.self.shape != a.source.shape)
    dim = a.dim % a.self.dim()
    shapes = [[n for axis, n in enumerate(x.shape) if axis != dim] for x in (a.self, a.source)]
    return shapes[0] != shapes[1]


def _out_of_bounds(a: Any) -> bool:
    """Whether random integers do not fit; floats only get a warning on the CPU."""
    dtype = a.self.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return False
    info = torch.iinfo(torch.uint8) if dtype is torch.bool else torch.iinfo(dtype)
    least, greatest = info.min, 1 if dtype is torch.bool else info.max
    low, high = getattr(a, "from", 0), getattr(a, "to", None)
    return not least <= low <= greatest or (high is not None and not least <= high - 1 <= greatest)


def _has_boolean(a: Any) -> bool:
    return any(type(x) is bool or getattr(x, "dtype", None) is torch.bool for x in (a.self, a.other))


def _refusal_of_booleans() -> type[Exception]:
    try:
        torch.ones((), dtype=torch.bool) - torch.ones((), dtype=torch.bool)
    except RuntimeError as error:  # in torch 2.15 its subclass NotImplementedError
        return type(error)
    return RuntimeError


_NO_BOOLEANS = (
    Rule(
        _has_boolean,
        "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to invert a mask, use "
        "the `~` or `logical_not()` operator instead.",
        _refusal_of_booleans(),
    ),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "as_strided_scatter": (
        Rule(
            lambda a: _end(a) > _room(a.self),
            "setStorage: sizes {size}, strides {stride} and storage offset {storage_offset} are out of bounds",
        ),
    ),
    "bucketize": (Rule(lambda a: a.boundaries.dim() != 1, "boundaries tensor must be 1 dimension"),),
    "cat": (Rule(lambda a: any(x.dim() == 0 for x in a.tensors), "zero-dimensional tensors cannot be concatenated"),),
    "complex": (
        Rule(
            lambda a: not {a.real.dtype, a.imag.dtype} <= {torch.float16, torch.float32, torch.float64},
            "Expected both inputs to be Half, Float or Double tensors",
        ),
        Rule(lambda a: a.real.dtype is not a.imag.dtype, "complex: expected real and imag to have the same dtype"),
    ),
    "embedding": (Rule(lambda a: a.weight.dim() != 2, "'weight' must be 2-D"),),
    "heaviside": (
        Rule(
            lambda a: a.self.dtype is not a.values.dtype,
            "heaviside is not yet implemented for tensors with different dtypes",
        ),
    ),
    "index_add": (
        Rule(_rows_differ, "source tensor shape must match self tensor shape, excluding the specified dimension"),
    ),
    "linalg_lstsq": (Rule(lambda a: a.self.dim() < 2, "torch.linalg.lstsq: input must have at least 2 dimensions."),),
    "masked_scatter": (Rule(lambda a: a.mask.dtype is not torch.bool, "masked_scatter_ only supports boolean masks"),),
    "multinomial": (
        Rule(
            lambda a: a.self.dim() > 0 and a.self.shape[-1] > _MOST_CATEGORIES,
            "number of categories cannot exceed 2^24",
        ),
    ),
    "nansum": (Rule(lambda a: a.self.is_complex(), "nansum on CPU does not support complex inputs"),),
    "random": (
        Rule(
            lambda a: a.self.is_complex(),
            "check_random_bounds handles only integral, floating-point and boolean types",
        ),
        Rule(_out_of_bounds, "from or to - 1 is out of bounds for the dtype"),
    ),
    "soft_margin_loss": (
        Rule(lambda a: not a.self.is_floating_point(), "result type Float can't be cast to the dtype of the input"),
    ),
    "rsub": _NO_BOOLEANS,
    "sub": _NO_BOOLEANS,
}
"""ATen name without overload -> rules."""


def check(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises what torch raises for these arguments.

    Args:
        name: of the functional form, without overload.

    Raises:
        RuntimeError: a rule refuses them.
    """
    for rule in RULES.get(name, ()):
        if rule.refused(SimpleNamespace(**arguments)):
            raise rule.error(f"{name}: {rule.message.format(**arguments)}")
