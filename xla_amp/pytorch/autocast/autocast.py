"""`autocast`: context manager and decorator whose operations run in the dtypes of a policy.

Each entry opens a new `torch.autocast`, which sets torch's per-thread state, so nesting, `torch.is_autocast_enabled`
and export behave as usual.  On an XLA device the entry also sets the policy that the autocast kernels follow
(`xla_amp.pytorch.autocast.xla_dispatch`).

Open entries are kept on a stack per thread, never on the `autocast` object.  The object can therefore be entered again
while it is open, used by several threads, and decorate a recursive function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch

from xla_amp import policy as policies
from xla_amp.backends import base, devices, dynamo
from xla_amp.backends.base import Engine
from xla_amp.common import arguments, config, events, interrupts
from xla_amp.common.types import Cast
from xla_amp.errors import UnsupportedDtypeError
from xla_amp.policy import Policy, effects, regions
from xla_amp.policy.load import default_name
from xla_amp.policy.policy import MEASURED
from xla_amp.pytorch.autocast import decorate, native, native_dispatch
from xla_amp.pytorch.autocast import recomputation as recomputation

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One open entry of a region."""

    owner: autocast
    region: torch.autocast
    rules: Policy | None
    leave: contextlib.ExitStack
    """What to undo beside `region`."""


class _Open(threading.local):
    """Entries of this thread, newest last."""

    def __init__(self) -> None:
        self.stack: list[_Entry] = []


_open = _Open()


@dynamo.graph_break
class autocast:
    """Context manager and decorator: operations inside run in the dtypes that a policy gives them.

    Args:
        device_type: ``"xla"`` (the active XLA engine's device), ``"cuda"``, ``"cpu"`` and other device strings, a
            `torch.device`, or what `xla_device()` returned.
        dtype: the low dtype, `torch.bfloat16` or `torch.float16`; None is the policy's.  `torch.float32` is
            ``enabled=False`` with an `AutocastWarning`.
        enabled: False switches mixed precision off inside.
        cache_enabled: torch's flag of the same name; None leaves it unchanged.  On XLA, casts are never cached.  On
            torch's own devices cached casts are dropped after each optimizer step inside; if you write to a weight
            inside the region by other means, pass False.
        policy: the rules: a built-in name, a path to a TOML file, or a `Policy`; ``"lean"`` and ``"cautious"`` are
            risk levels.  None and ``"default"`` are the device's own: on XLA
            the ``tpu`` rules for TPU and CPU and the ``gpu`` rules for GPU, elsewhere what torch has registered.  On
            cpu, cuda, xpu, hpu, mps and torch_tpu's tpu, operations whose rule differs from the device's own cast get a
            kernel from this package while the region is open.
        rules: rules on top of the policy, ``{"tanh": "fp32", "module:*.router": "fp32"}``; they win over overrides.
        strict: when the region closes, a rule of yours that has matched no operation in this process is an error, if
            the region ran operations.  Without it, such a rule of `rules`, or of a plan of `xla_amp.search`, is a
            `RuleWarning`.

    Raises:
        DeviceError: `device_type` is not a device (also a `ValueError`), or autocast would have no effect on it.
        UnsupportedDtypeError: the policy or the device does not offer the low dtype.
        TypeError: `enabled` or `cache_enabled` is not a bool.
        PolicyError: `policy` cannot be loaded, or `rules` are malformed.

    Example:
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.bfloat16

    It decorates functions, methods, generators, coroutines and asynchronous generators; code that runs while one of the
    last three is suspended is outside.  Regions nest, and leaving one by an exception restores the earlier state.
    """

    def __init__(
        self,
        device_type: str | torch.device,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: str | os.PathLike[str] | Policy | None = None,
        rules: Mapping[str, Cast] | None = None,
        strict: bool = False,
    ) -> None:
        self.device = devices.device_type(device_type)
        arguments.require("autocast(strict=...)", strict, bool, "True or False")
        arguments.require("autocast(rules=...)", rules, (Mapping, type(None)), 'a mapping such as {"tanh": "fp32"}')
        enabled = native.check_flags(self.device, dtype, enabled, cache_enabled)
        self.dtype = dtype
        self.enabled = enabled
        self.cache_enabled = cache_enabled
        self.policy = None if policy in (None, policies.DEFAULT) else policies.load(policy)
        self.rules = None if rules is None else dict(rules)
        self.strict = strict
        self._effective: Policy | None = None
        """Set by `reopened` only: the rules of an earlier region, used as they are."""
        self._is_xla = devices.is_xla(self.device)
        if not self._is_xla:
            native.region(self.device, dtype, enabled, cache_enabled)
            if enabled and self._has_rules():
                self._low(self._native_rules())
        elif enabled:
            _warn_of_legacy_flags()
            engine = devices.engine()
            if self._has_rules() or engine.is_started():
                self._low(self._rules(engine))
            elif dtype is not None:
                native.check_dtype(self.device, dtype)

    def __repr__(self) -> str:
        given = {
            "dtype": self.dtype, "cache_enabled": self.cache_enabled, "policy": self.policy, "rules": self.rules
        }  # fmt: skip
        shown = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        return f"autocast({self.device!r}{', enabled=False' if not self.enabled else ''}{shown})"

    def __enter__(self) -> autocast:
        _open.stack.append(self._enter_xla() if self._is_xla else self._enter_native())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        rules = _leave(self)
        if kind is None and rules is not None and (self.rules is not None or self.strict):
            for layer in rules.layers:
                if layer.layer == "context" or (self.strict and layer.layer in ("file", "environment")):
                    effects.report_unmatched(layer, strict=self.strict)
        if kind is None and rules is not None and self.policy is not None and self.policy.source == MEASURED:
            effects.report_unmatched(self.policy.layers[-1], strict=False, once=True)

    def __call__(self, function: _Function) -> _Function:
        decorated: _Function = decorate.inside(self, function)
        return decorated

    def _has_rules(self) -> bool:
        return self.policy is not None or self.rules is not None

    def _native_rules(self) -> Any:
        return native_dispatch.rules(self.device, self.policy, self.rules)

    def _rules(self, engine: Engine) -> Policy:
        """The effective policy: the chosen or default one, with file, environment and overrides on top."""
        if self._effective is not None:
            return self._effective
        return policies.resolve(self.policy or default_name(engine.platform()), self.rules)

    def _low(self, rules: Policy) -> torch.dtype:
        if self.dtype is None:
            low: torch.dtype = getattr(torch, rules.low)
            return low
        native.check_dtype(self.device, self.dtype)
        if str(self.dtype).removeprefix("torch.") not in rules.dtypes:
            legal = ", ".join(f"torch.{name}" for name in rules.dtypes)
            raise UnsupportedDtypeError(
                f"autocast({self.device!r}, dtype={self.dtype}): the policy {rules.name!r} offers {legal}, got "
                f"{self.dtype}; pass one of them, or policy= with one that offers it"
            )
        return self.dtype

    def _enter_native(self) -> _Entry:
        rules = self._effective or self._native_rules()
        low = self._low(rules) if self.enabled and self._has_rules() and rules is not None else self.dtype
        region = native.region(self.device, low, self.enabled, self.cache_enabled)
        if rules is not None:
            effects.report_sums(rules, self.device)
        return self._open(region, rules)

    def _enter_xla(self) -> _Entry:
        engine = devices.engine()
        engine.device()
        engine.step_begins()
        rules = self._rules(engine)
        low = self._low(rules) if self.enabled else getattr(torch, rules.low)
        return self._open(torch.autocast(self.device, low, self.enabled, self.cache_enabled), rules)

    def _open(self, region: torch.autocast, rules: Policy | None) -> _Entry:
        """Enters the region; whatever fails leaves the state of this thread as it was."""
        with contextlib.ExitStack() as undo:
            if rules is not None:
                low = str(region.fast_dtype).removeprefix("torch.")
                made = regions.Region(policy=rules, low=low, enabled=self.enabled)
                undo.callback(regions.pop, regions.push(self.device, made))
            if self.enabled and not self._is_xla:
                undo.callback(native.drop_casts_after_steps().remove)
            native.enter(region)
            return _Entry(self, region, rules, undo.pop_all())


