"""Backward passes on a device that was registered after the process's first one.

At the first backward pass autograd starts one thread per device that is registered; nodes of a device that is
registered later fail an internal check.  With multithreading disabled, autograd uses the calling thread.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

_lock = threading.Lock()
_has_thread: bool | None = None


def make_possible(device: torch.device) -> None:
    """Disables autograd's threads for the calling thread if autograd has no thread for `device`."""
    global _has_thread
    with _lock:
        if _has_thread is None:
            _has_thread = _probe(device)
    if not _has_thread:
        torch.autograd.set_multithreading_enabled(False)


def chosen() -> contextlib.AbstractContextManager[Any]:
    """The same inside, for threads that did not ask for the device."""
    return torch.autograd.set_multithreading_enabled(False) if _has_thread is False else contextlib.nullcontext()


class _Nothing(torch.autograd.Function):
    """A node whose backward pass computes nothing, so that the probe records nothing on the device."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> None:
        return None


class _Leave(torch.autograd.Function):
    """A number on the CPU, from which `backward` starts: a gradient that is given imports sympy, for 0.3 s."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        context.device = tensor.device
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device=context.device)


def _probe(device: torch.device) -> bool:
    try:
        with torch.enable_grad():
            probe = torch.empty(0, device=device, requires_grad=True)
            result: torch.Tensor = _Leave.apply(_Nothing.apply(probe))  # type: ignore[no-untyped-call, unused-ignore]
        result.backward()
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True
