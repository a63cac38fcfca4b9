"""The autocast kernels that are installed in torch, by device and operation: one store, in which holders are counted.

`cast_kernel` makes a kernel.  What needs it holds it (`hold`): an open region or override (`scopes`), a recording.  The
last release removes it without a trace in torch.

* On torch's own devices, operations whose rule differs from what torch does get a kernel.  On a thread without rules,
  and where the rule equals torch's cast, it calls torch's.
* On torch_xla's device, each operation of the policy and each that torch_xla casts gets one.  Threads without a region
  have torch_xla's kernels meanwhile.
* On the lazy device no other library uses the key, so the kernels of a policy stay after their first use (`install`).

Rules belong to the thread that opened the region or the override.  A thread that Python did not start (autograd runs
the backward pass of accelerators on such threads) follows the newest open region.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from xla_amp import policy as policies
from xla_amp.common import config
from xla_amp.common.types import LAZY, Cast
from xla_amp.engines import devices
from xla_amp.errors import PolicyError
from xla_amp.policy import Policy, op_catalog, regions
from xla_amp.policy.load import default_name
from xla_amp.policy.policy import RuleLayer
from xla_amp.policy.resolve import OpenRules, overridden, overrides
from xla_amp.pytorch.autocast import cast_kernel

OF_TORCH: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "AutocastCPU",
        "cuda": "AutocastCUDA",
        "hpu": "AutocastHPU",
        "mps": "AutocastMPS",
        "xpu": "AutocastXPU",
    }
)
"""torch's own device types -> dispatch key.  `table` lists what torch does there."""

TORCH_XLA = "xla"
"""torch_xla's device type: its key has torch_xla's kernels."""
OF_XLA: Mapping[str, str] = MappingProxyType({LAZY: "AutocastPrivateUse1", TORCH_XLA: "AutocastXLA"})
"""XLA device types -> dispatch key."""
KEYS: Mapping[str, str] = MappingProxyType({**OF_TORCH, **OF_XLA})

Wanted: TypeAlias = tuple[str, tuple[str, ...]]
"""Device type, and operations that need a kernel there."""
Release: TypeAlias = Callable[[], None]
"""Ends what was held."""


# ---- rules -----------------------------------------------------------------------------------------------------------


def table(device_type: str) -> Policy:
    """The policy that lists what torch does on a device type of `OF_TORCH`."""
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
    if device_type not in OF_TORCH:
        if policy is not None or own is not None:
            given = f"rules={own!r}" if policy is None else f"policy={policy.name!r}"
            raise PolicyError(
                f"autocast({device_type!r}, {given}): rules can be changed on {', '.join(OF_TORCH)} and on "
                "the XLA device; leave policy= and rules= out for torch's own rules"
            )
        return None
    return policies.resolve(table(device_type) if policy is None else policy, own)


def _outside_regions() -> Policy:
    """The rules for a `torch.autocast` on the lazy device without our region."""
    found = _default_rules(config.of_regions(), overrides.open)
    install(found)
    return found


@functools.lru_cache(maxsize=64)
def _default_rules(*_state: object) -> Policy:
    """The XLA device's own policy with file, environment and overrides; `_state` is what these depend on."""
    return policies.resolve(default_name(devices.engine().platform()))


# ---- what needs a kernel ---------------------------------------------------------------------------------------------


def device_types() -> list[str]:
    """Device types of `OF_TORCH` that this build of torch can have tensors on."""
    built = {
        "cpu": True,
        "cuda": torch.backends.cuda.is_built(),
        "hpu": hasattr(torch, "hpu"),
        "mps": torch.backends.mps.is_built(),
        "xpu": getattr(torch.version, "xpu", None) is not None,
    }
    return [device_type for device_type, present in built.items() if present]


