"""Kernels of libraries that a compiler or driver may refuse; then another form computes their calls.

A kernel that was compiled for an absent GPU may still fail on a real one: an old driver, a library without a plan for
the shape.  When a compiler fails, call `refuse` with its error; if it names a kernel, build the program again, without
that kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MARKS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cudnn": ("cudnn", "fmha"),
        "flash": ("mosaic", "tpu_custom_call"),
        "splash": ("mosaic", "tpu_custom_call"),
    }
)
"""Kernel -> words, in lower case, by one of which a compiler's error names it."""

refused: dict[str, str] = {}
"""Kernel -> the error; it is left out for the rest of the process."""
_traced: set[str] = set()


def traced(name: str) -> None:
    """Notes that a program contains the kernel `name`; other names have no effect."""
    if name in MARKS:
        _traced.add(name)


def refuse(error: str) -> str:
    """Leaves out the kernels in use that a compiler's `error` names; a sentence for the user, "" if it names none."""
    text = error.lower()
    names = [name for name in sorted(_traced) if any(word in text for word in MARKS[name])]
    _traced.difference_update(names)
    refused.update(dict.fromkeys(names, error))
    if not names:
        return ""
    first = error.strip().partition("\n")[0]
    return (
        f"the kernel {' and '.join(map(repr, names))} was refused ({first:.300}); another "
        "form computes its calls from now on, with more memory. xla_amp.lowering.kernels.refused has the whole error"
    )
