"""What runs meanwhile: Python calls inside of the package, and what JAX traces and compiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import jax

import xla_amp

ROOT = Path(xla_amp.__file__).parent.parent
FOLDERS = (f"{ROOT / 'xla_amp'}/", f"{ROOT / 'lowering'}/", "<")
"""Of the package's files; generated code has no file."""

COMPILED = "/jax/core/compile/backend_compile_duration"
TRACED = "/jax/core/compile/jaxpr_trace_duration"


def of(function: Callable[[], object]) -> list[str]:
    """The calls of functions of the package while `function` runs, as ``file:function``, in order."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if event == "call" and file.startswith(FOLDERS) and (file[0] != "<" or not name or name.startswith("xla_amp")):
            found.append(f"{file.removeprefix(f'{ROOT}/')}:{frame.f_code.co_qualname}")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@contextlib.contextmanager
def jax_events() -> Iterator[list[str]]:
    """Names of the timed events that JAX reports meanwhile."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
