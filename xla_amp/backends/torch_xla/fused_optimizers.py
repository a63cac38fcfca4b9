"""What torch.optim must know of torch_xla's device so that an optimizer's step stays on it.

torch keeps lists of the devices that have fused kernels and of those on which steps are counted.  XLA is not in the
first, though `torch_xla_kernels` has the kernels; and in the second not for every optimizer: for Adadelta and for
``foreach=True`` torch asks without XLA, though nothing in those steps reads a value.  Without an entry the count is on
the host, and a step that may be skipped waits for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.optim.optimizer as optimizers

DEVICE_TYPE = "xla"
FUSED, CAPTURABLE = "_get_fused_kernels_supported_devices", "_get_capturable_supported_devices"
"""torch's functions that return the lists; each file of torch.optim has them under its own name."""

_replaced: list[tuple[Any, str, Callable[..., list[str]]]] = []


def install() -> None:
    """Adds the device to torch's lists, until the process ends or `uninstall`; doing it again does nothing."""
    if _replaced:
        return
    for name in (FUSED, CAPTURABLE):
        plain: Callable[..., list[str]] = getattr(optimizers, name)

        def with_xla(*args: Any, plain: Callable[..., list[str]] = plain, **kwargs: Any) -> list[str]:
            devices = plain(*args, **kwargs)
            return devices if DEVICE_TYPE in devices else [*devices, DEVICE_TYPE]

        for module in [m for n, m in sys.modules.items() if n.startswith("torch.optim.")]:
            if getattr(module, name, None) == plain:
                setattr(module, name, with_xla)
                _replaced.append((module, name, plain))


def uninstall() -> None:
    """Gives torch its lists back."""
    while _replaced:
        module, name, plain = _replaced.pop()
        setattr(module, name, plain)
