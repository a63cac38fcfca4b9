"""Shapes and strides of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Row-major strides of `shape`, in elements."""
    return [math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape))]
