"""Shapes and dtypes of an operation's results, from torch's own meta kernels (run once per instruction)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from xla_amp.lazy.graph.trace import Spec, spec
from xla_amp.lazy.ops.checks.meta_results import SHAPES


def on_meta(value: Any) -> Any:
    """An argument with its tensors and devices moved to ``meta``; generators dropped."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(on_meta(item) for item in value)
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def has_meta_kernel(operator: Any) -> bool:
    """Whether torch can run `operator` without data."""
    try:
        torch.library.get_kernel(operator, "Meta")
    except RuntimeError:
        return False
    return True


def results(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Spec | None, ...]:
    """Specs of what `operator` returns; raises what torch raises for arguments that do not fit."""
    shapes = SHAPES.get(operator, operator)
    returned = shapes(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()})
    return tuple(
        None if tensor is None else spec(tuple(tensor.shape), tensor.dtype)
        for tensor in (returned if isinstance(returned, (tuple, list)) else (returned,))
    )


_NUMBERS: dict[type, Any] = {bool: lambda: torch.bool, int: lambda: torch.int64, float: torch.get_default_dtype}


def _rank(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _flatten(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value


def tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The tensors among `values` and the lists in it."""
    return (value for value in _flatten(values) if isinstance(value, torch.Tensor))


def common_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """The dtype that torch's promotion gives for all tensors and numbers among `values`.

    Tensors with dimensions beat 0-d tensors, which beat Python numbers, unless the lower one is of a higher category.
    Source: ``at::native::result_type`` (TypeProperties.cpp); ``torch.result_type`` offers it for two operands only.
    """
    tiers: list[torch.dtype | None] = [None, None, None]
    for value in _flatten(values):
        if isinstance(value, torch.Tensor):
            tier, dtype = (0 if value.dim() else 1), value.dtype
        elif type(value) in _NUMBERS:
            tier, dtype = 2, _NUMBERS[type(value)]()
        elif isinstance(value, complex):
            tier, dtype = 2, torch.complex128 if torch.get_default_dtype() is torch.float64 else torch.complex64
        else:
            continue
        held = tiers[tier]
        tiers[tier] = dtype if held is None else torch.promote_types(held, dtype)
    result: torch.dtype | None = None
    for dtype in filter(None, tiers):
        if result is None:
            result = dtype
        elif _rank(dtype) > _rank(result):
            result = torch.promote_types(result, dtype)
    return result
