"""torchvision's `nms` and `roi_align` on the device, against loops over boxes and samples written here.

torchvision's C extension is not needed: where it is missing, the operators' schemas and autograd are defined here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import xla_amp
from xla_amp.testing import counts as counted

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
)
_library = torch.library.Library("torchvision", "FRAGMENT")


@pytest.fixture
def operators(device: torch.device) -> Any:
    """The operators, defined after the device has started, as by a late import."""
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            _library.define(schema)
    return torch.ops.torchvision


# -- nms --------------------------------------------------------------------------------------------------------------


def nms(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    left: list[int] = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept: list[int] = []
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for i in left:
        low, high = np.maximum(boxes[:, :2], boxes[i, :2]), np.minimum(boxes[:, 2:], boxes[i, 2:])
        shared = np.maximum(high - low, 0).prod(1)
        if all(shared[j] / (areas[i] + areas[j] - shared[j]) <= threshold for j in kept):
            kept.append(i)
    return kept


def random_boxes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=random) * 10
    boxes = torch.cat([corner, corner + torch.rand(count, 2, generator=random) * 6 + 0.5], 1)
    return boxes, torch.randint(20, (count,), generator=random) / 20  # with ties


@pytest.mark.filterwarnings("ignore:the size of what")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_nms(device: torch.device, operators: Any, dtype: torch.dtype) -> None:
    for seed, threshold in enumerate((0.0, 0.1, 0.3, 0.5, 0.7, 1.0)):
        boxes, scores = (x.to(dtype) for x in random_boxes(60, seed))
        expected = nms(boxes.double().numpy(), scores.double().numpy(), threshold)
        got = operators.nms(boxes.to(device), scores.to(device), threshold)
        assert got.dtype is torch.int64
        assert got.tolist() == expected


@pytest.mark.filterwarnings("ignore:the size of what")
def test_a_chain_of_overlaps_is_decided_in_order(device: torch.device, operators: Any) -> None:
    """Box i overlaps i + 1 alone, so every second one is kept; another threshold is no other program."""
    start = torch.arange(40.0)
    boxes = torch.stack([start, 0 * start, start + 1.5, 0 * start + 1], 1)
    got = operators.nms(boxes.to(device), -start.to(device), 0.1)
    assert got.tolist() == list(range(0, 40, 2))
    with counted() as counts:
        got = operators.nms(boxes.to(device), -start.to(device), 0.9)
    assert got.tolist() == list(range(40))
    assert counts.compilations == 0


def test_nms_of_nothing_and_wrong_arguments(device: torch.device, operators: Any) -> None:
    empty = operators.nms(torch.zeros(0, 4, device=device), torch.zeros(0, device=device), 0.5)
    assert (empty.shape, empty.dtype, empty.device.type) == ((0,), torch.int64, "jax")
    for boxes, scores in (((3, 4), (2,)), ((3, 5), (3,)), ((4,), (4,))):
        with pytest.raises(RuntimeError, match="nms: expected floating boxes"):
            operators.nms(torch.zeros(boxes, device=device), torch.zeros(scores, device=device), 0.5)


# -- roi_align --------------------------------------------------------------------------------------------------------


def roi_align(image: torch.Tensor, rois: torch.Tensor, scale: float, bins: int, ratio: int, aligned: bool) -> Any:
    """With loops over regions, bins and samples; differentiable."""
    height, width = image.shape[2:]
    offset = 0.5 if aligned else 0.0
    regions = []
    for row in rois.tolist():
        pixels = image[int(row[0])]
        left, top, right, bottom = (edge * scale - offset for edge in row[1:])
        sizes = (bottom - top, right - left)
        size_y, size_x = (max(size, 1.0) / bins if not aligned else size / bins for size in sizes)
        rows, columns = (ratio if ratio > 0 else math.ceil(size) for size in (size_y, size_x))
        values = []
        for py in range(bins):
            for px in range(bins):
                total = torch.zeros(image.shape[1], dtype=image.dtype)
                for iy in range(rows):
                    for ix in range(columns):
                        y = top + py * size_y + (iy + 0.5) * size_y / rows
                        x = left + px * size_x + (ix + 0.5) * size_x / columns
                        if not (-1 <= y <= height and -1 <= x <= width):
                            continue
                        y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
                        low_y, low_x = int(y), int(x)
                        high_y, high_x = min(low_y + 1, height - 1), min(low_x + 1, width - 1)
                        b, a = y - low_y, x - low_x
                        total = total + (1 - b) * (1 - a) * pixels[:, low_y, low_x]
                        total = total + (1 - b) * a * pixels[:, low_y, high_x]
                        total = total + b * (1 - a) * pixels[:, high_y, low_x] + b * a * pixels[:, high_y, high_x]
                values.append(total / max(rows * columns, 1))
        regions.append(torch.stack(values, 1).reshape(-1, bins, bins))
    return torch.stack(regions)


ROIS = torch.tensor(
    [
        [0, 0.0, 0.0, 7.0, 5.0],
        [1, 2.3, 1.7, 9.1, 14.2],
        [0, -6.0, -3.0, 30.0, 21.0],  # larger than the image
        [1, 3.0, 3.0, 3.2, 3.1],
        [0, 100.0, 100.0, 120.0, 130.0],  # outside
    ]
)


class RoiAlign(torch.autograd.Function):
    """As torchvision registers it."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, rois: torch.Tensor, *rest: Any) -> torch.Tensor:
        ctx.save_for_backward(rois)
        ctx.shape, ctx.rest = image.shape, rest
        return torch.ops.torchvision.roi_align(image, rois, *rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        scale, height, width, ratio, aligned = ctx.rest
        backward = torch.ops.torchvision._roi_align_backward
        return backward(grad, *ctx.saved_tensors, scale, height, width, *ctx.shape, ratio, aligned), *[None] * 6


@pytest.mark.parametrize("ratio", [2, -1])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align(device: torch.device, operators: Any, ratio: int, aligned: bool) -> None:
    image = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(function: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = image.clone().requires_grad_()
        result = function(image)
        (result * weights.to(result.device)).sum().backward()
        assert image.grad is not None
        return result.detach().cpu(), image.grad.cpu()

    expected = run(lambda x: roi_align(x, ROIS.double(), 0.5, 2, ratio, aligned), image)
    rois = ROIS.double().to(device)
    got = run(lambda x: RoiAlign.apply(x, rois, 0.5, 2, 2, ratio, aligned), image.to(device))
    torch.testing.assert_close(got, expected)


def test_regions_that_are_not_numbers_give_zeros_in_time(device: torch.device, operators: Any) -> None:
    rois = torch.tensor([[0, 0.0, 0.0, math.inf, 4.0], [0, 0.0, 0.0, 1e12, 1e12], [0, math.nan, 0.0, 1.0, 1.0]])
    image = torch.ones(1, 1, 4, 4)
    got = operators.roi_align(image.to(device), rois.to(device), 1.0, 2, 2, -1, True)
    assert got[0].tolist() == [[[0, 0], [0, 0]]]
    assert got[1].abs().max() < 1e-6  # a few samples of very many


@pytest.mark.filterwarnings("ignore:the size of what")
def test_autocast_casts_to_float32(device: torch.device, operators: Any) -> None:
    """As torchvision's own rules do: features are bfloat16 and boxes float32, the result is bfloat16 again."""
    image = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = roi_align(image.double(), ROIS, 1.0, 2, 2, True)
    boxes, scores = random_boxes(20, 0)
    with xla_amp.autocast(device):
        got = operators.roi_align(image.to(device), ROIS.to(device), 1.0, 2, 2, 2, True)
        kept = operators.nms(boxes.to(device), scores.bfloat16().to(device), 0.5)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2**-8, atol=1e-6)
    assert kept.tolist() == nms(boxes.numpy(), scores.bfloat16().float().numpy(), 0.5)
    with pytest.raises(RuntimeError, match="input and rois of one dtype"):
        operators.roi_align(image.to(device), ROIS.to(device), 1.0, 2, 2, 2, True)
