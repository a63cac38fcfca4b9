"""Autocast kernels on the XLA device's autocast dispatch key: one per operation that the policy in use has a rule
for.

On the lazy device, whose key is ours alone, they stay once a region has needed them.  On torch_xla's device they
replace torch_xla's own, so they are there only while a region of ours is open; threads without one have torch_xla's
meanwhile.

What such a kernel does is in `xla_amp.pytorch.autocast.cast_kernel`.
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
from xla_amp.backends import devices
from xla_amp.policy import Policy, op_catalog
from xla_amp.pytorch.autocast import cast_kernel, kernel_registry

KEYS: Mapping[str, str] = MappingProxyType({"jax": "AutocastPrivateUse1", "xla": "AutocastXLA"})
"""Device type -> dispatch key."""

LENT = frozenset({"xla"})
"""Device types whose key has somebody else's kernels, which come back when our regions close."""

_lock = threading.RLock()
_libraries: dict[tuple[str, str], torch.library.Library] = {}
_installed: dict[str, set[str]] = {}
_done: dict[str, set[Policy]] = {}
_lent: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
"""id of an open region -> what it holds on a lent key; regions that are one object hold several."""


def install_defaults() -> None:
    """Installs the kernels of the XLA device's own policy and makes its low dtype torch's default there.

    From then on `torch.autocast` on that device casts by our rules.  The dtype is per thread, as torch keeps it; the
    calling thread's is set.  `xla_device()` calls this on the lazy device, where nothing else would cast; on torch_xla
    it is for the user to call.
    """
    engine = devices.engine()
    engine.device()
    rules = _without_region()
    install(rules, engine.DEVICE_TYPE)
    torch.set_autocast_dtype(engine.DEVICE_TYPE, getattr(torch, rules.low))


def make_ready() -> None:
    """Starts the XLA device; where no library of its own gives it autocast, ours is installed."""
    engine = devices.engine()
    if engine.DEVICE_TYPE in LENT:
        engine.device()
    else:
        install_defaults()


def install(policy: Policy, device_type: str) -> None:
    """Makes sure that every operation of `policy` has a kernel on `device_type`; doing it again costs a set lookup.

    Operations of libraries that are not imported are left out until the policy is used again after the import.
    """
    if policy in _done.get(device_type, ()):
        return
    with _lock:
        key = KEYS[device_type]
        installed = _installed.setdefault(device_type, set())
        if not torch._C._dispatch_has_backend_fallback(cast_kernel.as_key(key)):
            _library("_", key).fallback(torch.library.fallthrough_kernel)
        missing = False
        for name in sorted(_concerned(policy, device_type) - installed):
            operator = cast_kernel.operator(name)
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
    _foreign(device_type)  # while they can still be told from ours
    more = sorted(frozenset(operations) - _installed.get(device_type, set()))
    return key, kernel_registry.acquire(key, more, functools.partial(_kernel, device_type))


def in_use() -> list[str]:
    """Device types that regions have been opened on."""
    return list(_installed)


def _kernel(device_type: str, name: str, operator: Any) -> cast_kernel.Kernel:
    if device_type in LENT:
        return _kernel_on_lent(device_type, name)
    key = KEYS[device_type]
    rules = cast_kernel.region_rules(device_type, _without_region)
    ours = kernel_registry.holds(key, name)
    return cast_kernel.make(name, operator, device_type, key, rules, ("keep", False), keep_kernel=not ours)


@functools.cache
def _kernel_on_lent(device_type: str, name: str) -> cast_kernel.Kernel:
    """Our kernel inside our regions, elsewhere what was there before it.

    Made once, while nobody's kernel but the other library's is there; regions open with every step.
    """
    key, operator = KEYS[device_type], cast_kernel.operator(name)
    rules = cast_kernel.region_rules(device_type, _without_region)
    theirs = cast_kernel.torchs_own(name, operator, device_type, key)
    ours = cast_kernel.make(
        name, operator, device_type, key, rules, ("keep", False), keep_kernel=name not in _foreign(device_type)
    )
    current = policies.current

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = theirs if current(device_type) is None and device_type not in _done else ours
        return chosen(keyset, *args, **kwargs)

    return kernel


@functools.cache
def _foreign(device_type: str) -> frozenset[str]:
    """ATen operations that another library casts on the device: where our policy has no rule for them, nobody may."""
    if device_type not in LENT:
        return frozenset()
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device_type])
    return frozenset(name.removeprefix("aten::") for name in registered if name.startswith("aten::"))


def _concerned(policy: Policy, device_type: str) -> frozenset[str]:
    """Operations that must have a kernel of ours where the policy is in force."""
    return policy.ruled() | _foreign(device_type)


def _library(namespace: str, key: str) -> torch.library.Library:
    library = _libraries.get((namespace, key))
    if library is None:
        library = _libraries[namespace, key] = torch.library.Library(namespace, "IMPL", key)
    return library


def _registered() -> Iterable[str]:
    return torch._C._dispatch_get_all_op_names()


def _before_region(device_type: str, region: policies.Region) -> None:
    if device_type in LENT:
        _installed.setdefault(device_type, set())
        held = acquire(device_type, _concerned(region.policy, device_type))
        with _lock:
            _lent.setdefault(id(region), []).append(held)
    elif device_type in KEYS:
        install(region.policy, device_type)


def _after_region(device_type: str, region: policies.Region) -> None:
    if device_type not in LENT:
        return
    with _lock:
        stack = _lent[id(region)]
        held = stack.pop()
        if not stack:
            del _lent[id(region)]
    kernel_registry.release(*held)


op_catalog.extend_known_operations(_registered)
policies.on_push(_before_region)
policies.on_pop(_after_region)


def _without_region() -> Policy:
    """The rules where `torch.autocast` was used without ours: the device's own, with what lies on them."""
    engine = devices.engine()
    rules = policies.resolve(policies.default_name(engine.platform()))
    if engine.DEVICE_TYPE not in LENT:
        install(rules, engine.DEVICE_TYPE)
    return rules
