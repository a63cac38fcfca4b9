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
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from xla_amp import policy as policies
from xla_amp.common import arguments, events, interrupts
from xla_amp.common.types import Cast
from xla_amp.engines import base, devices
from xla_amp.engines.base import Engine
from xla_amp.errors import AutocastWarning, DeviceError, UnsupportedDtypeError
from xla_amp.policy import Policy, effects, regions
from xla_amp.policy.load import default_name
from xla_amp.policy.policy import MEASURED
from xla_amp.pytorch.autocast import native_dispatch
from xla_amp.pytorch.autocast import recomputation as recomputation
from xla_amp.torch_common import dynamo

_SUSPENDED = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
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
            cpu, cuda, xpu, hpu and mps, operations whose rule differs from the device's own cast get a
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

    It decorates functions and methods.  Regions nest, and leaving one by an exception restores the earlier state.
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
        enabled = _check_flags(self.device, dtype, enabled, cache_enabled)
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
            _native_region(self.device, dtype, enabled, cache_enabled)
            if enabled and self._has_rules():
                self._low(self._native_rules())
        elif enabled:
            engine = devices.engine()
            if self._has_rules() or engine.is_started():
                self._low(self._rules(engine))
            elif dtype is not None:
                _check_dtype(self.device, dtype)

    def __repr__(self) -> str:
        given = {
            "dtype": self.dtype, "cache_enabled": self.cache_enabled, "policy": self.policy, "rules": self.rules
        }  # fmt: skip
        shown = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        return f"autocast({self.device!r}{', enabled=False' if not self.enabled else ''}{shown})"

    def __enter__(self) -> autocast:
        before = len(_open.stack)
        try:
            if self._is_xla:
                self._enter_xla()
            else:
                self._enter_native()
        except BaseException:
            if len(_open.stack) > before:  # a signal's handler raised after it
                _leave(self)
            raise
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
        if isinstance(function, type) or not callable(function):
            got = f"the class {function.__name__}" if isinstance(function, type) else f"{function!r}"
            raise TypeError(
                f"{self!r} used as a decorator expects a function, got {got}; decorate a method, e.g. forward, or "
                "write `with autocast(...):`"
            )
        if any(is_suspended(function) for is_suspended in _SUSPENDED):
            raise TypeError(
                f"{self!r} used as a decorator expects a function that returns when it has run; "
                f"{function.__name__} is suspended meanwhile: write `with autocast(...):` in it, around what computes"
            )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        decorated: _Function = inside  # type: ignore[assignment]
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
        _check_dtype(self.device, self.dtype)
        if str(self.dtype).removeprefix("torch.") not in rules.dtypes:
            legal = ", ".join(f"torch.{name}" for name in rules.dtypes)
            raise UnsupportedDtypeError(
                f"autocast({self.device!r}, dtype={self.dtype}): the policy {rules.name!r} offers {legal}, got "
                f"{self.dtype}; pass one of them, or policy= with one that offers it"
            )
        return self.dtype

    def _enter_native(self) -> None:
        rules = self._effective or self._native_rules()
        low = self._low(rules) if self.enabled and self._has_rules() and rules is not None else self.dtype
        region = _native_region(self.device, low, self.enabled, self.cache_enabled)
        self._open(region, rules)

    def _enter_xla(self) -> None:
        engine = devices.engine()
        engine.device()
        engine.step_begins()
        rules = self._rules(engine)
        low = self._low(rules) if self.enabled else getattr(torch, rules.low)
        self._open(torch.autocast(self.device, low, self.enabled, self.cache_enabled), rules)

    @interrupts.deferred
    def _open(self, region: torch.autocast, rules: Policy | None) -> None:
        """Enters the region; whatever fails leaves the state of this thread as it was."""
        with contextlib.ExitStack() as undo:
            if rules is not None:
                low = str(region.fast_dtype).removeprefix("torch.")
                made = regions.Region(policy=rules, low=low, enabled=self.enabled)
                undo.callback(regions.pop, regions.push(self.device, made))
            if self.enabled and not self._is_xla:
                undo.callback(_drop_casts_after_steps().remove)
            _enter(region)
            _open.stack.append(_Entry(self, region, rules, undo.pop_all()))


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


# ---- regions of torch ------------------------------------------------------------------------------------------------
# torch disables autocast with a warning where it does not support the dtype or the device; here both are errors, but
# for float32.

_LOW_DTYPES = (torch.bfloat16, torch.float16)
"""Low dtypes that torch's autocast accepts on each of these devices."""


