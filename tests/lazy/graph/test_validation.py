"""Arguments that torch's kernels refuse and its meta kernels accept are refused on the lazy device too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_amp

LOW = torch.bfloat16


def region():
    return xla_amp.autocast(xla_amp.xla_device(), dtype=LOW)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_convolution_refuses_two_dtypes_outside_a_region(requires_grad):
    device = xla_amp.xla_device()
    x = torch.randn(2, 4, 7, 7, device=device, requires_grad=requires_grad).relu()
    weight = torch.randn(6, 4, 3, 3, device=device)
    with region():
        torch.conv2d(x, weight)  # the same two dtypes, where the region casts them
    with pytest.raises(RuntimeError, match=r"expected input and weight .*same dtype, but input is torch\.float32"):
        torch.conv2d(x, weight.to(LOW))
    with region(), pytest.raises(RuntimeError, match="same dtype"):
        torch.conv2d(x.double(), weight)  # float64 is never cast


def test_batch_norm_of_a_low_dtype_outside_a_region_keeps_it():
    """In a region the same two dtypes, a low input and float32 weights, give float32."""
    torch.manual_seed(2)
    given = torch.randn(5, 6, 7, 7, dtype=LOW)
    found = []
    for norm in (nn.BatchNorm2d(6).to(xla_amp.xla_device()), nn.BatchNorm2d(6)):
        x = given.to(norm.weight.device, copy=True).requires_grad_()
        if not found:
            with region():
                assert norm(x).dtype is torch.float32
            norm.reset_running_stats()
        y = norm(x)
        assert y.dtype is LOW
        (gradient,) = torch.autograd.grad((y.float() ** 3).sum(), x)
        found.append([y.cpu(), gradient.cpu(), norm.running_var.cpu()])
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-8 * other.abs().max().item())


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_batch_norm_names_the_argument_of_the_wrong_size(name):
    device = xla_amp.xla_device()
    norm, x = nn.BatchNorm2d(6).to(device), torch.randn(5, 6, 7, 7, device=device)
    with torch.no_grad():
        setattr(norm, name, None)
        wrong = torch.ones(4, device=device)
        setattr(norm, name, nn.Parameter(wrong) if name in ("weight", "bias") else wrong)
    for context in (region(), torch.no_grad()):
        with context, pytest.raises(RuntimeError, match=f"{name} should contain 6 elements not 4"):
            norm(x)
