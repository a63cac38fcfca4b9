"""Add torch_xla's device to torch.optim's lists of fused and capturable devices.

torch lists the devices that have fused kernels, and those on which an optimizer may count its steps (``capturable``).
XLA is missing in the first, although `amp_kernels` has the kernels.  In the second it is missing for Adadelta and for
``foreach=True``, although those steps read no value.  Without an entry the count is on the host, and a step that may be
skipped waits for the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.optim.optimizer as optimizers

DEVICE_TYPE = "xla"
FUSED, CAPTURABLE = "_get_fused_kernels_supported_devices", "_get_capturable_supported_devices"
"""torch's functions that return the lists; each file of torch.optim has them under its own name."""


@functools.cache
def install() -> None:
    """Adds the device to torch's lists, until the process ends; doing it again does nothing."""
    for name in (FUSED, CAPTURABLE):
        plain: Callable[..., list[str]] = getattr(optimizers, name)

        def with_xla(*args: Any, plain: Callable[..., list[str]] = plain, **kwargs: Any) -> list[str]:
            devices = plain(*args, **kwargs)
            return devices if DEVICE_TYPE in devices else [*devices, DEVICE_TYPE]

        for module in [m for n, m in sys.modules.items() if n.startswith("torch.optim.")]:
            if getattr(module, name, None) == plain:
                setattr(module, name, with_xla)
