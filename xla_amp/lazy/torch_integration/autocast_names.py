"""`torch.autocast` on the lazy device: under its own name, under torch_xla's, and opened for another device.

``torch.autocast("xla")`` is ``torch.autocast("jax")``: a region of either sets torch's state of both.  A region for
another device, which casts no tensor of this one, is reported once.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import torch

from xla_amp.backends import dynamo
from xla_amp.common import events
from xla_amp.errors import AutocastWarning
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import pjrt
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.policy import resolve
from xla_amp.policy.load import default_name

NAMES = (DEVICE_TYPE, "xla")
"""What `torch.autocast` calls the lazy device."""

_UNCAST = -1
"""The position of a region of another device in which operations of this one were recorded."""


@dataclasses.dataclass
class Other:
    """An open region of another device."""

    region: torch.autocast
    position: int | None
    """Position of the trace when it was entered; None if a region of the lazy device encloses it."""


class _Thread(threading.local):
    """Regions of one thread."""

    def __init__(self) -> None:
        self.others: list[Other] = []
        """The open regions of other devices, innermost last."""


_thread = _Thread()
_reported = False


def _position() -> int:
    return trace.ended + trace.count  # a flush, as of a value that is read, does not change it


def _note_uncast() -> None:
    others = _thread.others
    if others and others[-1].position not in (None, _position()):
        others[-1].position = _UNCAST


def _report(name: str) -> None:
    global _reported
    if not _reported:
        _reported = True
        events.warn(
            f"torch.autocast({name!r}) does not cast tensors of the device {DEVICE_TYPE!r}: the operations on them "
            f"inside kept the dtypes of their inputs. Write torch.autocast({DEVICE_TYPE!r}), or "
            f"xla_amp.autocast({DEVICE_TYPE!r})",
            AutocastWarning,
        )


def install() -> None:
    """Replaces the methods of `torch.autocast`; the low dtype of this thread becomes the device's."""
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        entered = enter(self)
        if self.device in NAMES:
            _same_state(self.device)
            _note_uncast()
        elif torch.is_autocast_enabled(self.device):
            _thread.others.append(Other(self, None if torch.is_autocast_enabled(DEVICE_TYPE) else _position()))
        return entered

    @functools.wraps(leave)
    def __exit__(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        result = leave(self, kind, error, traceback)
        others = _thread.others
        if self.device in NAMES:
            _same_state(self.device)
            if others and others[-1].position not in (None, _UNCAST):
                others[-1].position = _position()
        elif any(other.region is self for other in others):
            _note_uncast()
            while (last := others.pop()).region is not self:  # its program did not leave it
                pass
            if last.position == _UNCAST and kind is None:
                _report(self.device)
        return result

    for method in (__enter__, __exit__):
        setattr(torch.autocast, method.__name__, dynamo.skip(method))
    low = getattr(torch, resolve(default_name(pjrt.platform())).low)
    for name in NAMES:
        torch.set_autocast_dtype(name, low)


def _same_state(name: str) -> None:
    """Gives both names the autocast state that `name` has in this thread."""
    for other in NAMES:
        if other != name:
            torch.set_autocast_enabled(other, torch.is_autocast_enabled(name))
            torch.set_autocast_dtype(other, torch.get_autocast_dtype(name))
