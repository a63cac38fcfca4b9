"""Fourier transforms against torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from harness import check, run, sample

from xla_amp.lowering.math import fourier  # noqa: F401  (fills the table)

DIMS = [[1], [0, 1], [2, 0], [0, 1, 2, 3]]
normalizations = pytest.mark.parametrize("normalization", [0, 1, 2])


@normalizations
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_complex(dim, normalization):
    x = sample(2, 3, 4, 5, dtype=torch.complex128)
    check("_fft_c2c", x, dim, normalization, normalization != 1)
    if len(dim) == 1:
        check("_fft_c2c", x.to(torch.complex64), dim, normalization, normalization == 1)


@normalizations
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_real_to_complex(dim, normalization):
    x = sample(2, 3, 4, 5, dtype=torch.float64)
    check("_fft_r2c", x, dim, normalization, normalization == 1)
    if len(dim) == 1:
        check("_fft_r2c", x.float(), dim, normalization, True)


@normalizations
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("dim", DIMS[:3], ids=str)
def test_complex_to_real(dim, size, normalization):
    shape = [2, 3, 4, 5]
    shape[dim[-1]] = size // 2 + 1
    # the first and the middle coefficient of a real signal have no imaginary part; its value is not read
    check("_fft_c2r", sample(*shape, dtype=torch.complex128), dim, normalization, size)


def test_nothing_to_transform():
    check("_fft_c2c", sample(3, dtype=torch.complex64), [], 2, True)
    none = torch.empty(0, 4, dtype=torch.complex64)  # torch's own library refuses it on the CPU
    assert run("_fft_c2c", none, [1], 2, True, like=[none])[0].shape == none.shape
