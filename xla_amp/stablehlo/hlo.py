"""Convert HLO, the format in which XLA keeps and dumps programs, to StableHLO by JAX's own converter.

An XLA dump (``XLA_FLAGS=--xla_dump_to=DIRECTORY``) has it as text and, with ``--xla_dump_hlo_as_proto``, as protocol
buffers: an ``HloModuleProto``, or an ``HloProto`` around one.  Optimized programs have operations that StableHLO lacks
(fusions, calls of libraries); the program before optimizations has none.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import ir

HloFormat: TypeAlias = Literal["HLO text", "HLO proto"]

_HEAD: Final = 4096
"""Bytes that tell a protocol buffer from text."""
_TEXT: Final = frozenset(b"\t\n\v\f\r\x1b")
"""Control characters of text."""
_ENTRY_NAME: Final = b"\x12"
"""Tag of the second field of an ``HloModuleProto``, which is always there; an ``HloProto`` has no such field."""


def format_of(data: bytes) -> HloFormat | None:
    """Which format of HLO the bytes are; None for others."""
    if data[:_HEAD].lstrip().startswith(b"HloModule"):
        return "HLO text"
    # A protocol buffer begins with the tag of its first field, a line feed, and has bytes that text has not.
    if data.startswith(b"\n") and any(byte < 32 and byte not in _TEXT for byte in data[:_HEAD]):
        return "HLO proto"
    return None


def parse(data: bytes, kind: HloFormat) -> ir.MlirModule:
    """The StableHLO module of an HLO program.

    Raises:
        ModuleError: JAX cannot read it, or StableHLO lacks an operation of it.
    """
    from jax.extend import mlir

    try:
        from jaxlib import _hlo as parser  # type: ignore[attr-defined]
    except ImportError:  # before JAX 0.10.2
        from jaxlib import _jax as parser
    try:
        if kind == "HLO text":
            proto = parser.hlo_module_from_text(data.decode()).as_serialized_hlo_module_proto()
        else:
            proto = _module_proto(data)
        module = ir.parse(mlir.hlo_to_stablehlo(proto))
    except Exception as error:  # jaxlib raises errors of several classes
        raise _refused(kind, " ".join(str(error).split("\n")[:2])) from None
    foreign = sorted({each.name for each in ir.operations(module.operation) if each.name.startswith("mhlo.")})
    if foreign:
        raise _refused(kind, f"StableHLO has no {', '.join(foreign)}")
    return module


def _refused(kind: HloFormat, reason: str) -> ModuleError:
    return ModuleError(
        f"{kind} that JAX cannot convert to StableHLO: {reason}; give the program before optimizations "
        "(*.before_optimizations.txt or .hlo.pb of an XLA dump), or StableHLO from the framework"
    )


def _module_proto(data: bytes) -> bytes:
    """The ``HloModuleProto``, which may be the first field of an ``HloProto``."""
    size, shift, start = 0, 0, 1
    while start < 2 or data[start - 1] > 127:  # seven bits of the first field's size a byte
        size |= (data[start] & 127) << shift
        start, shift = start + 1, shift + 7
    end = start + size
    return data if data[end : end + 1] == _ENTRY_NAME else data[start:end]
