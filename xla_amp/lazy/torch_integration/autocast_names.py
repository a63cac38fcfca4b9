"""`torch.autocast` on the lazy device, under its own name and under torch_xla's.

``torch.autocast("xla")`` is ``torch.autocast("jax")``: a region of either sets torch's state of both.  A region of
another device casts nothing of the lazy one; where low operations were recorded in it, its line is warned of once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer

from xla_amp.common import events
from xla_amp.errors import AutocastWarning
from xla_amp.lazy.graph.tape import Position, Tape
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import pjrt
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import Policy, resolve
from xla_amp.policy.load import default_name
from xla_amp.torch_common import dynamo

NAMES = (DEVICE_TYPE, "xla")
"""What `torch.autocast` calls the lazy device."""
_OTHER_NAME = dict(zip(NAMES, reversed(NAMES), strict=True))


def set_low_dtype() -> None:
    """The low dtype of this thread becomes the device's, under both names."""
    low = getattr(torch, resolve(default_name(pjrt.platform())).low)
    for name in NAMES:
        torch.set_autocast_dtype(name, low)
    optimizer.register_optimizer_step_pre_hook(_look)  # a region around a whole loop


def remember_asked(original: Callable[..., Any], cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.autocast.__new__`: `__init__` switches "cuda" off where there is none, as scripts ask for it nevertheless.

    `__init__` itself warns at the line of its caller.
    """
    region = original(cls)
    region._xla_amp_asked = kwargs.get("enabled", args[2] if len(args) > 2 else True)
    return region


def keep_signature() -> None:
    """Dynamo binds arguments by the signature of the class, which is that of `__new__` where there is one."""
    new: Any = torch.autocast.__new__
    new.__signature__ = inspect.signature(torch.autocast.__init__)


def entering(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Both names get the state of the one that it has; a region of another device is watched."""

    def enter(self: Any) -> Any:
        result = original(self)
        if (other := _OTHER_NAME.get(self.device)) is not None:
            torch.set_autocast_enabled(other, torch.is_autocast_enabled(self.device))
            torch.set_autocast_dtype(other, torch.get_autocast_dtype(self.device))
            _open.regions.clear()  # in a region of another device, what follows is cast
        elif (torch.is_autocast_enabled(self.device) or getattr(self, "_xla_amp_asked", False)) and not _is_on():
            frame = events.user_frame(events.LIBRARIES)
            line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<unknown>", 0)
            if line not in _told and threading.current_thread() is threading.main_thread():
                _open.regions.append(_Region(self, line, trace.generation, Position.now()))
        return result

    return enter


def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Both names get the state of the one that it has; warns of a region of another device."""

    def leave(self: Any, *error: Any) -> Any:
        result = original(self, *error)
        if (other := _OTHER_NAME.get(self.device)) is not None:
            torch.set_autocast_enabled(other, torch.is_autocast_enabled(self.device))
            torch.set_autocast_dtype(other, torch.get_autocast_dtype(self.device))
        if _open.regions and any(region.owner is self for region in _open.regions):
            _look()
            _open.regions[:] = [region for region in _open.regions if region.owner is not self]
        return result

    return leave


def _is_on() -> bool:
    return torch.is_autocast_enabled(DEVICE_TYPE)


@dataclasses.dataclass(frozen=True)
class _Region:
    """An open region of another device."""

    owner: Any
    line: tuple[str, int]
    generation: object
    begin: Position
    """Where the trace of that generation was when the region began."""


class _Open(threading.local):
    def __init__(self) -> None:
        self.regions: list[_Region] = []


_open = _Open()
_told: set[tuple[str, int]] = set()


def _look(*_: Any) -> None:
    """Warns of the open regions of other devices in which float32 operations were recorded that ours would cast."""
    for region in _open.regions:
        begin = region.begin if region.generation is trace.generation else Position()
        if (
            region.line not in _told
            and len(trace.code) > begin.code
            and _has_products(Tape(trace.code[begin.code :], begin))
        ):
            _told.add(region.line)
            events.warn(
                f"autocast({region.owner.device!r}) casts nothing of tensors on the XLA device: products inside were "
                f'float32. Write xla_amp.autocast(xla_amp.xla_device()), or torch.autocast("{DEVICE_TYPE}")',
                AutocastWarning,
                at=region.line,
            )


def _has_products(tape: Tape) -> bool:
    """Whether it has a float32 result of an operation that the device's policy casts to the low dtype."""
    cast = _low_operations(resolve(default_name(pjrt.platform())))
    results = ((node.instruction.name.partition(".")[0], out) for node in tape for out in node.instruction.outs)
    return any(name in cast and out is not None and out.dtype is torch.float32 for name, out in results)


@functools.lru_cache(maxsize=64)
def _low_operations(rules: Policy) -> frozenset[str]:
    return frozenset(name for name in rules.ruled() if rules.decide(name).cast == "low")


dynamo.skip(_look)
