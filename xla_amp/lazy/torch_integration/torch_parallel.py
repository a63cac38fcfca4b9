"""torch's wrappers for several devices, given a module on the lazy device: they work, or are refused at the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from xla_amp.common import config, events
from xla_amp.errors import DeviceError
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_PINNED = ("find_unused_parameters", "static_graph")
"""Arguments for which torch's class counts in pinned memory."""
WITHOUT_DDP = (
    "leave DistributedDataParallel out, call xla_model.broadcast_master_param(model) once, and "
    "xla_model.reduce_gradients(optimizer) before each step of the optimizer"
)
_LOW = (torch.bfloat16, torch.float16)


def data_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """torch's constructor of DistributedDataParallel: device indices of CUDA scripts become this process's device.

    Raises:
        DeviceError: another device, or an argument that torch's class cannot follow here.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments
    parameter = next(given["module"].parameters(), None) if isinstance(given["module"], torch.nn.Module) else None
    if parameter is not None and parameter.device.type == DEVICE_TYPE:
        for name in _PINNED:
            if given.get(name):
                raise DeviceError(
                    f"torch's DistributedDataParallel({name}=True) needs pinned memory, which the lazy XLA device "
                    f"does not have: {WITHOUT_DDP}, which takes parameters without gradients"
                )
        if given.get("mixed_precision") is not None:
            raise DeviceError(
                "DistributedDataParallel(mixed_precision=...) needs streams, which the lazy XLA device does not "
                "have: run the forward pass in xla_amp.autocast"
            )
        for name in ("device_ids", "output_device"):
            if name in given:
                given[name] = _here(name, given[name])
        _warn_of_low_sums(given["module"])
    original(*bound.args, **bound.kwargs)


def replicated(original: Callable[..., None], self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """torch's constructor of DataParallel: with one device it runs the module where that is, as without GPUs."""
    if torch.cuda.is_available():
        return original(self, module, *args, **kwargs)
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, []


def _warn_of_low_sums(module: torch.nn.Module) -> None:
    """Warns where torch's reducer would add gradients in 16 bits."""
    low = next((p for p in module.parameters() if p.requires_grad and p.dtype in _LOW), None)
    if low is not None:
        events.warn(
            f"torch's DistributedDataParallel adds gradients of {low.dtype} in {low.dtype}; {WITHOUT_DDP}, which adds "
            "them in float32"
        )


def _here(name: str, value: Any) -> Any:
    """`value` with this process's only device in place of its index among those of its host."""
    if value is None:
        return None
    for each in value if isinstance(value, list | tuple) else [value]:
        index = each if isinstance(each, int) else torch.device(each).index or 0
        if index not in (0, config.local_rank()):
            raise DeviceError(
                f"DistributedDataParallel({name}={value!r}): this process has one lazy XLA device, 'jax:0'; leave "
                f"{name} out"
            )
    return [0] * len(value) if isinstance(value, list | tuple) else 0


def device_mesh(original: Callable[..., None], self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """torch's constructor of a DeviceMesh.

    Raises:
        DeviceError: a mesh of the lazy device.
    """
    if device_type == DEVICE_TYPE:
        raise DeviceError(
            "torch's DeviceMesh, and so fully_shard, distribute_tensor and tensor parallelism, do not split "
            "tensors of the lazy XLA device: use xla_amp.shard(model, xla_amp.make_mesh({'data': 8}), 'fsdp'); for "
            "whole replicas in several processes DistributedDataParallel"
        )
    original(self, device_type, *args, **kwargs)
