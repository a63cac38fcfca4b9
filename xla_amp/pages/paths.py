"""Paths for readers: layers ``h.0.attn``, ``h.1.attn``, ... as ``h.0-11.attn``, and lines of a notebook's cells."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_CELL = re.compile(r".*ipykernel_\d+[/\\]\d+\.py:(\d+)")
"""IPython's name for a line of a cell: a file that is not there, of the process."""


def line(location: str) -> str:
    """A line of the program, relative to the working directory if it is below; of a notebook's cell its number.

    Example:
        >>> line("/usr/lib/train.py:7"), line(f"{os.getcwd()}/train.py:7"), line("ipykernel_1/20.py:6")
        ('/usr/lib/train.py:7', 'train.py:7', 'cell, line 6')
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        location = location.removeprefix(os.path.join(os.getcwd(), ""))
    return _CELL.sub(r"cell, line \1", location)


def pattern(path: str) -> str:
    """The path with a star for each number: what equal layers have in common.

    Example:
        >>> pattern("h.0.attn")
        'h.*.attn'
    """
    return _NUMBER.sub("*", path)


def together(paths: Iterable[str]) -> str:
    """One path for paths of one `pattern`; if several of their numbers differ, a star for each of these.

    Example:
        >>> together(["h.0.attn", "h.1.attn", "h.2.attn", "h.5.attn"]), together(["a.0.b.1", "a.1.b.2"])
        ('h.0-2,5.attn', 'a.*.b.*')
    """
    first, *others = dict.fromkeys(paths)
    if not others:
        return first
    columns = [sorted({int(number) for number in column}) for column in zip(*map(_NUMBER.findall, (first, *others)))]  # noqa: B905
    several = sum(len(column) > 1 for column in columns) > 1
    texts = iter(["*" if several and len(column) > 1 else _ranges(column) for column in columns])
    return _NUMBER.sub(lambda _: next(texts), first)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
