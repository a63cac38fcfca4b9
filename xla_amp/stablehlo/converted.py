"""A program in mixed precision, and the kinds of objects that are taken for a program."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import io, ir
from xla_amp.stablehlo.conversion_report import Achieved, ConversionReport
from xla_amp.stablehlo.program import Program, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """A program in mixed precision, and the report of the pass."""

    program: Program
    """The argument for `xla_amp.stablehlo.save`; a program from ``jax.export`` can be called from JAX again."""
    report: ConversionReport
    achieved: Achieved | None = None
    """The errors on sample inputs, where some were given."""

    @property
    def module(self) -> Any:
        """The new ``jaxlib.mlir.ir.Module``; the argument of `autocast` is unchanged."""
        return self.program.module

    def text(self) -> str:
        """MLIR text."""
        return ir.text(self.module)

    def bytecode(self) -> bytes:
        """MLIR bytecode, for the same version of jaxlib."""
        return ir.bytecode(self.module)

    def artifact(self, version: str | None = None) -> bytes:
        """Portable artifact, for the current and later versions of StableHLO, or for `version` and later."""
        return ir.artifact(self.module, version)


def as_program(module: Any) -> Program:
    """Converts every kind of argument that `autocast` takes to a `Program`.

    Raises:
        ModuleError: another kind of object, or no valid program.
    """
    if isinstance(module, Program):
        return module
    if isinstance(module, Converted):
        return module.program
    if isinstance(module, ir.mlir().Module):
        return Program(module=module, format="bytecode")
    if isinstance(module, bytes | bytearray | memoryview):
        return parse(bytes(module))
    if isinstance(module, str) and module.lstrip().startswith("HloModule"):
        return parse(module.encode())
    if isinstance(module, str) and ("\n" in module or "func.func" in module):
        return Program(module=ir.parse(module), format="text")
    if isinstance(module, str | os.PathLike):
        return io.load(module)
    if hasattr(module, "compiler_ir"):
        return Program(module=ir.copy(module.compiler_ir("stablehlo")), format="bytecode")
    module = getattr(module, "exported", module)  # xla_amp.export
    if hasattr(module, "mlir_module_serialized"):
        parsed = ir.parse(module.mlir_module_serialized)
        return Program(module=parsed, format="export", exported=module)
    raise ModuleError(
        f"autocast() expects MLIR text or bytes, a path, a module, jax.jit(f).lower(...) or a jax.export program, got "
        f"{type(module).__name__}"
    )
