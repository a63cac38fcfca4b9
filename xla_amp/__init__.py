"""Automatic mixed precision for XLA.

    >>> import torch, xla_amp
    >>> device = xla_amp.xla_device()
    >>> weight, x = torch.ones(3, 2, device=device), torch.ones(4, 2, device=device)
    >>> with xla_amp.autocast(device):
    ...     torch.nn.functional.linear(x, weight).dtype
    torch.bfloat16

Importing this package loads neither torch nor jax; each name below does when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from xla_amp import engines as _engines
from xla_amp import public_names as _names

if TYPE_CHECKING:
    # What type checkers and IDEs read. `_PUBLIC` and `_MODULES` load the same names at run time, on first use.
    from xla_amp import checkpoint as checkpoint
    from xla_amp import errors as errors
    from xla_amp import integrations as integrations
    from xla_amp import jax as jax
    from xla_amp import lowering as lowering
    from xla_amp import policy as policy
    from xla_amp import stablehlo as stablehlo
    from xla_amp import syncfree as syncfree
    from xla_amp import testing as testing
    from xla_amp import torch_xla as torch_xla
    from xla_amp import xla_model as xla_model
    from xla_amp.engines.base import metrics as metrics
    from xla_amp.engines.base import sync as sync
    from xla_amp.lazy.capture.compiled_step import compile as compile
    from xla_amp.lazy.interop.export import export as export
    from xla_amp.lazy.layouts.recipes import shard as shard
    from xla_amp.lazy.layouts.spmd import full_tensor as full_tensor
    from xla_amp.lazy.layouts.spmd import global_batch as global_batch
    from xla_amp.lazy.layouts.spmd import make_mesh as make_mesh
    from xla_amp.lazy.layouts.spmd import mark_sharding as mark_sharding
    from xla_amp.lazy.processes.launch import launch as launch
    from xla_amp.lazy.programs.compilation_cache import compilation_cache as compilation_cache
    from xla_amp.pytorch.autocast.autocast import autocast as autocast
    from xla_amp.pytorch.autocast.custom_function import custom_bwd as custom_bwd
    from xla_amp.pytorch.autocast.custom_function import custom_fwd as custom_fwd
    from xla_amp.pytorch.autocast.custom_function import is_autocast_available as is_autocast_available
    from xla_amp.pytorch.data.buckets import pad_batch as pad_batch
    from xla_amp.pytorch.data.buckets import pad_to_bucket as pad_to_bucket
    from xla_amp.pytorch.data.loader import DeviceLoader as DeviceLoader
    from xla_amp.pytorch.device import xla_device as xla_device
    from xla_amp.pytorch.optim.grad_scaler import GradScaler as GradScaler
    from xla_amp.tools.explain.on_pytorch import explain as explain
    from xla_amp.tools.monitor.on_pytorch import monitor as monitor
    from xla_amp.tools.overflow.on_pytorch import find_overflow as find_overflow
    from xla_amp.tools.search.on_pytorch import search as search

__version__ = "0.4.0"
_engines.choose.subscribe(lambda wanted: importlib.import_module("xla_amp.engine_choice").choose(wanted))

_PUBLIC = {
    "DeviceLoader": "xla_amp.pytorch.data.loader",
    "GradScaler": "xla_amp.pytorch.optim.grad_scaler",
    "autocast": "xla_amp.pytorch.autocast.autocast",
    "compilation_cache": "xla_amp.lazy.programs.compilation_cache",
    "compile": "xla_amp.lazy.capture.compiled_step",
    "custom_bwd": "xla_amp.pytorch.autocast.custom_function",
    "custom_fwd": "xla_amp.pytorch.autocast.custom_function",
    "explain": "xla_amp.tools.explain.on_pytorch",
    "export": "xla_amp.lazy.interop.export",
    "find_overflow": "xla_amp.tools.overflow.on_pytorch",
    "full_tensor": "xla_amp.lazy.layouts.spmd",
    "global_batch": "xla_amp.lazy.layouts.spmd",
    "is_autocast_available": "xla_amp.pytorch.autocast.custom_function",
    "launch": "xla_amp.lazy.processes.launch",
    "make_mesh": "xla_amp.lazy.layouts.spmd",
    "mark_sharding": "xla_amp.lazy.layouts.spmd",
    "metrics": "xla_amp.engines.base",
    "monitor": "xla_amp.tools.monitor.on_pytorch",
    "pad_batch": "xla_amp.pytorch.data.buckets",
    "pad_to_bucket": "xla_amp.pytorch.data.buckets",
    "search": "xla_amp.tools.search.on_pytorch",
    "shard": "xla_amp.lazy.layouts.recipes",
    "sync": "xla_amp.engines.base",
    "xla_device": "xla_amp.pytorch.device",
}
"""Public name -> module that defines it."""

_MODULES = {
    "checkpoint": "xla_amp.checkpoint",
    "errors": "xla_amp.errors",
    "integrations": "xla_amp.integrations",
    "jax": "xla_amp.jax",
    "lowering": "xla_amp.lowering",
    "policy": "xla_amp.policy",
    "stablehlo": "xla_amp.stablehlo",
    "syncfree": "xla_amp.syncfree",
    "testing": "xla_amp.testing",
    "torch_xla": "xla_amp.torch_xla",
    "xla_model": "xla_amp.xla_model",
}
"""Public module -> its full name."""

_WITHOUT_TORCH = ("errors", "explain", "integrations", "jax", "lowering", "policy", "stablehlo")
"""Public names that need no PyTorch."""

_ALSO_FOR_JAX = ("autocast", "find_overflow", "monitor", "search")
"""Public names that `xla_amp.jax` has, too."""

__all__ = ["__version__", *sorted((*_PUBLIC, *_MODULES))]
__all__ = _names.importable(__all__, (_PUBLIC | _MODULES).keys() - _WITHOUT_TORCH)

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> object:
        try:
            return _names.load(__name__, name, _PUBLIC | _MODULES, __all__)
        except ImportError as error:
            from xla_amp.errors import torch_missing

            jax_name = f"xla_amp.jax.{name}" if name in _ALSO_FOR_JAX else None
            raise torch_missing(f"xla_amp.{name}", error, jax_name) from error


def __dir__() -> list[str]:
    return list(__all__)
