"""The autocast kernel of one operation on one dispatch key.

torch's dispatcher calls it before autograd, and only while autocast is on for the device in the calling thread.  Where
the rule equals what torch does, it calls torch's autocast kernel, or redispatches to the next keys if torch has none.
Otherwise it casts and calls the operation again with the key excluded, so the parts of a composite operation are not
cast a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_amp.common import events
from xla_amp.common.types import Cast
from xla_amp.engines import devices
from xla_amp.policy import Decision, Policy, effects, regions
from xla_amp.pytorch.autocast import casting
from xla_amp.torch_common import dynamo, module_paths

Kernel = Callable[..., Any]

_NUMBERS = (bool, int, float, complex)


def operator(name: str) -> Any:
    """The torch operator of an operation as policies name it, or None if this process has none."""
    namespace, _, bare = name.rpartition("::")
    packet_name, _, overload = bare.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    return getattr(packet, overload or "default", None)


@functools.cache
def is_composite(operator: Any) -> bool:
    """Whether torch computes the operation by calls of others, which autograd and autocast see."""
    return bool(operator.has_kernel_for_dispatch_key("CompositeImplicitAutograd"))


_PYTHON_DISPATCHER = torch.DispatchKey.PythonDispatcher


def as_key(key: str) -> Any:
    """A dispatch key as torch's functions take it: they take keys that the enumeration lacks (AutocastXLA) by name."""
    return getattr(torch.DispatchKey, key, key)


def make(
    name: str,
    operator: Any,
    device_type: str,
    key: str,
    outside: Callable[[], Policy],
    torch_rule: tuple[Cast, bool],
    *,
    keep_kernel: bool = True,
) -> Kernel:
    """Makes a kernel; its first argument is the dispatcher's key set (``with_keyset=True``).

    Args:
        name: the operation as policies name it.
        operator: its torch operator.
        device_type: the device type whose tensors it casts.
        key: the dispatch key that it will be installed on.
        outside: returns the effective policy while none of our regions is open.
        torch_rule: what torch does on this key: the cast, and whether torch has a kernel for it.
        keep_kernel: the kernel that is installed now is torch's or the user's; call it where ours has nothing to do.
    """
    operands = casting.operands(operator)
    enable = torch.set_autocast_enabled
    default = _default_kernel(operands, device_type, as_key(key), torch_rule[0], keep_kernel)
    made: dict[Cast, casting.Prepare] = {}
    # Without a rule, only the parts of such an operation are recorded.
    composite = is_composite(operator)
    low = torch.get_autocast_dtype
    current = regions.current
    layer = devices.engine().cast_layer(name) if devices.is_xla(device_type) else None

    def choose(policy: Policy, path: str | None) -> tuple[Decision, casting.Prepare | None]:
        decision = policy.decision(name, path)
        effects.asked(policy, name, path)
        if (decision.cast, decision.rule is not None) == torch_rule:
            return decision, None
        prepare = made.get(decision.cast)
        if prepare is None:
            prepare = made[decision.cast] = casting.make(decision.cast, operands, device_type)
        return decision, prepare

    def telling(
        point: Any, decision: Decision, policy: Policy, path: str | None, args: Any, kwargs: Any, after: Any = None
    ) -> Callable[[Any], Any]:
        """`decision_events.telling` of a call; `after`: its operands after the cast, where the kernel has them."""
        from xla_amp.pytorch.autocast import decision_events  # only reports load it

        given = operands.all(args, kwargs)
        used = decision_events.dtypes(after) if after else decision_events.after(decision.cast, given, device_type)
        return decision_events.telling(point, decision, policy, given, used, path or module_paths.current())

    # The newest policy with its choices by module. Replaced as one tuple, because threads may be in regions of
    # different policies.
    chosen: tuple[Policy | None, dict[str | None, tuple[Decision, casting.Prepare | None]]] = (None, {})

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        region = current(device_type)
        policy = outside() if region is None else region.policy
        path = module_paths.current() if policy.by_module else None
        seen, choices = chosen
        if policy is not seen:
            choices = {}
            chosen = policy, choices
        choice = choices.get(path)
        if choice is None:
            choice = choices[path] = choose(policy, path)
        decision, prepare = choice
        if prepare is None:
            point = events.decided if decision.rule is not None else events.undecided
            if point.listeners and not (composite and decision.rule is None):
                return telling(point, decision, policy, path, args, kwargs)(default(keyset, *args, **kwargs))
            return default(keyset, *args, **kwargs)
        enable(device_type, False)
        try:
            if layer is not None and decision.cast == "low" and not kwargs:
                result = layer(low(device_type), *args)
                if result is not NotImplemented:
                    if events.decided.listeners:
                        telling(events.decided, decision, policy, path, args, kwargs)(result)
                    return result
            target, arguments, keywords = prepare(args, kwargs)
            if not events.decided.listeners:
                return target(*arguments, **keywords)
            inside = decision.cast == "fp32_inside"  # cast in the kernel
            after = None if inside else operands.all(arguments, keywords)
            tell = telling(events.decided, decision, policy, path, args, kwargs, after)
            return tell(target(*arguments, **keywords))
        finally:
            enable(device_type, True)

    return dynamo.skip(kernel)


def _default_kernel(
    operands: casting.Operands, device_type: str, key: Any, torch_cast: Cast, keep_kernel: bool
) -> Kernel:
    """What the dispatcher does on `key` without our kernel."""
    operator = operands.operator
    has_kernel = keep_kernel and operator.has_kernel_for_dispatch_key(key)
    kernel = _installed_kernel(operator, key).call_boxed if has_kernel else None
    redispatch = operator.redispatch
    enable = torch.set_autocast_enabled
    fallback: list[casting.Prepare] = []

    def default(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(args[index], _NUMBERS) for index in operands.tensors if index < len(args)):
            if kernel:
                return kernel(keyset, *args, **kwargs)
            # With torch's Python dispatcher, which Dynamo enables, it would begin again at the first key.
            return redispatch(keyset.remove(key).remove(_PYTHON_DISPATCHER), *args, **kwargs)
        # Neither of the calls above accepts a number where a tensor is expected; calling the operation does.
        if not fallback:
            fallback.append(casting.make(torch_cast, operands, device_type))
        enable(device_type, False)
        try:
            target, arguments, keywords = fallback[0](args, kwargs)
            return target(*arguments, **keywords)
        finally:
            enable(device_type, True)

    return default


def _installed_kernel(operator: Any, key: Any) -> Any:
    if isinstance(
        key, str
    ):  # `get_kernel` accepts only keys of torch's enumeration; the function that it calls accepts names
        return torch._C._dispatch_get_computed_kernel_for_dispatch_key(operator.name(), key)
    return torch.library.get_kernel(operator, key)


def present_kernel(operator: Any, device_type: str, key: str) -> Kernel:
    """The present behaviour of an operation on `key`, as a kernel: the registered kernel, or else the next keys.

    It stays the same when our kernel is installed later.
    """
    return _default_kernel(casting.operands(operator), device_type, as_key(key), "keep", True)
