"""Convolutions and their gradients against torch on the CPU, in every form."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import pytest
import torch
from harness import check, finish, sample, together

from xla_amp.lowering import forms
from xla_amp.lowering.nn import convolution
from xla_amp.lowering.nn import convolution_taps as taps
from xla_amp.lowering.nn.convolution_taps import Geometry

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Case(NamedTuple):
    rank: int = 2
    channels: int = 4
    filters: int = 6
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0

    def arguments(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        """Input, weight, bias and the geometry arguments."""
        x = sample(2, self.channels, *(9, 8, 7)[: self.rank], dtype=dtype)
        if self.transposed:
            shape = (self.channels, self.filters // self.groups)
        else:
            shape = (self.filters, self.channels // self.groups)
        weight = sample(*shape, *[self.kernel] * self.rank, dtype=dtype, low=-1, high=1, seed=1)
        bias = sample(self.filters, dtype=dtype, seed=2)
        spread = [[v] * self.rank for v in (self.stride, self.padding, self.dilation)]
        return x, weight, bias, (*spread, self.transposed, [self.output_padding] * self.rank, self.groups)


CASES = {
    "2d strided dilated": Case(stride=2, dilation=2),
    "grouped": Case(groups=2, stride=2, padding=0),
    "depthwise": Case(groups=4, filters=4),
    "depthwise strided": Case(groups=4, filters=4, stride=2, dilation=2),
    "depthwise over-padded": Case(groups=4, filters=4, padding=3),
    "depthwise times two": Case(groups=4, filters=8, kernel=2, padding=0),
    "pointwise": Case(kernel=1, padding=0),
    "pointwise strided padded": Case(kernel=1, stride=2),
    "transposed grouped": Case(transposed=True, groups=2, stride=2, dilation=2, output_padding=1),
    "transposed depthwise": Case(transposed=True, groups=4, filters=4, stride=2, padding=0),
    "transposed pointwise 1d": Case(transposed=True, rank=1, kernel=1, padding=0),
}

ON_GPU = ("2d strided dilated", "grouped", "depthwise strided", "pointwise", "transposed depthwise")
HALVES = ("2d strided dilated", "grouped", "depthwise", "pointwise", "transposed grouped")


def both_ways(case: Case, dtype: torch.dtype = F64, **options: Any) -> None:
    """A convolution and its gradients as torch's."""
    x, weight, bias, geometry = case.arguments(dtype)
    check("convolution", x, weight, bias, *geometry, **options)
    y = torch.ops.aten.convolution(x, weight, bias, *geometry)
    grad = sample(*y.shape, dtype=dtype, seed=3)
    check("convolution_backward", grad, x, weight, [bias.shape[0]], *geometry, [True] * 3, **options)


def test_as_torch() -> None:
    for name, case in CASES.items():
        both_ways(case)
        if name in ON_GPU:
            both_ways(case, F32, platform="gpu", rtol=1e-5, atol=2e-4)
        if name in HALVES:
            both_ways(case, BF16, wide=True, rtol=2**-8, atol=1e-5)


def test_masked_gradients() -> None:
    x, weight, bias, geometry = Case(rank=1).arguments(F64)
    grad = torch.ones(torch.ops.aten.convolution(x, weight, bias, *geometry).shape, dtype=F64)
    for mask in ([True, False, False], [False, True, False], [False, False, True]):
        check("convolution_backward", grad, x, weight, [6], *geometry, mask)


def form(dtype: str, *weight_shape: int, groups: int = 1, rows: int = 1024) -> str:
    geometry = Geometry.from_torch([1], [0], [1], groups, len(weight_shape) - 2)
    return convolution.form_of(jax.numpy.dtype(dtype), weight_shape, geometry, rows, "cpu").name


def test_choice_of_form() -> None:
    assert form("float32", 64, 64, 3, 3) == "xla, in float32"
    assert form("bfloat16", 64, 64, 3, 3) == "xla, in float32"
    assert form("bfloat16", 128, 128, 3, 3) == "channels_last"
    assert form("bfloat16", 128, 127, 3, 3) == "xla, in float32"
    assert form("bfloat16", 128, 128, 3, 3, groups=2) == "channels_first"
    assert form("bfloat16", 64, 64, 1, 1) == "channels_last"
    assert form("bfloat16", 64, 64, 1, 1, rows=1025) == "channels_first"
    assert form("float32", 256, 256, 3, 3) == "xla, in float32"
    assert form("float32", 64, 64, 1, 1) == "channels_first"
    assert form("float32", 64, 16, 3, 3, groups=4) == "channels_first"
    assert form("float32", 64, 1, 3, 3, groups=64) == "depthwise"
    assert form("float32", 128, 1, 3, 3, groups=64) == "channels_first"


@pytest.mark.parametrize("name", ["channels_first", "channels_last"])
@together("strided", [False, True])
def test_each_form_computes_the_same(monkeypatch: pytest.MonkeyPatch, name: str, strided: bool) -> None:
    # The form depends on the size; force it for small shapes.
    chosen = [dataclasses.replace(row, supports=lambda call: None) for row in convolution.FORMS if row.name == name]
    monkeypatch.setattr(convolution, "FORMS", chosen)
    both_ways(Case(stride=2 if strided else 1, dilation=2 if strided else 1))


def test_channels_last_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "MIN_DOT_CHANNELS", 4)
    x, weight, bias, geometry = Case(channels=8, filters=8).arguments(BF16)
    check("convolution", x, weight, bias, *geometry, wide=True, rtol=2**-8, atol=1e-6)
    finish()
    choice = forms.chosen("convolution")[-1]
    assert (choice.form, choice.call) == (
        "channels_last",
        "8 channels, 8 filters of 3 x 3, 144 elements a channel, bfloat16",
    )
    assert "depthwise" in choice.left_out


def test_a_weight_gradient_copies_rows_of_channels() -> None:
    """Stacked last, the taps would be copied element by element: a third of the speed with 512 channels."""
    geometry = Geometry.from_torch([1], [1], [1], 1, 2)
    grad, x = (jax.ShapeDtypeStruct((2, channels, 5, 5), "bfloat16") for channels in (6, 4))
    gradient = functools.partial(
        taps.weight_gradient, weight_shape=(6, 4, 3, 3), geometry=geometry, form="channels_last"
    )
    stacked = next(
        line for line in jax.jit(gradient).lower(grad, x).as_text().splitlines() if "stablehlo.concat" in line
    )
    assert stacked.endswith("-> tensor<6x9x4xf32>")


def test_output_padding_beyond_the_stride() -> None:
    """torch allows it up to the dilation; no input element contributes to the last elements of the result."""
    x, weight = sample(2, 4, 4, 4, dtype=torch.float64), sample(4, 2, 4, 5, dtype=torch.float64)
    geometry = ([3, 2], [1, 2], [4, 4], True, [2, 3], 2)
    check("convolution", x, weight, sample(4, dtype=torch.float64), *geometry)
    y = torch.ops.aten.convolution(x, weight, None, *geometry)
    check("convolution_backward", sample(*y.shape, dtype=torch.float64, seed=1), x, weight, [4], *geometry, [True] * 3)