def has_autocast(device_type: str) -> bool:
    """Whether this torch has autocast for the device type (not whether such a device is present).

    Raises:
        DeviceArgumentError: torch knows no device of that name.
    """
    try:
        return bool(torch.amp.is_autocast_available(device_type))
    except RuntimeError as error:
        raise devices.DeviceArgumentError(
            f"autocast: torch knows no device type {device_type!r}; expected 'cuda', 'cpu', 'xpu', 'hpu', 'mps', "
            "or 'xla' for the active XLA device"
        ) from error


def _check_device(device_type: str) -> None:
    """Raises unless a region on `device_type` would have an effect.

    Raises:
        DeviceError: torch has no autocast for it, or it is ``cuda`` and there is no CUDA device.
    """
    if not has_autocast(device_type):
        raise DeviceError(f"User specified an unsupported autocast device_type '{device_type}'")
    if device_type == "cuda" and not torch.cuda.is_available():
        beside = ""
        if find_spec("torch_xla") is not None:
            beside = " (torch_xla is installed, but autocast('cuda') does not affect tensors on an XLA device)"
        raise DeviceError(
            f"autocast('cuda'): there is no CUDA device, so autocast would do nothing{beside}. Pass the device that "
            "your tensors are on, e.g. autocast(tensor.device) or autocast('xla'), or enabled=False for no "
            "mixed precision"
        )


def _check_dtype(device_type: str, dtype: object) -> None:
    """Raises unless `dtype` can be the low dtype on `device_type`.

    Raises:
        UnsupportedDtypeError: it cannot; the message names those that can.
    """
    if dtype not in _LOW_DTYPES:
        raise UnsupportedDtypeError(
            f"autocast({device_type!r}, dtype={dtype!r}): expected torch.bfloat16 or torch.float16, got {dtype!r} "
            f"({type(dtype).__name__}); to switch autocast off pass enabled=False"
        )
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise UnsupportedDtypeError(
            "autocast('cuda', dtype=torch.bfloat16): this CUDA device has no bfloat16; pass dtype=torch.float16"
        )


def _check_flags(device_type: str, dtype: object, enabled: object, cache_enabled: object) -> bool:
    """Whether a region is enabled: `enabled`, but with the low dtype float32 False and a warning, as torch does.

    Raises:
        TypeError: a flag is not a bool.
    """
    if isinstance(dtype, bool) and isinstance(enabled, torch.dtype):
        raise TypeError(
            f"autocast({device_type!r}, {dtype}, {enabled}): the order is autocast(device, dtype, enabled), torch's; "
            f"torch_xla's is autocast(device, enabled, dtype). Type autocast({device_type!r}, {enabled}, {dtype})"
        )
    for name, flag in (("enabled", enabled), ("cache_enabled", False if cache_enabled is None else cache_enabled)):
        if not isinstance(flag, bool):
            raise TypeError(
                f"autocast({device_type!r}, {name}={flag!r}): expected True or False, got {type(flag).__name__}"
            )
    if enabled and dtype is torch.float32:
        events.warn(
            f"autocast({device_type!r}, dtype=torch.float32): Disabling autocast, whose low dtypes are torch.bfloat16 "
            "and torch.float16. For float32 pass enabled=False",
            AutocastWarning,
        )
        return False
    return bool(enabled)


def _enter(region: torch.autocast) -> None:
    """Enters the region of torch, which leaves its state half set if entering fails; here it is restored."""
    name = region.device
    before = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name), torch.is_autocast_cache_enabled()
    depth = _depth()
    try:
        region.__enter__()
    except BaseException:
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(name, before[0])
        torch.set_autocast_dtype(name, before[1])
        torch.set_autocast_cache_enabled(before[2])
        raise


def _depth() -> int:
    """How many regions are open in this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _native_region(
    device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
) -> torch.autocast:
    """A new checked `torch.autocast`.  New for each entry, because torch keeps the state to restore on the instance.

    Args:
        dtype: low dtype; None is torch's default for the device type.
        enabled: False gives a region without mixed precision, which needs neither the device nor the dtype.
        cache_enabled: whether torch caches casts of weights until the outermost region ends; None leaves it unchanged.

    Raises:
        DeviceError: the region would have no effect.
        UnsupportedDtypeError: the device has no such low dtype.
    """
    if not enabled:
        has_autocast(device_type)
        return torch.autocast(device_type, None, False, cache_enabled)
    _check_device(device_type)
    if dtype is not None:
        _check_dtype(device_type, dtype)
    return torch.autocast(device_type, dtype, True, cache_enabled)


def _drop_casts_after_steps() -> RemovableHandle:
    """Clears torch's cache of weight casts after every optimizer step, until the handle is removed.

    torch caches a weight's cast until the outermost region ends.  In a region of several training steps, each later
    step would use the weights of the first.
    """
    return register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())
