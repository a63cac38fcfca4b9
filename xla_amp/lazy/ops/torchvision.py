"""Autocast for torchvision's operators: torchvision registers these rules for CUDA, CPU and XPU only.

The kernels are installed when the device starts, and are called once torchvision has defined its operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

operators = torch.ops.torchvision


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """`nms` in float32: a low dtype cannot represent pixel positions."""
    with torch.autocast(DEVICE_TYPE, enabled=False):
        kept: torch.Tensor = operators.nms(_wide(dets), _wide(scores), iou_threshold)
        return kept


def _roi_align(input: torch.Tensor, rois: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`roi_align` in float32, with a result in the dtype of `input`."""
    with torch.autocast(DEVICE_TYPE, enabled=False):
        result: torch.Tensor = operators.roi_align(_wide(input), _wide(rois), *rest)
        return result.to(input.dtype)


AUTOCAST_KERNELS: dict[str, Callable[..., Any]] = {"nms": _nms, "roi_align": _roi_align}
