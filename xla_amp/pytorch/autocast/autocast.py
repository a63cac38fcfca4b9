"""`autocast`: context manager and decorator whose operations run in the dtypes of a policy.

Each entry opens a new `torch.autocast`, which sets torch's per-thread state, so nesting, `torch.is_autocast_enabled`
and export behave as usual.  The entry also sets the rules that our kernels follow (`xla_amp.pytorch.autocast.kernels`).

Open entries are kept on a stack per thread, never on the `autocast` object.  The object can therefore be entered again
while it is open, used by several threads, and decorate a recursive function.
"""

from __future__ import annotations

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
from xla_amp.common import arguments, config, events, interrupts
from xla_amp.common.types import Cast
from xla_amp.engines import base, devices
from xla_amp.engines.base import Engine
from xla_amp.errors import AutocastWarning, DeviceError, UnsupportedDtypeError
from xla_amp.policy import Policy, effects, regions
from xla_amp.policy.load import default_name
from xla_amp.policy.policy import MEASURED
from xla_amp.policy.resolve import overrides, rule_items
from xla_amp.pytorch.autocast import kernels
from xla_amp.pytorch.autocast import scopes as scopes
from xla_amp.torch_common import dynamo

_SUSPENDED = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Resolved:
    """What the arguments of a region mean under the settings and overrides of one moment."""

    state: tuple[Any, ...] | None
    """These settings and overrides; None where they are not known, because the engine had not been started."""
    device: str
    engine: Engine | None = None
    """Of an XLA device."""
    low: torch.dtype | None = None
    """None: torch's own when the region is entered, which belongs to the thread."""
    policy: Policy | None = None
    """The effective policy; None where no table lists what torch does."""
    region: regions.Region | None = None
    """`policy` with `low`, unless that is None."""
    lasts: bool = False
    """Whether other settings and overrides leave it as it is (`reopened`)."""


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One open entry of a region."""

    owner: autocast
    region: torch.autocast
    rules: Policy | None
    token: regions.Token | None
    """Of our region, if it has rules."""
    hook: RemovableHandle | None
    """Of `_drop_casts_after_steps`."""

    def close(self) -> None:
        """Undoes everything but `region`."""
        try:
            if self.hook is not None:
                self.hook.remove()
        finally:
            if self.token is not None:
                regions.pop(self.token)


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
        if not (
            isinstance(device_type, str | torch.device)
            and isinstance(enabled, bool)
            and (cache_enabled is None or isinstance(cache_enabled, bool))
            and (dtype is None or (isinstance(dtype, torch.dtype) and dtype is not torch.float32))
            and isinstance(strict, bool)
            and (rules is None or isinstance(rules, Mapping))
        ):
            enabled = _check(device_type, dtype, enabled, cache_enabled, rules, strict)
        self.dtype = dtype
        self.enabled = enabled
        self.cache_enabled = cache_enabled
        self.policy = None if policy is None or policy == policies.DEFAULT else policies.load(policy)
        self.rules = None if rules is None else dict(rules)
        self.strict = strict
        items = None if rules is None else rule_items(rules)
        self._arguments = device_type, dtype if enabled else None, enabled, self.policy, items
        self._resolved = _resolve(*self._arguments, (config.of_regions(), overrides.open))
        self.device = self._resolved.device

    def __repr__(self) -> str:
        given = {
            "dtype": self.dtype, "cache_enabled": self.cache_enabled, "policy": self.policy, "rules": self.rules
        }  # fmt: skip
        shown = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        return f"autocast({self.device!r}{', enabled=False' if not self.enabled else ''}{shown})"

    def __enter__(self) -> autocast:
        resolved = self._resolved
        if resolved.state != (config.of_regions(), overrides.open) and not resolved.lasts:
            resolved = self._resolve()
        if resolved.engine is not None:
            resolved.engine.step_begins()
        before = len(_open.stack)
        try:
            _enter(self, resolved)
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

    def _resolve(self) -> _Resolved:
        """Resolves it under the present settings and overrides, and starts the engine of an XLA device."""
        state = config.of_regions(), overrides.open
        resolved = _resolve(*self._arguments, state)
        if resolved.state is None:
            assert resolved.engine is not None  # noqa: S101  (what an engine has not been started for)
            resolved.engine.device()
            _resolve.cache_clear()
            resolved = _resolve(*self._arguments, state)
        self._resolved, self.device = resolved, resolved.device
        return resolved

    def __getstate__(self) -> dict[str, Any]:
        """An engine is a module, which cannot be pickled."""
        return {**vars(self), "_resolved": _Resolved(state=None, device=self.device)}


@functools.lru_cache(maxsize=256)
def _resolve(
    device_type: str | torch.device,
    dtype: torch.dtype | None,
    enabled: bool,
    policy: Policy | None,
    rules: tuple[tuple[str, Cast], ...] | None,
    state: tuple[Any, ...],
) -> _Resolved:
    """What `autocast` means with these arguments; `state`: the settings and overrides that are in force."""
    device = devices.device_type(device_type)
    own = None if rules is None else dict(rules)
    has_rules = policy is not None or own is not None
    engine = devices.engine() if devices.is_xla(device) else None
    effective: Policy | None
    if engine is None:
        _check_native(device, dtype, enabled)
        effective = kernels.rules(device, policy, own)
    else:
        if not (engine.is_started() or (enabled and has_rules)):
            if enabled and dtype is not None:
                _check_dtype(device, dtype)
            return _Resolved(state=None, device=device, engine=engine)  # its platform may not be known
        effective = policies.resolve(policy or default_name(engine.platform()), own)
    low = dtype
    if effective is not None and (engine is not None or (enabled and has_rules)):
        low = _low(device, dtype, effective)
    region = None
    if effective is not None and low is not None:
        region = _region(effective, low, enabled)
    return _Resolved(
        state=state if engine is None or engine.is_started() else None,
        device=device,
        engine=engine,
        low=low,
        policy=effective,
        region=region,
    )


def _low(device_type: str, dtype: torch.dtype | None, rules: Policy) -> torch.dtype:
    if dtype is None:
        low: torch.dtype = getattr(torch, rules.low)
        return low
    _check_dtype(device_type, dtype)
    if str(dtype).removeprefix("torch.") not in rules.dtypes:
        legal = ", ".join(f"torch.{name}" for name in rules.dtypes)
        raise UnsupportedDtypeError(
            f"autocast({device_type!r}, dtype={dtype}): the policy {rules.name!r} offers {legal}, got "
            f"{dtype}; pass one of them, or policy= with one that offers it"
        )
    return dtype


def _region(rules: Policy, low: torch.dtype, enabled: bool) -> regions.Region:
    return regions.Region(policy=rules, low=str(low).removeprefix("torch."), enabled=enabled)


dynamo.graph_break(policies.override)


def reopened(region: regions.Region | None, device_type: str, dtype: torch.dtype) -> autocast:
    """A region with the rules of an earlier one, its overrides included."""
    again = autocast(device_type, dtype)
    if region is not None:
        same = _region(region.policy, dtype, True)
        again._resolved = dataclasses.replace(again._resolved, policy=region.policy, region=same, lasts=True)
    return again


@interrupts.deferred
def _enter(owner: autocast, resolved: _Resolved) -> None:
    """Opens an entry of `owner`; whatever fails leaves the state of this thread as it was."""
    device, cache = resolved.device, owner.cache_enabled
    low = resolved.low or torch.get_autocast_dtype(device)
    region = object.__new__(torch.autocast)
    made = _torch_region(device, low, owner.enabled, torch.is_autocast_cache_enabled() if cache is None else cache)
    vars(region).update(vars(made))
    rules = resolved.policy
    ours = resolved.region if rules is None or resolved.region is not None else _region(rules, low, owner.enabled)
    token = None if ours is None else regions.push(device, ours)
    entry = _Entry(owner, region, rules, token, None)
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    try:
        if owner.enabled and resolved.engine is None:
            entry.hook = _drop_casts_after_steps()
        region.__enter__()
    except BaseException:  # torch leaves its state half set
        while torch.autocast_increment_nesting() > depth:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])
        entry.close()
        raise
    _open.stack.append(entry)


@functools.lru_cache(maxsize=64)
def _torch_region(device_type: str, low: torch.dtype, enabled: bool, cache_enabled: bool) -> torch.autocast:
    """A region of torch to copy: each entry needs its own, because torch keeps the state to restore on it."""
    return torch.autocast(device_type, low, enabled, cache_enabled)


@interrupts.deferred
def _leave(owner: autocast) -> Policy | None:
    """Undoes this thread's newest entry of `owner`; returns its rules, if any.

    Raises:
        RuntimeError: this thread has not entered it.
    """
    stack = _open.stack
    index = len(stack) - 1
    while index >= 0 and stack[index].owner is not owner:
        index -= 1
    if index < 0:
        raise RuntimeError(f"leaving {owner!r}: this thread has not entered it; leave a region in the thread it is for")
    entry = stack.pop(index)
    above = stack[index:]
    try:
        if above:
            _leave_from_below(entry, above)
        else:
            entry.region.__exit__(None, None, None)
    finally:
        entry.close()
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


def _check(given: Any, dtype: Any, enabled: Any, cache_enabled: Any, rules: Any, strict: Any) -> bool:
    """Whether a region is enabled: `enabled`, but with the low dtype float32 False and a warning, as torch does.

    Raises:
        DeviceError: `given` is no device.
        TypeError: an argument is of another type.
        UnsupportedDtypeError: `dtype` is no dtype.
    """
    device_type = devices.device_type(given)
    arguments.require("autocast(strict=...)", strict, bool, "True or False")
    arguments.require("autocast(rules=...)", rules, (Mapping, type(None)), 'a mapping such as {"tanh": "fp32"}')
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
    if enabled and dtype is not None:
        _check_dtype(device_type, dtype)
    return bool(enabled)


def _check_native(device_type: str, dtype: torch.dtype | None, enabled: bool) -> None:
    """Raises unless torch can open a region; one without mixed precision needs neither the device nor the dtype.

    Raises:
        DeviceError: the region would have no effect.
        UnsupportedDtypeError: the device has no such low dtype.
    """
    if not enabled:
        has_autocast(device_type)
        return
    _check_device(device_type)
    if dtype is not None:
        _check_dtype(device_type, dtype)


def _drop_casts_after_steps() -> RemovableHandle:
    """Clears torch's cache of weight casts after every optimizer step, until the handle is removed.

    torch caches a weight's cast until the outermost region ends.  In a region of several training steps, each later
    step would use the weights of the first.
    """
    return register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())
