"""HLO, the form in which XLA keeps and dumps programs, converted to StableHLO by jaxlib.

An XLA dump (``XLA_FLAGS=--xla_dump_to=DIRECTORY``) has it as text and, with ``--xla_dump_hlo_as_proto``, as protocol
buffers: an ``HloModuleProto``, or an ``HloProto`` around one.  Optimized programs have operations that StableHLO lacks
(fusions, calls of libraries); the program before optimizations has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import ir

Form: TypeAlias = Literal["HLO text", "HLO proto"]

_HEAD: Final = 4096
"""Bytes that tell a protocol buffer from text."""
TEXT: Final = frozenset(b"\t\n\v\f\r\x1b")
"""Control characters of text."""
_ENTRY_NAME: Final = 2
"""Field of an ``HloModuleProto``, always there; an ``HloProto`` has no such field."""
_MODULE: Final = 1
"""Field of an ``HloProto``."""


def form(data: bytes) -> Form | None:
    """Which form of HLO the bytes are; None for others."""
    if data[:_HEAD].lstrip().startswith(b"HloModule"):
        return "HLO text"
    # A protocol buffer begins with the tag of its first field, a line feed, and has bytes that text has not.
    if data.startswith(b"\n") and any(byte < 32 and byte not in TEXT for byte in data[:_HEAD]):
        return "HLO proto"
    return None


def parse(data: bytes, form: Form, name: str) -> ir.MlirModule:
    """The StableHLO module of an HLO program.

    Raises:
        ModuleError: it cannot be read, or has operations that StableHLO lacks; `name` opens the message.
    """
    from jax.extend import mlir
    from jaxlib import _hlo  # type: ignore[attr-defined]

    try:
        if form == "HLO text":
            proto = _hlo.hlo_module_from_text(data.decode()).as_serialized_hlo_module_proto()
        else:
            proto = _module_proto(data)
        converted = mlir.hlo_to_stablehlo(proto)
        module = ir.parse(converted, name)
    except Exception as error:  # jaxlib raises errors of several classes
        raise _refused(name, form, next(filter(str.strip, str(error).splitlines()), type(error).__name__)) from None
    foreign = sorted({each.name for each in ir.operations(module.operation) if each.name.startswith("mhlo.")})
    if foreign:
        raise _refused(name, form, f"StableHLO has no {', '.join(foreign)}")
    return module


def _refused(name: str, form: Form, reason: str) -> ModuleError:
    return ModuleError(
        f"{name}: {form} that jaxlib cannot convert to StableHLO: {reason}; give the program before optimizations "
        "(*.before_optimizations.txt or .hlo.pb of an XLA dump), or StableHLO from the framework"
    )


def _module_proto(data: bytes) -> bytes:
    fields = dict(_fields(data))
    return data if _ENTRY_NAME in fields else fields.get(_MODULE, data)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Fields of a message: number and content, which is empty for numbers."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            size, at = _varint(data, at)
            yield tag >> 3, data[at : at + size]
            at += size
        elif kind in (0, 1, 5):
            at = _varint(data, at)[1] if kind == 0 else at + (8 if kind == 1 else 4)
            yield tag >> 3, b""
        else:
            raise ValueError("not a protocol buffer of an HLO module")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value, shift = 0, 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("truncated")