def of_region(device_type: str, policy: Policy) -> tuple[str, ...]:
    """Operations to hold kernels of while a region with `policy` is open; those that stay are installed at once."""
    if device_type == LAZY:
        if policy is not _newest:
            install(policy)
        if not policy.by_module:
            return ()
    return _of_region(device_type, policy)


@functools.lru_cache(maxsize=256)
def _of_region(device_type: str, policy: Policy) -> tuple[str, ...]:
    if device_type in OF_TORCH:
        return _changed(device_type, policy)
    found = policy.ruled_in_modules()
    if device_type == TORCH_XLA:
        found |= policy.ruled() | _of_torch_xla()
    return tuple(sorted(found))


def _changed(device_type: str, policy: Policy) -> tuple[str, ...]:
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


def of_override(layer: RuleLayer) -> list[Wanted]:
    """What needs a kernel for an override, which must also reach a plain `torch.autocast`."""
    operations = tuple(sorted(layer.reach() | layer.reach_in_modules() | _FREQUENT))
    found = [(device_type, operations) for device_type in device_types()]
    if in_modules := tuple(sorted(layer.reach_in_modules())):
        found += [(device_type, in_modules) for device_type in in_use()]
    return found


def wanted(rules: OpenRules) -> list[Wanted]:
    """The kernels that regions and overrides need while they are open."""
    of_regions = [(device, of_region(device, region.policy)) for device, region in rules.regions.items()]
    of_overrides = [each for entered in rules.overrides for each in of_override(entered.layer)]
    return [each for each in (*of_regions, *of_overrides) if each[1]]


@functools.cache
def _of_torch_xla() -> frozenset[str]:
    """ATen operations that torch_xla casts; without a rule of our policy they must not be cast.

    Must be called before our first kernel is installed there.
    """
    names = (name.removeprefix("aten::") for name in _registered() if name.startswith("aten::"))
    key = KEYS[TORCH_XLA]
    return frozenset(
        name for name in names if (op := cast_kernel.operator(name)) is not None and op.has_kernel_for_dispatch_key(key)
    )


def _registered() -> Iterable[str]:
    return torch._C._dispatch_get_all_op_names()


op_catalog.registered_operations.subscribe(_registered)


# ---- the store -------------------------------------------------------------------------------------------------------
# One `hold` puts its new kernels into one `torch.library.Library` for each namespace.  A library is destroyed when the
# last of its operations is released; the dispatcher then has its earlier kernels.  Until then it has all of them.


@dataclasses.dataclass(eq=False, slots=True)
class _Installed:
    """The kernel of one operation."""

    library: torch.library.Library
    holders: int = 0


_lock = threading.RLock()
_installed: dict[tuple[str, str], _Installed] = {}
"""By device type and operation."""
_held: dict[torch.library.Library, int] = {}
"""Number of held operations of each library."""
_in_use: set[str] = set()
"""XLA device types for which our kernels have been installed."""
_complete: set[Policy] = set()
"""Policies all of whose kernels stay on the lazy device."""
_staying: set[str] = set()
"""The operations of these kernels."""
_newest: Policy | None = None
"""The last one of `_complete`: a region usually has the policy of the one before it."""


def hold(device_type: str, operations: Iterable[str]) -> Release:
    """Keeps kernels of operations installed until what this returns is called.

    Names are those of policies; those that this process has no operator for are left out.
    """
    return functools.partial(_release, device_type, _acquire(device_type, operations))


def install(policy: Policy) -> None:
    """Installs a kernel on the lazy device for every operation of `policy`, which stays; again it costs a look.

    Operations of libraries that are not imported are left out until the policy is used again after the import.
    """
    global _newest
    if _newest is policy:
        return
    with _lock:
        if policy not in _complete:
            if LAZY not in _in_use:
                with contextlib.suppress(RuntimeError):  # the key has a fallback
                    _fallback().fallback(torch.library.fallthrough_kernel)
            missing = policy.ruled() - _staying
            _staying.update(_acquire(LAZY, sorted(missing)))
            if any("::" in name for name in missing - _staying):
                return
            _complete.add(policy)
        _newest = policy


