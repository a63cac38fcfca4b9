"""Recording every operation of autocast regions, not only those with a rule: for `xla_amp.explain`.

While somebody records, each operation that computes has a kernel on the autocast keys that tells the listeners of
`xla_amp.events` and then lets the dispatcher do what it would have done.  Views, which keep their dtype, and composite
operations without a rule, which are nothing but their parts, are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator

import torch

from xla_amp import policy as policies
from xla_amp.pytorch.autocast import cast_kernel, kernel_registry, module_paths, native_dispatch, observer, xla_dispatch

_NOT_OPERATIONS = ("prim", "prims", "debugprims", "rngprims", "profiler", "inductor", "aoti_torch", "c10d", "symm_mem")
"""Namespaces of torch that hold no arithmetic of a model's."""


@dataclasses.dataclass(eq=False, slots=True)
class Recording:
    """What one `start` holds, for `stop`."""

    modules: module_paths.Token
    kernels: dict[str, tuple[str, tuple[str, ...]]]
    """By device type."""


_lock = threading.RLock()
_running: list[Recording] = []


def start() -> Recording:
    """Begins; the first time in a process takes some 0.1 s, later ones some 0.03 s."""
    with _lock:
        recording = Recording(module_paths.acquire(), {})
        _running.append(recording)
        observer.everything += 1
        try:
            for device_type in (*native_dispatch.device_types(), *xla_dispatch.in_use()):
                _follow(recording, device_type)
        except BaseException:
            stop(recording)
            raise
        return recording


def stop(recording: Recording) -> None:
    """Ends what `start` began."""
    with _lock:
        observer.everything -= 1
        _running.remove(recording)
        for held in recording.kernels.values():
            kernel_registry.release(*held)
        module_paths.release(recording.modules)


def _follow(recording: Recording, device_type: str) -> None:
    if device_type in native_dispatch.KEYS:
        key = native_dispatch.KEYS[device_type]
        make = functools.partial(native_dispatch.kernel, device_type)
        recording.kernels[device_type] = key, kernel_registry.acquire(key, _operations(key), make)
    else:
        recording.kernels[device_type] = xla_dispatch.acquire(device_type, _operations(xla_dispatch.KEYS[device_type]))


def _before_region(device_type: str, _region: policies.Region) -> None:
    if _running and device_type in xla_dispatch.KEYS:
        with _lock:
            for recording in _running:
                if device_type not in recording.kernels:
                    _follow(recording, device_type)


policies.on_push(_before_region)


def _operations(key: str) -> Iterator[str]:
    """Operations to record on a dispatch key, as policies name them."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    ruled = frozenset(name.removeprefix("aten::") for name in registered)
    for qualified in torch._C._dispatch_get_all_op_names():
        name = qualified.removeprefix("aten::")
        if name in ruled or _computes(name):
            yield name


@functools.cache
def _computes(name: str) -> bool:
    """Whether the operation makes tensors from tensors by a kernel of its own."""
    if name.partition("::")[0] in _NOT_OPERATIONS:
        return False
    operator = cast_kernel.operator(name)
    if operator is None or torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return False
    schema = operator._schema
    taken = [str(argument.real_type) for argument in schema.arguments if not argument.is_out]
    given = [returned for returned in schema.returns if "Tensor" in str(returned.type)]
    return (
        any("Tensor" in kind for kind in taken)
        and not any("Storage" in kind or "Stream" in kind for kind in taken)
        and len(taken) == len(schema.arguments)
        and bool(given)
        and all(returned.alias_info is None or returned.alias_info.is_write for returned in given)
    )
