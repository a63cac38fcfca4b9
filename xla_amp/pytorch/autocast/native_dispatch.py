"""Rules on PyTorch's own devices: kernels for the operations that the rules treat otherwise than torch does.

They stand on the device's autocast key while a region of `xla_amp.autocast` or a `policy.override` needs them, over
torch's own, and are gone afterwards.  Meanwhile a thread without rules of its own gets torch's own kernel, called from
ours; so do operations of which the rules say what torch does anyway.

On threads: rules belong to the thread that opened the region or the override.  A thread that Python did not start
(autograd runs the backward pass of accelerators on such threads) works for others and follows the newest open region.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp import policy as policies
from xla_amp.errors import PolicyError
from xla_amp.policy import Policy, RuleLayer, regions
from xla_amp.pytorch.autocast import cast_kernel, kernel_registry, module_paths, xla_dispatch

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "AutocastCPU",
        "cuda": "AutocastCUDA",
        "hpu": "AutocastHPU",
        "mps": "AutocastMPS",
        "xpu": "AutocastXPU",
    }
)
"""Device type -> dispatch key; each has a table of what torch does there, of the device type's name."""

_Release = list[tuple[str, tuple[str, ...]] | module_paths.Token]


def rules(device_type: str, policy: Policy | None) -> Policy | None:
    """The policy in force for a region on a device of torch's own; None where we have no table of what torch does.

    Args:
        policy: the one that the user chose, if any.

    Raises:
        PolicyError: a policy was chosen for a device type that has no table, or rules are malformed.
    """
    if device_type not in KEYS:
        if policy is not None:
            raise PolicyError(
                f"autocast({device_type!r}, policy={policy.name!r}): rules can be changed on {', '.join(KEYS)} and on "
                "the XLA device; leave policy= out to get torch's own"
            )
        return None
    return policies.resolve(policies.load(device_type) if policy is None else policy)


def device_types() -> list[str]:
    """Those of `KEYS` that this torch could have tensors on."""
    built = {
        "cpu": True,
        "cuda": torch.backends.cuda.is_built(),
        "hpu": hasattr(torch, "hpu"),
        "mps": torch.backends.mps.is_built(),
        "xpu": torch.xpu._is_compiled(),
    }
    return [device_type for device_type, there in built.items() if there]


def kernel(device_type: str, name: str, operator: Any) -> cast_kernel.Kernel:
    """The kernel of one operation on a device of torch's own."""
    table = policies.load(device_type)
    rules = _rules_of_thread(device_type)
    return cast_kernel.make(name, operator, device_type, KEYS[device_type], rules, table.outside(name))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.works_for_others = isinstance(threading.current_thread(), threading._DummyThread)


_thread = _Thread()


def _rules_of_thread(device_type: str) -> cast_kernel.Rules:
    table = policies.load(device_type)

    def find() -> Policy:
        region = regions.opened_here(device_type)
        if region is None and _thread.works_for_others:
            region = policies.current(device_type)
        # Without a region of ours it is torch's own, in which only overrides of this thread have a say.
        return region.policy if region is not None else policies.overridden(table)

    return find


@functools.lru_cache(maxsize=256)
def changed(device_type: str, policy: Policy) -> tuple[str, ...]:
    """Operations that `policy` treats otherwise than torch does on the device."""
    table = policies.load(device_type)
    if policy is table:
        return ()
    candidates = policy.ruled() | table.ruled()
    different = {name for name in candidates if policy.outside(name) != table.outside(name)}
    return tuple(sorted(different | policy.ruled_in_modules()))


# Regions and overrides come and go on many threads and not always in order: what each holds is kept by its identity.
_Identity = tuple[int, ...]

_lock = threading.Lock()
_held: dict[_Identity, list[_Release]] = {}


def _acquire(device_type: str, operations: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if device_type in KEYS:
        key = KEYS[device_type]
        return key, kernel_registry.acquire(key, operations, functools.partial(kernel, device_type))
    return xla_dispatch.acquire(device_type, operations)


def _before_region(device_type: str, region: policies.Region) -> None:
    held: _Release = []
    native = device_type in KEYS
    operations = changed(device_type, region.policy) if native else tuple(region.policy.ruled_in_modules())
    if operations:
        held.append(_acquire(device_type, operations))
    if region.policy.by_module:
        held.append(module_paths.acquire())
    if held:
        _keep((id(region),), held)


def _after_region(_device_type: str, region: policies.Region) -> None:
    _let_go((id(region),))


def _override(layer: RuleLayer, opens: bool) -> None:
    """An override must also reach a plain `torch.autocast`, which nobody tells us of."""
    identity = (id(layer), threading.get_ident())  # equal overrides are one layer
    if not opens:
        _let_go(identity)
        return
    operations = tuple(sorted(layer.reach() | layer.reach_in_modules()))
    held: _Release = [_acquire(device_type, operations) for device_type in device_types()]
    if in_modules := tuple(sorted(layer.reach_in_modules())):
        held += [_acquire(device_type, in_modules) for device_type in xla_dispatch.in_use()]
        held.append(module_paths.acquire())
    _keep(identity, held)


def _keep(identity: _Identity, held: _Release) -> None:
    with _lock:
        _held.setdefault(identity, []).append(held)


def _let_go(identity: _Identity) -> None:
    with _lock:
        entries = _held.get(identity)
        if not entries:
            return
        held = entries.pop()
        if not entries:
            del _held[identity]
    for item in held:
        if isinstance(item, module_paths.Token):
            module_paths.release(item)
        else:
            kernel_registry.release(*item)


policies.on_push(_before_region)
policies.on_pop(_after_region)
policies.on_override(_override)
