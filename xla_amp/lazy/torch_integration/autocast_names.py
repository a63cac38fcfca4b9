"""`torch.autocast` on the lazy device, under its own name and under torch_xla's.

``torch.autocast("xla")`` is ``torch.autocast("jax")``: a region of either sets torch's state of both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_amp.backends import dynamo
from xla_amp.lazy.programs import pjrt
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import resolve
from xla_amp.policy.load import default_name

NAMES = (DEVICE_TYPE, "xla")
"""What `torch.autocast` calls the lazy device."""


def install() -> None:
    """Replaces the methods of `torch.autocast`; the low dtype of this thread becomes the device's."""
    for method in ("__enter__", "__exit__"):
        setattr(torch.autocast, method, _for_both_names(getattr(torch.autocast, method)))
    low = getattr(torch, resolve(default_name(pjrt.platform())).low)
    for name in NAMES:
        torch.set_autocast_dtype(name, low)


def _for_both_names(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *error: Any) -> Any:
        result = original(self, *error)
        if self.device in NAMES:
            _same_state(self.device)
        return result

    return dynamo.skip(method)


def _same_state(name: str) -> None:
    """Gives both names the autocast state that `name` has in this thread."""
    for other in NAMES:
        if other != name:
            torch.set_autocast_enabled(other, torch.is_autocast_enabled(name))
            torch.set_autocast_dtype(other, torch.get_autocast_dtype(name))
