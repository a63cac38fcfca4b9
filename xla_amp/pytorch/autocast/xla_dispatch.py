"""Autocast kernels on the XLA device's autocast key: one for each operation that the policy has a rule for.

On the lazy device no other library uses the key, so kernels stay installed after their first use.  On torch_xla's
device they replace torch_xla's kernels, so they are installed only while a region of `xla_amp.autocast` is open.
Threads without such a region have torch_xla's kernels meanwhile.

The kernels are made by `xla_amp.pytorch.autocast.cast_kernel`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp import policy as policies
from xla_amp.engines import devices
from xla_amp.policy import Policy, op_catalog, regions
from xla_amp.policy.load import default_name
from xla_amp.pytorch.autocast import cast_kernel

KEYS: Mapping[str, str] = MappingProxyType({"jax": "AutocastPrivateUse1", "xla": "AutocastXLA"})
"""Device type -> dispatch key."""

SHARED_KEYS = frozenset({"xla"})
"""Device types whose key has kernels of another library, which are restored when our regions close."""

_lock = threading.RLock()
_libraries: dict[tuple[str, str], torch.library.Library] = {}
_installed: dict[str, set[str]] = {}
_complete: dict[str, set[Policy]] = {}
"""Policies with all their kernels installed, by device type."""
_newest: dict[str, Policy] = {}
"""The last policy of `_complete` that was installed: a region usually has the policy of the one before it."""
_held: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
"""Kernels held on a shared key, by ``id`` of an open region; a region that is open twice has two entries."""


def install_defaults() -> None:
    """Installs the kernels of the XLA device's own policy and makes its low dtype torch's default there.

    From then on `torch.autocast` on that device casts by our rules.  torch keeps the low dtype per thread; the calling
    thread's is set.  `xla_device()` calls this on the lazy device, which has no other autocast kernels.  On torch_xla
    only the user calls it.
    """
    engine = devices.engine()
    engine.device()
    rules = _without_region()
    install(rules, engine.DEVICE_TYPE)
    torch.set_autocast_dtype(engine.DEVICE_TYPE, getattr(torch, rules.low))


def make_ready() -> None:
    """Starts the XLA device, and on the lazy device installs the autocast kernels."""
    engine = devices.engine()
    if engine.DEVICE_TYPE in SHARED_KEYS:
        engine.device()
    else:
        install_defaults()


def install(policy: Policy, device_type: str) -> None:
    """Installs a kernel on `device_type` for every operation of `policy`; again it costs a lookup.

    Operations of libraries that are not imported are left out until the policy is used again after the import.
    """
    if _newest.get(device_type) is policy:
        return
    if policy in _complete.get(device_type, ()):
        _newest[device_type] = policy
        return
    with _lock:
        key = KEYS[device_type]
        installed = _installed.setdefault(device_type, set())
        if ("_", key) not in _libraries:
            with contextlib.suppress(RuntimeError):  # the key has a fallback
                _library("_", key).fallback(torch.library.fallthrough_kernel)
        missing = False
        for name in sorted(_needed_operations(policy, device_type) - installed):
            operator = cast_kernel.operator(name)
            if operator is None:
                missing = missing or "::" in name
                continue
            namespace, _, bare = name.rpartition("::")
            kernel = _kernel(device_type, name, operator)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # ours replaces a cast that a library has registered
                _library(namespace or "aten", key).impl(bare, kernel, with_keyset=True, allow_override=True)
            installed.add(name)
        if not missing:
            _complete.setdefault(device_type, set()).add(policy)
            _newest[device_type] = policy


def acquire(device_type: str, operations: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Holds kernels for more operations, until `cast_kernel.release` gets what this returns."""
    key = KEYS[device_type]
    _foreign_operations(device_type)  # cached before ours are installed
    more = sorted(frozenset(operations) - _installed.get(device_type, set()))
    return key, cast_kernel.acquire(key, more, functools.partial(_kernel, device_type))


def in_use() -> list[str]:
    """Device types that regions have been opened on."""
    return list(_installed)


def _kernel(device_type: str, name: str, operator: Any) -> cast_kernel.Kernel:
    if device_type in SHARED_KEYS:
        return _kernel_on_shared_key(device_type, name)
    key = KEYS[device_type]
    rules = cast_kernel.region_rules(device_type, _without_region)
    ours = cast_kernel.is_installed(key, name)
    return cast_kernel.make(name, operator, device_type, key, rules, ("keep", False), keep_kernel=not ours)


@functools.cache
def _kernel_on_shared_key(device_type: str, name: str) -> cast_kernel.Kernel:
    """Calls our kernel inside our regions and the other library's kernel elsewhere.

    Made once, before our kernel is installed; regions open in every step.
    """
    key, operator = KEYS[device_type], cast_kernel.operator(name)
    rules = cast_kernel.region_rules(device_type, _without_region)
    theirs = cast_kernel.present_kernel(operator, device_type, key)
    ours = cast_kernel.make(
        name,
        operator,
        device_type,
        key,
        rules,
        ("keep", False),
        keep_kernel=name not in _foreign_operations(device_type),
    )
    current = regions.current

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = theirs if current(device_type) is None and device_type not in _complete else ours
        return chosen(keyset, *args, **kwargs)

    return kernel


@functools.cache
def _foreign_operations(device_type: str) -> frozenset[str]:
    """ATen operations that another library casts on the device; without a rule of our policy they must not be cast."""
    if device_type not in SHARED_KEYS:
        return frozenset()
    names = (name.removeprefix("aten::") for name in _registered() if name.startswith("aten::"))
    key = KEYS[device_type]
    return frozenset(
        name for name in names if (op := cast_kernel.operator(name)) is not None and op.has_kernel_for_dispatch_key(key)
    )


def _needed_operations(policy: Policy, device_type: str) -> frozenset[str]:
    """Operations that need our kernel under the policy."""
    return policy.ruled() | _foreign_operations(device_type)


def _library(namespace: str, key: str) -> torch.library.Library:
    library = _libraries.get((namespace, key))
    if library is None:
        library = _libraries[namespace, key] = torch.library.Library(namespace, "IMPL", key)
    return library


def _registered() -> Iterable[str]:
    return torch._C._dispatch_get_all_op_names()


def _before_region(device_type: str, region: regions.Region) -> None:
    if device_type in SHARED_KEYS:
        _installed.setdefault(device_type, set())
        held = acquire(device_type, _needed_operations(region.policy, device_type))
        with _lock:
            _held.setdefault(id(region), []).append(held)
    elif device_type in KEYS:
        install(region.policy, device_type)


def _after_region(device_type: str, region: regions.Region) -> None:
    if device_type not in SHARED_KEYS:
        return
    with _lock:
        stack = _held[id(region)]
        held = stack.pop()
        if not stack:
            del _held[id(region)]
    cast_kernel.release(*held)


op_catalog.registered_operations.subscribe(_registered)
regions.opening.subscribe(_before_region)
regions.closed.subscribe(_after_region)


def _without_region() -> Policy:
    """The rules for a `torch.autocast` without our region.

    They are the device's default policy with file, environment and overrides.
    """
    engine = devices.engine()
    rules = policies.resolve(default_name(engine.platform()))
    if engine.DEVICE_TYPE not in SHARED_KEYS:
        install(rules, engine.DEVICE_TYPE)
    return rules
