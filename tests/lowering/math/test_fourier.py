"""Fourier transforms against torch on the CPU."""

from __future__ import annotations

import torch
from harness import check, run, sample, together

from xla_amp.lowering.math import fourier  # noqa: F401  (fills the table)

DIMS = [[1], [0, 1], [2, 0], [0, 1, 2, 3]]
normalizations = together("normalization", [0, 1, 2])


@normalizations
@together("size", [4, 5])
@together("dim", DIMS[:3], ids=str)
def test_complex_to_real(dim, size, normalization):
    shape = [2, 3, 4, 5]
    shape[dim[-1]] = size // 2 + 1
    # the first and the middle coefficient of a real signal have no imaginary part; its value is not read
    check("_fft_c2r", sample(*shape, dtype=torch.complex128), dim, normalization, size)


def test_nothing_to_transform():
    check("_fft_c2c", sample(3, dtype=torch.complex64), [], 2, True)
    none = torch.empty(0, 4, dtype=torch.complex64)  # torch's own library refuses it on the CPU
    assert run("_fft_c2c", none, [1], 2, True)[0].shape == none.shape