dynamo.graph_break(policies.override)


def reopened(region: regions.Region | None, device_type: str, dtype: torch.dtype) -> autocast:
    """A region with the rules of an earlier one, its overrides included."""
    again = autocast(device_type, dtype)
    again._effective = None if region is None else region.policy
    return again


@interrupts.deferred
def _leave(owner: autocast) -> Policy | None:
    """Undoes this thread's newest entry of `owner`; returns its rules, if any.

    Raises:
        RuntimeError: this thread has not entered it.
    """
    stack = _open.stack
    index = next((index for index in reversed(range(len(stack))) if stack[index].owner is owner), None)
    if index is None:
        raise RuntimeError(f"leaving {owner!r}: this thread has not entered it; leave a region in the thread it is for")
    entry = stack.pop(index)
    above = stack[index:]
    with entry.leave:
        if above:
            _leave_from_below(entry, above)
        else:
            entry.region.__exit__(None, None, None)
    return entry.rules


def _leave_from_below(entry: _Entry, above: list[_Entry]) -> None:
    """Closes a region while later ones stay open, as happens with suspended generators and coroutines.

    torch's state stays as the newest region set it; the region above inherits the state that this one would restore.
    """
    same = next((other for other in above if other.owner.device == entry.owner.device), None)
    if same is None:
        for name in base.DEVICE_TYPES if entry.region.device == base.LAZY else (entry.region.device,):
            torch.set_autocast_enabled(name, entry.region.prev)
            torch.set_autocast_dtype(name, entry.region.prev_fastdtype)
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
    events.warn(
        f"{names} set in the environment: torch_xla then stores every float tensor in that dtype, so the dtypes that "
        f"autocast chooses for each operation have no effect. Unset {names} when you use autocast",
    )
