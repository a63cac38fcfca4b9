"""The autocast kernel of one operation on one dispatch key.

torch's dispatcher calls it before autograd sees the operation, only while autocast is on for the device in the calling
thread.  Where the rules in force say what torch would do anyway, it does just that: torch's own kernel, or, where
there is none, the keys behind this one.  Otherwise it casts and calls the operation again with the key excluded, so
that what the operation is made of is not cast a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_amp import events
from xla_amp import policy as policies
from xla_amp.policy import Decision, Policy
from xla_amp.pytorch.autocast import casting, module_paths, observer
from xla_amp.types import Cast

Kernel = Callable[..., Any]
Rules = Callable[[], Policy]

_NUMBERS = (bool, int, float, complex)


def operator(name: str) -> Any:
    """The torch operator of a policy's operation name, or None where this process has none."""
    namespace, _, bare = name.rpartition("::")
    packet_name, _, overload = bare.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    return getattr(packet, overload or "default", None)


def as_key(key: str) -> Any:
    """What torch's own functions take for a dispatch key: its enumeration lacks some (AutocastXLA), which they take by
    name."""
    return getattr(torch._C.DispatchKey, key, key)


def make(
    name: str,
    operator: Any,
    device_type: str,
    key: str,
    rules: Rules,
    torchs: tuple[Cast, bool],
    *,
    keep_kernel: bool = True,
) -> Kernel:
    """The kernel; it takes the dispatcher's key set first (``with_keyset=True``).

    Args:
        name: the operation as policies call it.
        operator: its torch operator.
        device_type: whose tensors it casts.
        key: the dispatch key that it will be installed on.
        rules: gives the policy in force for the calling thread.
        torchs: what torch itself does on this key: the cast, and whether by a kernel of its own.
        keep_kernel: the kernel that is there now is torch's or the user's, to be called where ours has nothing to do.
    """
    operands = casting.operands(operator)
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    dispatch_key = as_key(key)
    own = _torchs_own(operands, device_type, dispatch_key, torchs[0], keep_kernel)
    made: dict[str, casting.Prepare] = {}
    # Without a rule such an operation is nothing but its parts, which are met one by one.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")

    def choose(policy: Policy, path: str | None) -> tuple[Policy, Decision, casting.Prepare | None]:
        decision = policy.decide(name, path)
        if (decision.cast, decision.rule is not None) == torchs:
            return policy, decision, None
        prepare = made.get(decision.cast)
        if prepare is None:
            prepare = made[decision.cast] = casting.make(decision.cast, operands, device_type)
        return policy, decision, prepare

    # Replaced as a whole, so that threads in regions of different policies never see half of it.
    chosen: Any = (None, None, None)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        policy = rules()
        path = None
        if policy.by_module:
            path = module_paths.current()
            _, decision, prepare = choose(policy, path)
        else:
            seen, decision, prepare = chosen
            if policy is not seen:
                seen, decision, prepare = chosen = choose(policy, None)
        if prepare is None:
            if events.sinks and (decision.rule is not None or (observer.everything and not composite)):
                given = operands.all(args, kwargs)
                before, used = observer.dtypes(given), observer.after(decision.cast, given, device_type)
                result = own(keyset, *args, **kwargs)
                observer.emit(decision, policy, before, used, result, path or module_paths.current())
                return result
            return own(keyset, *args, **kwargs)
        exclude(dispatch_key, True)
        try:
            target, arguments, keywords = prepare(args, kwargs)
            if not events.sinks:
                return target(*arguments, **keywords)
            before = observer.dtypes(operands.all(args, kwargs))
            used = observer.dtypes(operands.all(arguments, keywords))
            result = target(*arguments, **keywords)
            observer.emit(decision, policy, before, used, result, path or module_paths.current())
            return result
        finally:
            exclude(dispatch_key, False)

    return kernel


def _torchs_own(operands: casting.Operands, device_type: str, key: Any, torchs: Cast, keep_kernel: bool) -> Kernel:
    """What happens on `key` without us."""
    operator = operands.operator
    has_kernel = keep_kernel and torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    kernel = _present(operator, key).call_boxed if has_kernel else None
    redispatch = operator.redispatch
    after = torch._C._dispatch_keyset_full_after(key)
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    by_hand: list[casting.Prepare] = []

    def own(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(args[place], _NUMBERS) for place in operands.tensors if place < len(args)):
            return kernel(keyset, *args, **kwargs) if kernel else redispatch(keyset & after, *args, **kwargs)
        # A number where a tensor is expected: both ways above refuse it, calling the operation does not.
        if not by_hand:
            by_hand.append(casting.make(torchs, operands, device_type))
        exclude(key, True)
        try:
            target, arguments, keywords = by_hand[0](args, kwargs)
            return target(*arguments, **keywords)
        finally:
            exclude(key, False)

    return own


def _present(operator: Any, key: Any) -> Any:
    if isinstance(key, str):  # `get_kernel` takes no name outside of torch's enumeration, what it calls does
        return torch._C._dispatch_get_computed_kernel_for_dispatch_key(operator.name(), key)
    return torch.library.get_kernel(operator, key)


def torchs_own(name: str, operator: Any, device_type: str, key: str) -> Kernel:
    """What happens now to an operation on `key`, as a kernel: that of whoever has registered one, else the keys behind.

    It stays that when a kernel of ours takes the place.
    """
    return _torchs_own(casting.operands(operator), device_type, as_key(key), "keep", True)


def region_rules(device_type: str, without_region: Callable[[], Policy]) -> Rules:
    """Rules of the innermost region of `device_type`, else what `without_region` says."""
    current = policies.current

    def rules() -> Policy:
        region = current(device_type)
        return region.policy if region is not None else without_region()

    return rules
