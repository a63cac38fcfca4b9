"""Autocast kernels: one per operation that any policy in use has a rule for, on the lazy device's autocast
dispatch key.

What such a kernel does is in `xla_amp.pytorch.kernels`.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp import policy as policies
from xla_amp.policy import Policy, names
from xla_amp.pytorch import devices, kernels, scoped

KEYS: Mapping[str, str] = MappingProxyType({"jax": "AutocastPrivateUse1"})
"""Device type -> dispatch key."""

_lock = threading.RLock()
_libraries: dict[tuple[str, str], torch.library.Library] = {}
_installed: dict[str, set[str]] = {}
_done: dict[str, set[Policy]] = {}


def install_defaults() -> None:
    """Installs the kernels of the XLA device's own policy and makes its low dtype torch's default there.

    From then on `torch.autocast` on that device casts as well.  The dtype is per thread, as torch keeps it; the calling
    thread's is set.  Called by `xla_device()`.
    """
    engine = devices.engine()
    engine.device()
    rules = _without_region()
    torch.set_autocast_dtype(engine.DEVICE_TYPE, getattr(torch, rules.low))


def install(policy: Policy, device_type: str) -> None:
    """Makes sure that every operation of `policy` has a kernel on `device_type`; doing it again costs a set lookup.

    Operations of libraries that are not imported are left out until the policy is used again after the import.
    """
    if policy in _done.get(device_type, ()):
        return
    with _lock:
        key = KEYS[device_type]
        installed = _installed.setdefault(device_type, set())
        if not torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)):
            _library("_", key).fallback(torch.library.fallthrough_kernel)
        missing = False
        for name in sorted(policy.ruled() - installed):
            operator = kernels.operator(name)
            if operator is None:
                missing = missing or "::" in name
                continue
            namespace, _, bare = name.rpartition("::")
            kernel = _kernel(device_type, name, operator)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a library may have registered a cast of its own; ours replaces it
                _library(namespace or "aten", key).impl(bare, kernel, with_keyset=True, allow_override=True)
            installed.add(name)
        if not missing:
            _done.setdefault(device_type, set()).add(policy)


def acquire(device_type: str, operations: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Kernels for more operations, until `scoped.release` gets what this returns."""
    key = KEYS[device_type]
    more = sorted(frozenset(operations) - _installed.get(device_type, set()))
    return key, scoped.acquire(key, more, functools.partial(_kernel, device_type))


def in_use() -> list[str]:
    """Device types that regions have been opened on."""
    return list(_installed)


def _kernel(device_type: str, name: str, operator: Any) -> kernels.Kernel:
    key = KEYS[device_type]
    rules = kernels.region_rules(device_type, _without_region)
    ours = scoped.holds(key, name)
    return kernels.make(name, operator, device_type, key, rules, ("keep", False), keep_kernel=not ours)


def _library(namespace: str, key: str) -> torch.library.Library:
    library = _libraries.get((namespace, key))
    if library is None:
        library = _libraries[namespace, key] = torch.library.Library(namespace, "IMPL", key)
    return library


def _registered() -> Iterable[str]:
    return torch._C._dispatch_get_all_op_names()


def _before_region(device_type: str, region: policies.Region) -> None:
    if device_type in KEYS:
        install(region.policy, device_type)


names.extend_known_operations(_registered)
policies.on_push(_before_region)


def _without_region() -> Policy:
    """The rules where `torch.autocast` was used without ours: the device's own, with what lies on them."""
    engine = devices.engine()
    rules = policies.resolve(policies.default_name(engine.platform()))
    install(rules, engine.DEVICE_TYPE)
    return rules
