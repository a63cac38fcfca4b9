"""The operator ``xla_amp::tensor_sums``: sums over tensors' values, on any device.

On the lazy device it is one operation with a lowering; elsewhere it is composed of torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xla_amp.lowering import registry
from xla_amp.lowering.training import statistics

FIELDS = statistics.FIELDS
_NAME = "tensor_sums"


def tensor_sums(
    tensors: Sequence[Tensor],
    groups: Sequence[int],
    zero: float,
    unscale: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """float32 (groups, 7) on the device: the fields of `monitor.history.Sums` of the tensors of each group.

    Args:
        tensors: floating, on one device.
        groups: the group of each tensor, from 0; no group may be empty.
        zero: the largest magnitude that the low dtype rounds to zero.
        unscale: () factor of the values.
        scale: () the loss scale, at which underflow is counted.
    """
    result: Tensor = _operator()(list(tensors), list(groups), zero, unscale, scale)
    return result


@functools.cache
def _operator() -> Any:
    library = torch.library.Library("xla_amp", "FRAGMENT")
    library.define(
        f"{_NAME}(Tensor[] tensors, int[] groups, float zero, Tensor? unscale=None, Tensor? scale=None) -> Tensor"
    )
    library.impl(_NAME, _in_torch, "CompositeExplicitAutograd")
    library.impl(_NAME, _shape, "Meta")
    _libraries.append(library)
    registry.register(f"xla_amp::{_NAME}", override=True)(statistics.tensor_sums)
    return getattr(torch.ops.xla_amp, _NAME).default


_libraries: list[Any] = []
"""torch forgets the operators of a library that is freed."""


def _shape(tensors: Any, groups: Sequence[int], *_: Any) -> Tensor:
    return torch.empty((max(groups) + 1, FIELDS), dtype=torch.float32, device="meta")


def _in_torch(
    tensors: Sequence[Tensor],
    groups: Sequence[int],
    zero: float,
    unscale: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    rows: list[list[Tensor]] = [[] for _ in range(max(groups) + 1)]
    for tensor, group in zip(tensors, groups, strict=True):
        rows[group].append(_sums(tensor, zero, unscale, scale))
    stacked = [torch.stack(each) for each in rows]
    return torch.stack([torch.cat([each[:, :1].amax(0), each[:, 1:].sum(0)]) for each in stacked])


def _sums(tensor: Tensor, zero: float, unscale: Tensor | None, scale: Tensor | None) -> Tensor:
    value = tensor.detach().reshape(-1).to(torch.float32)
    if not value.numel():
        return torch.zeros(FIELDS, device=tensor.device)
    size = (value if unscale is None else value * unscale).abs()
    finite = torch.where(size < float("inf"), size, 0.0)
    scaled = finite if scale is None else finite * scale
    counts = ((finite > 0) & (scaled <= zero), finite > 0, size == float("inf"), size != size)
    largest, squares = finite.amax(0), finite.square().sum()
    return torch.stack(
        [largest, squares, *(c.sum().to(torch.float32) for c in counts), torch.full_like(squares, tensor.numel())]
    )
