"""Autocast kernels on PyTorch's own devices, for operations whose rule differs from what torch does.

They replace torch's kernels on the device's autocast key while a region of `xla_amp.autocast` or a `policy.override`
needs them.  On a thread without rules, and for operations whose rule equals torch's cast, our kernel calls torch's.

Rules belong to the thread that opened the region or the override.  A thread that Python did not start (autograd runs
the backward pass of accelerators on such threads) follows the newest open region.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp import policy as policies
from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError
from xla_amp.policy import Policy, regions
from xla_amp.policy.policy import RuleLayer
from xla_amp.policy.resolve import OpenRules, overridden, overriding
from xla_amp.pytorch.autocast import cast_kernel, xla_dispatch
from xla_amp.torch_common import module_paths

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "AutocastCPU",
        "cuda": "AutocastCUDA",
        "hpu": "AutocastHPU",
        "mps": "AutocastMPS",
        "xpu": "AutocastXPU",
    }
)
"""Device type -> dispatch key.  `table` lists what torch does there."""

Wanted = tuple[str, tuple[str, ...]]
"""Device type, and operations that need a kernel there."""
Release = Callable[[], None]
"""Ends what was held."""


def table(device_type: str) -> Policy:
    """The policy that lists what torch does on a device type of `KEYS`."""
    return policies.load(device_type)


def rules(device_type: str, policy: Policy | None, own: Mapping[str, Cast] | None = None) -> Policy | None:
    """The effective policy of a region on a torch device; None where no table lists what torch does.

    Args:
        device_type: of the region.
        policy: the user's choice, if any.
        own: the region's rules on top of it, if any.

    Raises:
        PolicyError: a policy was chosen for a device type that has no table, or rules are malformed.
    """
    if device_type not in KEYS:
        if policy is not None or own is not None:
            given = f"rules={own!r}" if policy is None else f"policy={policy.name!r}"
            raise PolicyError(
                f"autocast({device_type!r}, {given}): rules can be changed on {', '.join(KEYS)} and on "
                "the XLA device; leave policy= and rules= out for torch's own rules"
            )
        return None
    return policies.resolve(table(device_type) if policy is None else policy, own)


def device_types() -> list[str]:
    """Device types of `KEYS` that this build of torch can have tensors on."""
    built = {
        "cpu": True,
        "cuda": torch.backends.cuda.is_built(),
        "hpu": hasattr(torch, "hpu"),
        "mps": torch.backends.mps.is_built(),
        "xpu": getattr(torch.version, "xpu", None) is not None,
    }
    return [device_type for device_type, present in built.items() if present]


def kernel(device_type: str, name: str, operator: Any) -> cast_kernel.Kernel:
    """The kernel of one operation on a torch device."""
    native = table(device_type)
    # Outside our regions torch's rules hold, changed only by overrides of this thread.
    rules = cast_kernel.region_rules(device_type, lambda: overridden(native))
    return cast_kernel.make(name, operator, device_type, KEYS[device_type], rules, native.outside(name))


@functools.lru_cache(maxsize=256)
def changed(device_type: str, policy: Policy) -> tuple[str, ...]:
    """Operations whose rule in `policy` differs from what torch does on the device, and those of a region's `rules`.

    A rule of `rules` that equals torch's cast changes nothing; its kernel sees that it has matched.
    """
    native = table(device_type)
    if policy is native:
        return ()
    candidates = policy.ruled() | native.ruled()
    different = {name for name in candidates if policy.outside(name) != native.outside(name)}
    for layer in policy.layers:
        if layer.layer == "context":
            different |= layer.reach()
        if layer.layer in ("context", "override"):
            different |= _FREQUENT  # also for an override that was opened before this module was imported
    return tuple(sorted(different | policy.ruled_in_modules()))


_FREQUENT = frozenset({"addmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm"})
"""They get a kernel under any override or `rules`: where one of them runs, rules that match nothing are reported."""


# Regions and overrides open and close on many threads, not always in order, so what each holds is stored by identity.
_Identity = tuple[int, ...]

_lock = threading.Lock()
_held: dict[_Identity, list[contextlib.ExitStack]] = {}


def wanted(rules: OpenRules) -> list[Wanted]:
    """The kernels that regions and overrides need while they are open."""
    found = [
        (device_type, operations)
        for device_type, region in rules.regions.items()
        if (operations := _of_region(device_type, region))
    ]
    found += [each for entered in rules.overrides for each in _of_override(entered.layer)]
    return found


def hold(device_type: str, operations: Iterable[str]) -> Release:
    """Keeps kernels installed until what this returns is called."""
    if device_type in KEYS:
        key = KEYS[device_type]
        held = key, cast_kernel.acquire(key, operations, functools.partial(kernel, device_type))
    else:
        held = xla_dispatch.acquire(device_type, operations)
    return functools.partial(cast_kernel.release, *held)


def _of_region(device_type: str, region: regions.Region) -> tuple[str, ...]:
    if device_type in KEYS:
        return changed(device_type, region.policy)
    return tuple(region.policy.ruled_in_modules()) if region.policy.by_module else ()


def _of_override(layer: RuleLayer) -> list[Wanted]:
    operations = tuple(sorted(layer.reach() | layer.reach_in_modules() | _FREQUENT))
    found = [(device_type, operations) for device_type in device_types()]
    if in_modules := tuple(sorted(layer.reach_in_modules())):
        found += [(device_type, in_modules) for device_type in xla_dispatch.in_use()]
    return found


def _before_region(device_type: str, region: regions.Region) -> None:
    operations = _of_region(device_type, region)
    if operations or region.policy.by_module:
        _keep((id(region),), [(device_type, operations)] if operations else [], region.policy.by_module)


def _after_region(_device_type: str, region: regions.Region) -> None:
    _release((id(region),))


def _override(layer: RuleLayer, opens: bool) -> None:
    """Installs kernels for an override, which must also reach a plain `torch.autocast`."""
    identity = (id(layer), threading.get_ident())  # equal overrides are the same layer
    if not opens:
        _release(identity)
        return
    _keep(identity, _of_override(layer), bool(layer.reach_in_modules()))


def _keep(identity: _Identity, wanted: list[Wanted], by_module: bool) -> None:
    with contextlib.ExitStack() as held:
        for each in wanted:
            held.callback(hold(*each))
        if by_module:
            held.callback(module_paths.release, module_paths.acquire())
        with _lock:
            _held.setdefault(identity, []).append(held.pop_all())


def _release(identity: _Identity) -> None:
    with _lock:
        entries = _held.get(identity)
        if not entries:
            return
        held = entries.pop()
        if not entries:
            del _held[identity]
    held.close()


regions.opening.subscribe(_before_region)
regions.closed.subscribe(_after_region)
overriding.subscribe(_override)
