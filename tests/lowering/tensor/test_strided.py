"""Windows of a flat buffer against `torch.as_strided` on the CPU, which needs no tolerance: values are only moved."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xla_amp.lowering import Permuted
from xla_amp.lowering.tensor import strided

Window = tuple[tuple[int, ...], tuple[int, ...], int]


def _as_array(x: jax.Array | Permuted) -> jax.Array:
    return x.materialize() if isinstance(x, Permuted) else x


def _check(cases: Sequence[tuple[tuple[int, ...], Window]]) -> None:
    """Reads every window of its buffer and, if no two elements overlap, writes it; one executable for all."""
    bases = [_buffer(shape) for shape, _ in cases]
    windows = [window for _, window in cases]
    news = [
        None if _overlaps(window) else -1 - torch.arange(math.prod(window[0]), dtype=torch.int32).reshape(window[0])
        for window in windows
    ]

    def run(bases: list[jax.Array], news: list[jax.Array | None]) -> list[tuple[jax.Array, jax.Array | None]]:
        return [
            (_as_array(strided.read(base, *window)), None if new is None else strided.write(base, new, *window))
            for base, new, window in zip(bases, news, windows, strict=True)
        ]

    results = jax.jit(run)([b.numpy() for b in bases], [None if n is None else n.numpy() for n in news])
    for base, new, window, (read, written) in zip(bases, news, windows, results, strict=True):
        where = f"{window} of {tuple(base.shape)}"
        expected = base.as_strided(*window).numpy()
        assert read.shape == expected.shape
        np.testing.assert_array_equal(np.asarray(read), expected, err_msg=f"read {where}")
        if new is not None:
            changed = base.clone()
            changed.as_strided(*window).copy_(new)
            assert written.dtype == base.numpy().dtype
            np.testing.assert_array_equal(np.asarray(written), changed.numpy(), err_msg=f"write {where}")


def _last(window: Window) -> int:
    shape, strides, offset = window
    return offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _overlaps(window: Window) -> bool:
    """Whether two elements of the window overlap (found by listing them all)."""
    positions = torch.arange(_last(window) + 1).as_strided(*window).flatten().tolist()
    return len(set(positions)) != len(positions)


def _of_numbers(generator: random.Random) -> tuple[tuple[int, ...], Window]:
    """Sizes, strides and offset: overlapping, indivisible, broadcast.  Those of views are in tests/lazy/tensors."""
    rank = generator.randint(0, 4)
    shape = tuple(generator.choice((1, 1, 2, 3, 4)) for _ in range(rank))
    strides = tuple(generator.choice((0, 1, 2, 3, 4, 6, 8, 12)) for _ in range(rank))
    window = shape, strides, generator.randrange(7)
    return (_last(window) + 1 + generator.randrange(5),), window


def _buffer(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)


def test_windows_of_any_numbers() -> None:
    """They reach gathers, broadcasts and padding."""
    generator = random.Random(0)
    numbers = [_of_numbers(generator) for _ in range(200)]
    _check(numbers)
    assert sum(_overlaps(window) for _, window in numbers) > 40
    assert sum(strided.factored(math.prod(shape), *window) is None for shape, window in numbers) > 40
    assert sum(any(s == 0 and e > 1 for e, s in zip(*window[:2], strict=True)) for _, window in numbers) > 20


@pytest.mark.parametrize(
    ("window", "permutation"),
    [(((3, 2), (1, 3), 0), (1, 0)), (((1, 3, 2), (0, 1, 3), 0), (0, 2, 1)), (((2, 2), (1, 3), 1), (1, 0))],
)
def test_a_pure_transpose_stays_pending(window: Window, permutation: tuple[int, ...]) -> None:
    got = strided.read(jnp.arange(6).reshape(2, 3), *window)
    assert isinstance(got, Permuted)
    assert got.permutation == permutation
    assert got.shape == window[0]
