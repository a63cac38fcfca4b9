"""Check arguments of public functions where they are given, so that no error comes from deep inside."""

from __future__ import annotations

import numbers
import os

PATH = (str, os.PathLike)
SUM_DTYPE = (
    "expected a floating dtype of 16 bits or more, e.g. {}.bfloat16 (a sum in 8 bits keeps 2 or 3 digits of each part, "
    "and XLA has no scale for it)"
)
_SHORT = (str, int, float, list, tuple, dict, type(None))
"""Types whose values are shown."""
_NUMBERS: dict[type, type] = {int: numbers.Integral, float: numbers.Real}
"""NumPy's numbers are numbers, too."""


def require(call: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Checks the type of one argument; a bool is no number.

    Args:
        call: what the user called, with the argument: ``"make_mesh(axes=...)"``.
        value: the argument.
        kinds: types that it may have.
        expected: what to type instead, in words or as code.

    Raises:
        TypeError: `value` is of another type.
    """
    allowed = tuple(_NUMBERS.get(kind, kind) for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise TypeError(f"{call}: expected {expected}, got {_shown(value)}")


def require_function(call: str, value: object, expected: str = "a function") -> None:
    """Checks that an argument can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{call}: expected {expected}, got {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})" if isinstance(value, _SHORT) else f"a {type(value).__name__}"
