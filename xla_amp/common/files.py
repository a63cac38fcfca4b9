"""Folders of our own, and text from files: what a stranger can write runs no code, and is refused with a message."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xla_amp.errors import FileError

PRIVATE = 0o700
"""Mode of folders whose files run as code, or hold a user's data."""


def own_folder(path: str | os.PathLike[str], call: str) -> Path:
    """Makes a folder that only this user reads and writes, or checks an existing one; returns its real path.

    Args:
        path: the folder; its parents are made as well, for this user alone.
        call: what asks for it, for errors.

    Raises:
        FileError: it cannot be made or written, or other users can put files there: they write it, or own it.
    """
    folder = Path(path).expanduser().absolute()
    try:
        for made in (*reversed(folder.parents), folder):  # `mkdir(parents=True)` has no mode for parents
            if not made.exists():
                made.mkdir(mode=PRIVATE, exist_ok=True)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        folder = folder.resolve(strict=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:
        raise FileError(f"{call}: the folder {str(folder)!r} cannot be made: {error}; name another one") from error
    if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
        raise FileError(
            f"{call}: the folder {str(folder)!r} belongs to user {found.st_uid}, who could put programs there that "
            "this process runs; name a folder of yours"
        )
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise FileError(
                f"{call}: other users can write {str(parent)!r} (mode {stat.S_IMODE(mode):04o}), and could put another "
                f"folder in the place of {str(folder)!r}; chmod o-w {parent}, or name another one"
            )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FileError(
            f"{call}: other users can write the folder {str(folder)!r} (mode {stat.S_IMODE(found.st_mode):04o}), and "
            f"could put programs there that this process runs; chmod 700 {folder}, or name another one"
        )
    if not os.access(folder, os.W_OK):
        raise FileError(f"{call}: the folder {str(folder)!r} cannot be written; name another one, or change its mode")
    return folder


def parsed(loads: Callable[[Any], Any], text: str | bytes) -> Any:
    """``loads(text)`` of `json` or `tomllib`, every failure of which is a ValueError.

    Raises:
        ValueError: the text is malformed, nested deeper than Python's stack, or has a number of thousands of digits.
    """
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
