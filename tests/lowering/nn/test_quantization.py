"""Fake quantization against torch on the CPU; scales are powers of two, for which both round the same quotients."""

from __future__ import annotations

import torch
from harness import check, sample, together

from xla_amp.lowering.math import elementwise  # noqa: F401  (fills the table)


@together("dtype", [torch.float32, torch.float64])
def test_of_tensors(dtype):
    x = 4 * sample(5, 7, dtype=dtype)
    check("fake_quantize_per_tensor_affine_cachemask", x, 0.125, 3, 0, 15)
    for on in (0, 1):
        scale, zero = torch.tensor([0.25]), torch.tensor([2], dtype=torch.int32)
        enabled = torch.tensor([on])
        check("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", x, scale, zero, enabled, -8, 7)


@together("axis", [0, 1])
def test_of_channels(axis):
    x = 4 * sample(3, 3, 2, dtype=torch.float32)
    scale, zero = torch.tensor([0.25, 0.5, 0.0625]), torch.tensor([0, 1, -2], dtype=torch.int32)
    check("fake_quantize_per_channel_affine_cachemask", x, scale, zero, axis, -8, 7)
