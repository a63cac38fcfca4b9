"""`torch.autocast` on the lazy device, under its own name and under torch_xla's.

``torch.autocast("xla")`` is ``torch.autocast("jax")``: a region of either sets torch's state of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_amp.lazy.programs import pjrt
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import resolve
from xla_amp.policy.load import default_name

NAMES = (DEVICE_TYPE, "xla")
"""What `torch.autocast` calls the lazy device."""


def set_low_dtype() -> None:
    """The low dtype of this thread becomes the device's, under both names."""
    low = getattr(torch, resolve(default_name(pjrt.platform())).low)
    for name in NAMES:
        torch.set_autocast_dtype(name, low)


def for_both_names(original: Callable[..., Any], self: Any, *error: Any) -> Any:
    """A method of `torch.autocast` that begins or ends a region: both names get the state of the one that it has."""
    result = original(self, *error)
    for name in NAMES if self.device in NAMES else ():
        torch.set_autocast_enabled(name, torch.is_autocast_enabled(self.device))
        torch.set_autocast_dtype(name, torch.get_autocast_dtype(self.device))
    return result
