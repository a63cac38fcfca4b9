"""Autocast kernels: one per operation that any policy in use has a rule for, on a device's autocast dispatch key.

torch's dispatcher calls such a kernel before autograd sees the operation, only while autocast is on for the device in
the calling thread.  The kernel asks the policy of the innermost region, casts, and calls the operation again with the
key excluded, so what the operation is made of is not cast a second time.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp import policy as policies
from xla_amp import record
from xla_amp.policy import Decision, Policy, names
from xla_amp.pytorch import casts, devices

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
        for name in sorted(policy.operations() - installed):
            operator = _operator(name)
            if operator is None:
                missing = missing or "::" in name
                continue
            namespace, _, bare = name.rpartition("::")
            kernel = _kernel(name, operator, device_type)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a library may have registered a cast of its own; ours replaces it
                _library(namespace or "aten", key).impl(bare, kernel)
            installed.add(name)
        if not missing:
            _done.setdefault(device_type, set()).add(policy)


def _library(namespace: str, key: str) -> torch.library.Library:
    library = _libraries.get((namespace, key))
    if library is None:
        library = _libraries[namespace, key] = torch.library.Library(namespace, "IMPL", key)
    return library


def _operator(name: str) -> Any:
    """The torch operator of a policy's operation name, or None where this process has none."""
    namespace, _, bare = name.rpartition("::")
    packet_name, _, overload = bare.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    return getattr(packet, overload or "default", None)


def _registered() -> Iterable[str]:
    return torch._C._dispatch_get_all_op_names()


def _before_region(device_type: str, region: policies.Region) -> None:
    if device_type in KEYS:
        install(region.policy, device_type)


names.extend_known_operations(_registered)
policies.on_push(_before_region)


def _kernel(name: str, operator: Any, device_type: str) -> Callable[..., Any]:
    """The autocast kernel of one operation."""
    current = policies.current
    operands = casts.Operands(operator)
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    key = getattr(torch._C.DispatchKey, KEYS[device_type])
    made: dict[str, casts.Prepare] = {}

    def choose(rules: Policy) -> tuple[Policy, Decision, casts.Prepare]:
        decision = rules.decide(name)
        prepare = made.get(decision.cast)
        if prepare is None:
            prepare = made[decision.cast] = casts.make(decision.cast, operands, device_type)
        return rules, decision, prepare

    # Replaced as a whole, so that threads in regions of different policies never see half of it.
    chosen: Any = (None, None, None)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        region = current(device_type)
        rules = region.policy if region is not None else _without_region()
        seen, decision, prepare = chosen
        if rules is not seen:
            seen, decision, prepare = chosen = choose(rules)
        exclude(key, True)
        try:
            target, arguments, keywords = prepare(args, kwargs)
            if record.sinks and decision.rule is not None:
                return _observed(decision, rules, operands, (args, kwargs), (target, arguments, keywords))
            return target(*arguments, **keywords)
        finally:
            exclude(key, False)

    return kernel


def _without_region() -> Policy:
    """The rules where `torch.autocast` was used without ours: the device's own, with what lies on them."""
    engine = devices.engine()
    rules = policies.resolve(policies.default_name(engine.platform()))
    install(rules, engine.DEVICE_TYPE)
    return rules


def _observed(
    decision: Decision, rules: Policy, operands: casts.Operands, given: tuple[Any, Any], prepared: casts.Prepared
) -> Any:
    """Runs a prepared operation that has a rule and tells the listeners of `xla_amp.record` about it."""
    target, arguments, keywords = prepared
    result = target(*arguments, **keywords)
    rule: Any = decision.rule
    results = result if isinstance(result, list | tuple) else (result,)
    record.emit(
        record.DecisionRecord(
            operation=decision.operation,
            cast=decision.cast,
            layer=decision.layer,
            policy=rules.name,
            front="pytorch",
            given=_dtypes(operands.all(*given)),
            used=_dtypes(operands.all(arguments, keywords)),
            why=rule.why,
            source=rule.source,
            origin=rule.origin,
            result=_dtypes([value for value in results if isinstance(value, torch.Tensor)]),
            location=_location(),
        )
    )
    return result


def _dtypes(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def _location() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("torch", "xla_amp"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
