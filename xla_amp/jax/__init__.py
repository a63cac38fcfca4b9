"""Mixed precision for JAX functions, optimizers and training steps.

Names are loaded on first use; importing this package loads neither jax nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_amp import public_names as _names

if TYPE_CHECKING:
    # What type checkers and IDEs read. `_PUBLIC` loads the same names at run time, on first use.
    from xla_amp.jax.api import autocast as autocast
    from xla_amp.jax.loss_scale import LossScale as LossScale
    from xla_amp.jax.loss_scale import reduce_gradients as reduce_gradients
    from xla_amp.jax.loss_scale import select as select
    from xla_amp.jax.loss_scale import value_and_grad as value_and_grad
    from xla_amp.jax.optax_wrapper import skip_nonfinite as skip_nonfinite
    from xla_amp.lazy.interop.arrays import from_jax as from_jax
    from xla_amp.lazy.interop.arrays import to_jax as to_jax
    from xla_amp.lazy.interop.functional import functional as functional
    from xla_amp.lazy.interop.torch_function import torch_function as torch_function
    from xla_amp.tools.monitor.on_jax import monitor as monitor
    from xla_amp.tools.monitor.on_jax import statistics as statistics
    from xla_amp.tools.overflow.on_jax import find_overflow as find_overflow
    from xla_amp.tools.search.on_jax import search as search

_PUBLIC = {
    "LossScale": "xla_amp.jax.loss_scale",
    "autocast": "xla_amp.jax.api",
    "find_overflow": "xla_amp.tools.overflow.on_jax",
    "from_jax": "xla_amp.lazy.interop.arrays",
    "functional": "xla_amp.lazy.interop.functional",
    "monitor": "xla_amp.tools.monitor.on_jax",
    "reduce_gradients": "xla_amp.jax.loss_scale",
    "search": "xla_amp.tools.search.on_jax",
    "select": "xla_amp.jax.loss_scale",
    "skip_nonfinite": "xla_amp.jax.optax_wrapper",
    "statistics": "xla_amp.tools.monitor.on_jax",
    "to_jax": "xla_amp.lazy.interop.arrays",
    "torch_function": "xla_amp.lazy.interop.torch_function",
    "value_and_grad": "xla_amp.jax.loss_scale",
}
"""Public name -> module that defines it."""

_NEEDS_TORCH = ("from_jax", "functional", "to_jax", "torch_function")

__all__ = _names.importable(sorted(_PUBLIC), _NEEDS_TORCH)

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> object:
        try:
            return _names.load(__name__, name, _PUBLIC, __all__)
        except ImportError as error:
            from xla_amp.errors import torch_missing

            raise torch_missing(f"xla_amp.jax.{name}", error) from error


def __dir__() -> list[str]:
    return list(__all__)
