"""Numbers, shapes and dtypes as text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_LONG = re.compile(r"^(b?f|c|i|u)[a-z]+(?=\d)")
"""The letters of a dtype's name in torch and JAX; the group stays."""
_DIGITS = re.compile(r"\d+")


def size(number: float) -> str:
    """``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def flops(number: float) -> str:
    """``1.5 GFLOP``, a number of floating-point operations."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}FLOP"
        number /= 1000
    return f"{number:.3g} PFLOP"


def error(number: float) -> str:
    """``3.1e-03``, and 0 as 0."""
    return "0" if number == 0 else f"{number:.1e}"


def shape(sizes: tuple[int, ...]) -> str:
    """``8x128``; ``scalar``; ``?`` for a size that is not known."""
    return "x".join("?" if size < 0 else str(size) for size in sizes) or "scalar"


def shapes(operands: Iterable[tuple[int, ...]], results: Iterable[tuple[int, ...]]) -> str:
    """``4x8, 8x8 -> 4x8``; empty if neither is known."""
    return " -> ".join(filter(None, (", ".join(map(shape, each)) for each in (operands, results))))


def short(dtype: str) -> str:
    """``bf16`` for ``bfloat16``."""
    return _LONG.sub(r"\1", dtype)


@functools.cache
def bits(dtype: str) -> int:
    """Bits of one element in memory, by a dtype's name in torch, JAX or MLIR.

    Example:
        >>> bits("bfloat16"), bits("f8E4M3FN"), bits("bool"), bits("complex64"), bits("i1")
        (16, 8, 8, 64, 8)
    """
    found = _DIGITS.search(dtype)
    if found is None or dtype == "i1":
        return 64 if dtype == "index" else 8
    number = int(found[0])
    return 2 * number if dtype.startswith("complex<") else number


def is_floating(dtype: str) -> bool:
    """Whether it is a floating-point or complex dtype, by its name in torch, JAX or MLIR."""
    return dtype.startswith(("float", "bfloat", "complex", "bf", "f")) and dtype != "function"


def is_low(dtype: str) -> bool:
    """Whether it is a floating-point dtype of at most 16 bits."""
    return is_floating(dtype) and not dtype.startswith("complex") and bits(dtype) <= 16
