"""Fourier transforms to an odd size, of no axis and of no element, against torch on the CPU."""

from __future__ import annotations

import torch
from harness import check, run, sample

from xla_amp.lowering.math import fourier  # noqa: F401  (fills the table)


def test_complex_to_an_odd_size():
    # the first coefficient of a real signal has no imaginary part; its value is not read
    for dim in ([1], [2, 0]):
        shape = [3 if axis == dim[-1] else 4 for axis in range(3)]
        check("_fft_c2r", sample(*shape, dtype=torch.complex128), dim, 1, 5)


def test_nothing_to_transform():
    check("_fft_c2c", sample(3, dtype=torch.complex64), [], 2, True)
    none = torch.empty(0, 4, dtype=torch.complex64)  # torch's own library refuses it on the CPU
    assert run("_fft_c2c", none, [1], 2, True)[0].shape == none.shape
