"""Backward passes on a device that PyTorch learnt of after its first backward pass.

At the first backward pass of a process autograd starts one thread per device that exists then, once and for all; work
for a device that came later fails an internal check.  Without those threads autograd works on the calling thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_lock = threading.Lock()
_has_thread: bool | None = None


def make_possible(device: torch.device) -> None:
    """Has this thread run backward passes itself if autograd has no thread for `device`."""
    global _has_thread
    with _lock:
        if _has_thread is None:
            _has_thread = _probe(device)
    if not _has_thread:
        torch.autograd.set_multithreading_enabled(False)


class _Nothing(torch.autograd.Function):
    """A node whose backward pass computes nothing, so that asking records nothing on the device."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> None:
        return None


def _probe(device: torch.device) -> bool:
    try:
        with torch.enable_grad():
            result = _Nothing.apply(torch.empty(0, device=device, requires_grad=True))
        result.backward(torch.empty(0, device=device))
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True
