"""torchvision's `nms` and `roi_align` on the device.

torchvision's C extension is not needed: where it is missing, the schemas and kernels for the CPU are defined here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_amp
from xla_amp.errors import MissingLoweringError
from xla_amp.testing import counts as counted

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
_library = torch.library.Library("torchvision", "FRAGMENT")
pytestmark = pytest.mark.filterwarnings("ignore:the size of what", "ignore:.*roi_align.* runs on the CPU")


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    assert dets.dtype is scores.dtype is torch.float32
    kept: list[int] = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        low, high = torch.maximum(dets[:, :2], dets[i, :2]), torch.minimum(dets[:, 2:], dets[i, 2:])
        areas, shared = (dets[:, 2:] - dets[:, :2]).prod(1), (high - low).clamp(min=0).prod(1)
        if all(shared[j] / (areas[i] + areas[j] - shared[j]) <= iou_threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def _roi_align(x: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, *_: Any) -> torch.Tensor:
    assert x.dtype is rois.dtype is torch.float32
    return x[rois[:, 0].long()].mean((2, 3), keepdim=True).expand(-1, -1, height, width).contiguous()


@pytest.fixture
def operators(device: torch.device) -> Any:
    """The operators, defined after the device has started, as by a late import."""
    for schema, kernel in zip(SCHEMAS, (_nms, _roi_align), strict=True):
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.torchvision, name):
            _library.define(schema)
            _library.impl(name, kernel, "CPU")
    return torch.ops.torchvision


def test_nms_runs_on_the_host(device: torch.device, operators: Any) -> None:
    """Box i overlaps i + 1 alone, so every second one is kept, by descending score; half types are widened."""
    start = torch.arange(40.0)
    boxes = torch.stack([start, 0 * start, start + 1.5, 0 * start + 1], 1)
    for dtype in (torch.float32, torch.float16):
        for threshold, expected in ((0.1, list(range(0, 40, 2))), (0.9, list(range(40)))):
            given = [(x.to(device) * 1).to(dtype) for x in (boxes, -start)]
            with counted() as counts:
                got = operators.nms(*given, threshold)
            assert (got.dtype, got.device) == (torch.int64, device)
            assert got.tolist() == expected
            assert 1 <= counts.host_syncs <= 2
    empty = operators.nms(torch.zeros(0, 4, device=device), torch.zeros(0, device=device), 0.5)
    assert (empty.shape, empty.dtype, empty.device) == ((0,), torch.int64, device)


def test_roi_align_runs_on_the_cpu_where_that_is_allowed(
    device: torch.device, operators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast casts to float32, as torchvision's own rules do; the result is bfloat16 again."""
    image, rois = sample(device), torch.tensor([[1, 0.0, 0.0, 7.0, 5.0]]).to(device)
    given = rois, 1.0, 2, 2, 2, True
    with pytest.raises(MissingLoweringError, match="XLA_AMP_FALLBACK=cpu"):
        operators.roi_align(image.float(), *given)
    monkeypatch.setenv("XLA_AMP_FALLBACK", "cpu")
    wanted = operators.roi_align(image.float(), *given)
    assert wanted.shape == (1, 3, 2, 2)
    with xla_amp.autocast(device):
        got = operators.roi_align(image, *given)
        kept = operators.nms(rois[:, 1:], image[0, 0, 0, :1], 0.5)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.cpu(), wanted.bfloat16().cpu())
    assert kept.tolist() == [0]


def sample(device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 2, 288).view(2, 3, 8, 6).bfloat16().to(device)
