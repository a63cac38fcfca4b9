"""Mixed precision for JAX functions, optimizers and training steps.

Names are loaded when they are first used; importing this package loads no JAX.
"""

import importlib
from typing import Any

_PUBLIC = {
    "LossScale": "xla_amp.jax.loss_scale",
    "ScaledGradients": "xla_amp.jax.loss_scale",
    "SkipNonfiniteState": "xla_amp.jax.skip_nonfinite",
    "TorchFunction": "xla_amp.lazy.interop.functional",
    "all_finite": "xla_amp.jax.loss_scale",
    "autocast": "xla_amp.jax.autocast",
    "from_jax": "xla_amp.lazy.interop.arrays",
    "from_torch": "xla_amp.lazy.interop.arrays",
    "functional": "xla_amp.lazy.interop.functional",
    "select": "xla_amp.jax.loss_scale",
    "skip_nonfinite": "xla_amp.jax.skip_nonfinite",
    "to_jax": "xla_amp.lazy.interop.arrays",
    "torch_function": "xla_amp.lazy.interop.torch_function",
    "value_and_grad": "xla_amp.jax.loss_scale",
}
"""Public name -> module that defines it."""

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xla_amp.jax' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
