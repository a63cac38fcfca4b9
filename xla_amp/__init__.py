"""Automatic mixed precision for XLA.

    >>> import torch, xla_amp
    >>> device = xla_amp.xla_device()
    >>> weight, x = torch.ones(3, 2, device=device), torch.ones(4, 2, device=device)
    >>> with xla_amp.autocast(device):
    ...     torch.nn.functional.linear(x, weight).dtype
    torch.bfloat16

Importing this package loads neither torch nor jax; each name below does when it is first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "DeviceLoader": "xla_amp.pytorch.data.loader",
    "GradScaler": "xla_amp.pytorch.optim.grad_scaler",
    "autocast": "xla_amp.pytorch.autocast.autocast",
    "compilation_cache": "xla_amp.lazy.runtime.compilation_cache",
    "compile": "xla_amp.lazy.capture.api",
    "custom_bwd": "xla_amp.pytorch.autocast.custom_function",
    "custom_fwd": "xla_amp.pytorch.autocast.custom_function",
    "explain": "xla_amp.diagnose.explain",
    "export": "xla_amp.lazy.interop.export",
    "find_overflow": "xla_amp.diagnose.overflow",
    "is_autocast_available": "xla_amp.pytorch.autocast.custom_function",
    "launch": "xla_amp.lazy.distributed.launch",
    "make_mesh": "xla_amp.lazy.distributed.spmd",
    "mark_sharding": "xla_amp.lazy.distributed.spmd",
    "metrics": "xla_amp.backends.base",
    "pad_to_bucket": "xla_amp.pytorch.data.buckets",
    "sync": "xla_amp.backends.base",
    "xla_device": "xla_amp.pytorch.distributed.xla_model",
}
"""Public name -> module that defines it."""

_MODULES = {
    "checkpoint": "xla_amp.lazy.distributed.checkpoint",
    "errors": "xla_amp.errors",
    "jax": "xla_amp.jax",
    "lowering": "xla_amp.lowering",
    "policy": "xla_amp.policy",
    "stablehlo": "xla_amp.stablehlo",
    "syncfree": "xla_amp.pytorch.optim.syncfree",
    "xla_model": "xla_amp.pytorch.distributed.xla_model",
}
"""Public module -> where it is."""

__all__ = ["__version__", *sorted((*_PUBLIC, *_MODULES))]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'xla_amp' has no attribute {name!r}; public names: {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