@functools.cache
def _fallback() -> torch.library.Library:
    return torch.library.Library("_", "IMPL", KEYS[LAZY])


def make_ready() -> None:
    """Starts the XLA device; on the lazy device, `torch.autocast` casts by our rules from then on.

    torch keeps the low dtype per thread; the calling thread's is set.
    """
    engine = devices.engine()
    engine.device()
    if engine.DEVICE_TYPE == LAZY:
        found = _outside_regions()
        torch.set_autocast_dtype(LAZY, getattr(torch, found.low))


def in_use() -> list[str]:
    """XLA device types for which our kernels have been installed."""
    return sorted(_in_use)


def _acquire(device_type: str, operations: Iterable[str]) -> tuple[str, ...]:
    """Holds kernels of the operations, and installs those that are missing; returns what `_release` takes."""
    done: list[str] = []
    libraries: dict[str, torch.library.Library] = {}
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that its kernel is replaced, which is intended
        if device_type in OF_XLA:
            _in_use.add(device_type)
        try:
            for name in operations:
                kernel = _installed.get((device_type, name))
                if kernel is None:
                    operator = cast_kernel.operator(name)
                    if operator is None:
                        continue
                    library = _install(KEYS[device_type], name, _kernel(device_type, name, operator), libraries)
                    kernel = _installed[device_type, name] = _Installed(library)
                _held[kernel.library] += kernel.holders == 0
                kernel.holders += 1
                done.append(name)
        except BaseException:
            _release(device_type, done)
            for library in libraries.values():
                if _held.get(library) == 0:
                    del _held[library]
            raise
    return tuple(done)


def _release(device_type: str, operations: Iterable[str]) -> None:
    with _lock:
        for name in operations:
            kernel = _installed[device_type, name]
            kernel.holders -= 1
            library = kernel.library
            _held[library] -= kernel.holders == 0
            if _held[library] == 0:
                del _held[library], kernel
                for each in [each for each, kernel in _installed.items() if kernel.library is library]:
                    del _installed[each]
                del library  # the last reference, with which the dispatcher gets its earlier kernels back


def _install(
    key: str, name: str, kernel: cast_kernel.Kernel, libraries: dict[str, torch.library.Library]
) -> torch.library.Library:
    namespace, _, bare = name.rpartition("::")
    library = libraries.get(namespace)
    if library is None:
        library = libraries[namespace] = torch.library.Library(namespace or "aten", "IMPL", key)
        _held[library] = 0
    library.impl(bare, kernel, with_keyset=True, allow_override=True)
    return library


def _kernel(device_type: str, name: str, operator: Any) -> cast_kernel.Kernel:
    if device_type == TORCH_XLA:
        return _kernel_on_torch_xla(name)
    key = KEYS[device_type]
    if device_type == LAZY:
        return cast_kernel.make(name, operator, device_type, key, _outside_regions, ("keep", False))
    native = table(device_type)
    # Outside our regions torch's rules hold, changed only by overrides of this thread.
    return cast_kernel.make(name, operator, device_type, key, lambda: overridden(native), native.outside(name))


@functools.cache
def _kernel_on_torch_xla(name: str) -> cast_kernel.Kernel:
    """Calls our kernel inside our regions and torch_xla's elsewhere.

    Made once, before our kernel is installed; regions open in every step.
    """
    key, operator, current = KEYS[TORCH_XLA], cast_kernel.operator(name), regions.current
    theirs = cast_kernel.present_kernel(operator, TORCH_XLA, key)
    keep = name not in _of_torch_xla()
    ours = cast_kernel.make(name, operator, TORCH_XLA, key, _default_rules, ("keep", False), keep_kernel=keep)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = theirs if current(TORCH_XLA) is None else ours
        return chosen(keyset, *args, **kwargs)

    return kernel
