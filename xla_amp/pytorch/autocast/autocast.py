"""`autocast`: where operations run in a policy's dtypes.

The region itself is torch's: a fresh `torch.autocast` per entry sets torch's own per-thread state, so nesting,
`torch.is_autocast_enabled` and exporting behave as they do everywhere.  On an XLA device the entry also says which
policy the autocast kernels follow (`xla_amp.pytorch.autocast.xla_dispatch`).

What is open is kept on a stack per thread, never on the `autocast` object, which can therefore be entered again while
it is open, used by several threads, and decorate a function that calls itself.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from xla_amp import config
from xla_amp import policy as policies
from xla_amp.backends import devices
from xla_amp.errors import UnsupportedDtypeError
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast import decorate, native, native_dispatch

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One entry of a region that has not been left."""

    owner: autocast
    region: torch.autocast
    token: policies.Token | None
    hook: RemovableHandle | None = None


class _Open(threading.local):
    """Entries of this thread, newest last."""

    def __init__(self) -> None:
        self.stack: list[_Entry] = []


_open = _Open()


class autocast:
    """Context manager and decorator: operations inside run in the dtypes that a policy gives them.

    Args:
        device: ``"xla"`` (the active XLA engine's device), ``"cuda"``, ``"cpu"`` and other device strings, a
            `torch.device`, or what `xla_device()` returned.
        dtype: the low dtype, `torch.bfloat16` or `torch.float16`; None is the policy's.
        enabled: False switches mixed precision off inside.
        cache_enabled: torch's flag of the same name; None leaves it as it is.  On XLA casts are never kept.  On torch's
            own devices they are dropped after each optimizer step inside; where you write to a weight inside the region
            by other means, pass False.
        policy: which rules: a built-in name, a path to a TOML file, or a `Policy`.  None is the device's own: on XLA
            the ``tpu`` rules for TPU and CPU and the ``gpu`` rules for GPU, elsewhere what torch has registered.  On
            cpu, cuda, xpu, hpu and mps the operations that the rules treat otherwise than torch get kernels of ours for
            as long as the region is open.

    Raises:
        DeviceError: `device` is none (also a `ValueError`), or autocast would have no effect on it.
        UnsupportedDtypeError: the policy or the device has no such low dtype.
        PolicyError: `policy` cannot be loaded.

    Example:
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.bfloat16

    It decorates functions, methods, generators, coroutines and asynchronous generators; of the last three only the body
    runs inside, not what runs while they are suspended.  Regions nest, and a region that is left by an exception
    restores what was before it.
    """

    def __init__(
        self,
        device: Any,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: str | os.PathLike[str] | Policy | None = None,
    ) -> None:
        self.device = devices.device_type(device)
        self.dtype = dtype
        self.enabled = enabled
        self.cache_enabled = cache_enabled
        self.policy = None if policy is None else policies.load(policy)
        self._effective: Policy | None = None
        if not devices.is_xla(self.device):
            native.region(self.device, dtype, enabled, cache_enabled)
            if enabled and self.policy is not None:
                self._low(native_dispatch.rules(self.device, self.policy) or self.policy)
        elif enabled:
            _warn_of_legacy_flags()
            if self.policy is not None or devices.engine().is_started():
                self._low(self._rules())
            elif dtype is not None:
                native.check_dtype(self.device, dtype)

    def __repr__(self) -> str:
        given = {"dtype": self.dtype, "cache_enabled": self.cache_enabled, "policy": self.policy}
        shown = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        return f"autocast({self.device!r}{', enabled=False' if not self.enabled else ''}{shown})"

    def __enter__(self) -> autocast:
        _open.stack.append(self._enter_xla() if devices.is_xla(self.device) else self._enter_native())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _leave(self)

    def __call__(self, function: _Function) -> _Function:
        return decorate.inside(self, function)

    def _rules(self) -> Policy:
        """The policy in force now: ours, with what file, environment and overrides lay on it."""
        if self._effective is not None:
            return self._effective
        chosen = self.policy or policies.default_name(devices.engine().platform())
        return policies.resolve(policies.load(chosen))

    def _low(self, rules: Policy) -> torch.dtype:
        if self.dtype is None:
            return getattr(torch, rules.low)
        native.check_dtype(self.device, self.dtype)
        if str(self.dtype).removeprefix("torch.") not in rules.dtypes:
            legal = ", ".join(f"torch.{name}" for name in rules.dtypes)
            raise UnsupportedDtypeError(
                f"autocast({self.device!r}, dtype={self.dtype}): the policy {rules.name!r} offers {legal}, got "
                f"{self.dtype}; pass one of them, or policy= with one that offers it"
            )
        return self.dtype

    def _enter_native(self) -> _Entry:
        rules = self._effective or native_dispatch.rules(self.device, self.policy)
        low = self._low(rules) if self.enabled and self.policy is not None and rules is not None else self.dtype
        region = native.region(self.device, low, self.enabled, self.cache_enabled)
        token = None
        if rules is not None:
            named = str(region.fast_dtype).removeprefix("torch.")
            token = policies.push(self.device, policies.Region(policy=rules, low=named, enabled=self.enabled))
        region.__enter__()
        return _Entry(self, region, token, native.drop_casts_after_steps() if self.enabled else None)

    def _enter_xla(self) -> _Entry:
        engine = devices.engine()
        engine.device()
        engine.step_begins()
        rules = self._rules()
        low = self._low(rules) if self.enabled else getattr(torch, rules.low)
        region = torch.autocast(self.device, low, self.enabled, self.cache_enabled)
        named = str(low).removeprefix("torch.")
        token = policies.push(self.device, policies.Region(policy=rules, low=named, enabled=self.enabled))
        region.__enter__()
        return _Entry(self, region, token)


