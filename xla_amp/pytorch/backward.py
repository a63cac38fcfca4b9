"""Backward passes on a device that PyTorch learnt of after its first backward pass.

At the first backward pass of a process autograd starts one thread per device that exists then, once and for all; work
for a device that came later fails an internal check.  Without those threads autograd works on the calling thread.
"""

from __future__ import annotations

import threading

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


def _probe(device: torch.device) -> bool:
    leaf = torch.empty(0, device=device, requires_grad=True)
    try:
        leaf.backward(torch.empty(0, device=device))
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True
