"""Checkpoints of sharded and of ordinary state: ``from xla_amp.checkpoint import load, save``."""

from typing import TYPE_CHECKING

from xla_amp import public_names as _names
from xla_amp.lazy.layouts.checkpoint import latest as latest
from xla_amp.lazy.layouts.checkpoint import load as load
from xla_amp.lazy.layouts.checkpoint import save as save
from xla_amp.lazy.layouts.checkpoint import save_async as save_async

__all__ = ["latest", "load", "save", "save_async"]

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> object:
        raise _names.missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__