def reopened(region: policies.Region | None, device_type: str, dtype: torch.dtype) -> autocast:
    """A region like an earlier one, with the rules that were in force then, overrides included."""
    again = autocast(device_type, dtype)
    again._effective = None if region is None else region.policy
    return again


def _leave(owner: autocast) -> None:
    """Undoes this thread's newest entry of `owner`.

    Raises:
        RuntimeError: this thread has not entered it.
    """
    stack = _open.stack
    place = next((place for place in reversed(range(len(stack))) if stack[place].owner is owner), None)
    if place is None:
        raise RuntimeError(f"leaving {owner!r}: this thread has not entered it; leave a region in the thread it is for")
    entry = stack.pop(place)
    above = stack[place:]
    if not above:
        entry.region.__exit__(None, None, None)
    else:
        _leave_from_below(entry, above)
    if entry.token is not None:
        policies.pop(entry.token)
    if entry.hook is not None:
        entry.hook.remove()


def _leave_from_below(entry: _Entry, above: list[_Entry]) -> None:
    """Ends a region while later ones stay open, as suspended generators and coroutines make it happen.

    torch's state stays what the newest region made it; the region above takes over what this one was to restore.
    """
    same = next((other for other in above if other.owner.device == entry.owner.device), None)
    if same is None:
        torch.set_autocast_enabled(entry.region.device, entry.region.prev)
        torch.set_autocast_dtype(entry.region.device, entry.region.prev_fastdtype)
    else:
        same.region.prev = entry.region.prev
        same.region.prev_fastdtype = entry.region.prev_fastdtype
    above[0].region.prev_cache_enabled = entry.region.prev_cache_enabled
    torch.autocast_decrement_nesting()


_warned = False


def _warn_of_legacy_flags() -> None:
    global _warned
    if _warned or not (flags := config.legacy_dtype_flags()):
        return
    _warned = True
    names = " and ".join(flags)
    warnings.warn(
        f"{names} set in the environment: torch_xla then stores every float tensor in that dtype, so the dtypes that "
        f"autocast chooses per operation no longer mean anything. Unset {names} when you use autocast",
        UserWarning,
        stacklevel=3,
    )
