"""A stream that programs take for a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True
