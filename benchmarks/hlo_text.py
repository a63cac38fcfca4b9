"""Parse the text of optimized HLO: its instructions, and the dtypes of contractions."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final, NamedTuple

_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_OPERAND: Final = re.compile(r"%([\w.\-]+)")
_SHAPE: Final = re.compile(r"\b([a-z]+[0-9]*\w*)\[([\d,]*)\]")
_LIBRARY: Final = re.compile(r'custom_call_target="__(?:cublas|cudnn)[^"]*"')
_DTYPES: Final = MappingProxyType({"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"})
_BYTES: Final = MappingProxyType({"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "s4": 1, "u4": 1})


class HloInstruction(NamedTuple):
    """One line of HLO text."""

    name: str
    type: str
    """As in the text, with layout; a tuple in parentheses."""
    operation: str
    rest: str
    """Operands and attributes."""

    @property
    def dtype(self) -> str:
        """dtype of the result, or of a tuple's first element."""
        found = _SHAPE.search(self.type)
        return _DTYPES.get(found[1], found[1]) if found else "?"

    @property
    def shape(self) -> list[int]:
        """Sizes of the result, or of a tuple's first element."""
        found = _SHAPE.search(self.type)
        return [int(size) for size in found[2].split(",") if size] if found else []

    @property
    def bytes(self) -> int:
        """Bytes of the result, of all elements of a tuple."""
        return sum(
            math.prod(int(size) for size in dimensions.split(",") if size) * _width(dtype)
            for dtype, dimensions in _SHAPE.findall(self.type)
        )

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _OPERAND.findall(self.rest.partition(")")[0])


def _width(dtype: str) -> int:
    return _BYTES[dtype] if dtype in _BYTES else max(1, int(re.sub(r"\D", "", dtype.partition("e")[0]) or 8) // 8)


def instructions(hlo: str) -> Iterator[HloInstruction]:
    """Every instruction of every computation; names are unique within a module."""
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            yield HloInstruction(*found.groups())


def contractions(hlo: str) -> collections.Counter[tuple[str, str, str]]:
    """Matrix products, convolutions and library calls for them by (left, right, result) dtype."""
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    dtypes: dict[str, str] = {}
    for each in instructions(hlo):
        dtypes[each.name] = each.dtype
        if each.operation in ("dot", "convolution") or (each.operation == "custom-call" and _LIBRARY.search(each.rest)):
            left, right = (dtypes.get(operand, "?") for operand in each.operands[:2])
            found[left, right, each.dtype] += 1
    return found
