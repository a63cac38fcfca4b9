"""Count the Python calls that a function makes inside of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import xla_amp

ROOT = Path(xla_amp.__file__).parent.parent
FOLDERS = (f"{ROOT / 'xla_amp'}/", f"{ROOT / 'lowering'}/", "<")
"""Of the package's files; generated code has no file."""


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
