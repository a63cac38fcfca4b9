"""Names, files and lines in MLIR locations.

The text of a location is parsed.  `name_str` and `filename` of jaxlib's classes end the process at a name that is not
UTF-8 (jaxlib 0.10.2), which the text escapes.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

_STRING: Final = r'"((?:[^"\\]|\\.)*)"'
_NAME: Final = re.compile(rf"{_STRING}(?=\(|$)")
"""A name, with what it is a name of; behind the name of a file is a colon."""
_LINE: Final = re.compile(rf"{_STRING}:(\d+):(\d+)")
_FRAME: Final = re.compile(rf"{_STRING}\({_STRING}:\d+")
_WITHOUT_FILE: Final = "-"
"""MLIR's name of the file of text that was parsed."""


class Frame(NamedTuple):
    """A function on the call stack of a location."""

    function: str
    file: str
    caller: str
    """Text of the location of the call; empty for the outermost function."""


class Location(NamedTuple):
    """A location of MLIR."""

    text: str
    """As MLIR writes it, without ``loc()``; empty if it is unknown."""

    @property
    def name(self) -> str | None:
        """The name of the place, ``jit(step)/encoder/dot_general``; None without one."""
        found = _NAME.match(self.text)
        return None if found is None else found[1]

    @property
    def line(self) -> str:
        """The innermost ``file:line``; empty without one.

        Example:
            >>> Location('"jit(f)/mul"(callsite("f"("/home/me/model.py":3:8 to :32) at "main"("run.py":1:0)))').line
            '/home/me/model.py:3'
        """
        found = _LINE.search(self.text)
        return "" if found is None or found[1] == _WITHOUT_FILE else f"{found[1]}:{found[2]}"

    @property
    def position(self) -> tuple[int, int] | None:
        """Line and column in text that was parsed, (0, 0) in bytecode; None for another location."""
        found = _LINE.fullmatch(self.text)
        return None if found is None or found[1] != _WITHOUT_FILE else (int(found[2]), int(found[3]))

    @property
    def frames(self) -> list[Frame]:
        """The call stack, the innermost function first."""
        return [
            Frame(found[1], found[2], self.text[found.end() :].partition(" at ")[2].rstrip(")"))
            for found in _FRAME.finditer(self.text)
        ]


def of(owner: Any) -> Location:
    """The location of an operation, a value or a diagnostic."""
    text = str(owner.location).removeprefix("loc(").removesuffix(")")
    return Location("" if text == "unknown" else text)
