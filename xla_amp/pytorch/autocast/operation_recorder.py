"""Record every operation of autocast regions, with or without a rule, for `xla_amp.explain`.

During a recording each operation that computes has a kernel on the autocast keys.  It emits an event
(`xla_amp.common.events`) and then does what the dispatcher would have done.  Views keep their dtype, and composite
operations without a rule are recorded by their parts, so both are left out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch

from xla_amp.policy import regions
from xla_amp.pytorch.autocast import cast_kernel, kernels
from xla_amp.torch_common import module_paths

_NOT_OPERATIONS = ("prim", "prims", "debugprims", "rngprims", "profiler", "inductor", "aoti_torch", "c10d", "symm_mem")
"""Namespaces of torch without the arithmetic of a model."""


_lock = threading.RLock()
_running: dict[contextlib.ExitStack, set[str]] = {}
"""What ends each recording -> the device types whose operations have kernels for it."""


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Records while the block runs.  The first one of a process takes about 0.1 s, later ones about 0.03 s."""
    with contextlib.ExitStack() as undo:
        undo.callback(module_paths.acquire())
        try:
            with _lock:
                if not _running:
                    regions.opening.subscribe(_before_region)
                _running[undo] = set()
                for device_type in (*kernels.device_types(), *kernels.in_use()):
                    _install(undo, device_type)
            yield
        finally:
            with _lock:
                _running.pop(undo, None)
                if not _running:
                    regions.opening.unsubscribe(_before_region)


def _install(undo: contextlib.ExitStack, device_type: str) -> None:
    _running[undo].add(device_type)
    undo.callback(kernels.hold(device_type, _operations(kernels.KEYS[device_type])))


def _before_region(device_type: str, _region: regions.Region) -> None:
    if device_type in kernels.OF_XLA:
        with _lock:
            for undo, installed in _running.items():
                if device_type not in installed:
                    _install(undo, device_type)


def _operations(key: str) -> Iterator[str]:
    """Operations to record on a dispatch key, as policies name them."""
    for qualified in torch._C._dispatch_get_all_op_names():
        name = qualified.removeprefix("aten::")
        operator = cast_kernel.operator(name)
        if operator is not None and (_computes(name) or operator.has_kernel_for_dispatch_key(key)):
            yield name


@functools.cache
def _computes(name: str) -> bool:
    """Whether the operation computes new tensors from tensors in its own kernel."""
    if name.partition("::")[0] in _NOT_OPERATIONS:
        return False
    operator = cast_kernel.operator(name)
    if operator is None or cast_kernel.is_composite(operator):
        return False
    schema = operator._schema
    inputs = [str(argument.real_type) for argument in schema.arguments if not argument.is_out]
    outputs = [returned for returned in schema.returns if "Tensor" in str(returned.type)]
    return (
        any("Tensor" in kind for kind in inputs)
        and not any("Storage" in kind or "Stream" in kind for kind in inputs)
        and len(inputs) == len(schema.arguments)
        and bool(outputs)
        and all(returned.alias_info is None or returned.alias_info.is_write for returned in outputs)
    )
