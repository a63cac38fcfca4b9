"""A StableHLO program in memory: parse it from bytes and serialize it, in every format.

The formats are MLIR text, MLIR bytecode, portable artifacts and ``jax.export`` blobs; HLO, XLA's format of a program,
can be read.  The content of the bytes decides the format.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any, Final, Literal, TypeAlias, get_args

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import hlo, ir

Format: TypeAlias = Literal["text", "bytecode", "artifact", "export"]
"""``text``      MLIR assembly
``bytecode``  MLIR bytecode, for the MLIR version that wrote it
``artifact``  portable artifact: bytecode of a versioned dialect, which later StableHLO versions read for years
``export``    the serialization of ``jax.export``: an artifact with the pytrees that a call from JAX needs"""

FORMATS: Final[tuple[Format, ...]] = get_args(Format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A module and the format in which it was read."""

    module: ir.MlirModule
    format: Format
    exported: Any = None
    """For format ``export``: the ``jax.export.Exported`` around the module."""
    hlo: str = ""
    """``HLO text`` or ``HLO proto`` if the program was converted from it; `format` is ``text`` then."""

    @property
    def source(self) -> str:
        """What the program was read from: `hlo`, otherwise `format`."""
        return self.hlo or self.format

    @property
    def has_vjp(self) -> bool:
        """Whether it is a ``jax.export`` program that JAX can differentiate."""
        return self.exported is not None and self.exported.has_vjp()

    def with_module(self, module: ir.MlirModule) -> Program:
        """The same program with another module, e.g. after `autocast`.

        A ``jax.export`` program loses its VJP, which belongs to the old module.

        Raises:
            ModuleError: the program is a ``jax.export`` one and `module` has another number of arguments or results.
        """
        exported = self.exported and _replaced(self.exported, module)
        return dataclasses.replace(self, module=module, exported=exported)


def detect(data: bytes) -> Format:
    """The format of the bytes; what is neither MLIR nor text counts as ``export``."""
    if data.startswith(ir.BYTECODE_MAGIC):
        return "artifact" if ir.is_artifact(data) else "bytecode"
    return "text" if is_text(data) else "export"


def is_text(data: bytes) -> bool:
    """Whether the bytes are text in UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def parse(data: bytes, name: str = "module", *, function: str | None = None) -> Program:
    """The program in bytes of any `Format`, or of HLO; damaged bytecode can end the process, as in MLIR's tools.

    `function`: name of the public function to run, for a module that has several, or one that is not to be ``main``.

    Raises:
        ModuleError: the bytes do not hold a program, or no such function; `name` opens the message.
    """
    try:
        if not data.strip():
            raise ModuleError("empty; expected a StableHLO module")
        hlo_format = hlo.format_of(data)
        kind = detect(data) if hlo_format is None else "text"
        exported = _deserialized(data) if kind == "export" else None
        if hlo_format is not None:
            module = hlo.parse(data, hlo_format)
        elif exported is not None:
            module = ir.parse(exported.mlir_module_serialized)
        else:
            module = ir.parse(data.decode("utf-8-sig") if kind == "text" else data)
        if exported is not None:
            exported = _replaced(exported, module, keep_vjp=True)
        if function is not None:
            ir.choose_entry(module, function)
        ir.entry(module)
    except ModuleError as error:
        raise ModuleError(f"{name}: {error}") from None
    return Program(module=module, format=kind, exported=exported, hlo=hlo_format or "")


def dump(program: Program, format: Format) -> bytes:
    """The bytes of a program in one format; ``export`` needs `Program.exported`."""
    module = ir.without_choice(program.module)
    if format == "text":
        return ir.text(module).encode() + b"\n"
    if format == "bytecode":
        return ir.bytecode(module)
    if format == "artifact":
        return ir.artifact(module)
    return bytes(program.exported.serialize(vjp_order=int(program.has_vjp)))


def _deserialized(data: bytes) -> Any:
    what = "neither MLIR text in UTF-8, MLIR bytecode nor a portable artifact"
    from jax import export

    if importlib.util.find_spec("flatbuffers") is None:
        raise ModuleError(f"{what}; to read it as a jax.export blob: pip install flatbuffers")
    try:
        exported = export.deserialize(bytearray(data))
    except Exception as error:  # JAX does not validate: damaged bytes can raise anything
        detail = str(error).splitlines()[0] if str(error) else ""
        raise ModuleError(f"{what}, and not a jax.export blob ({type(error).__name__}: {detail})") from None
    if not exported.mlir_module_serialized.startswith(ir.BYTECODE_MAGIC):
        raise ModuleError(f"{what}, and a jax.export blob without a module")
    return exported


def _replaced(exported: Any, module: ir.MlirModule, *, keep_vjp: bool = False) -> Any:
    """`exported` around `module`, with the dtypes of the module's arguments and results."""
    signature = ir.signature(module)
    kept = exported.module_kept_var_idx
    leading = len(signature.inputs) - len(kept)  # platform index, dimensions, tokens
    results = len(signature.outputs) - len(exported.out_avals)
    if (
        leading < 0
        or results < 0
        or exported.in_tree.num_leaves != len(exported.in_avals)
        or exported.out_tree.num_leaves != len(exported.out_avals)
        or any(not 0 <= index < len(exported.in_avals) for index in kept)
    ):
        raise ModuleError(
            f"a jax.export program of {len(kept)} arguments and {len(exported.out_avals)} results around a module "
            f"of {len(signature.inputs)} and {len(signature.outputs)}"
        )
    inputs = list(exported.in_avals)
    for index, kind in zip(kept, signature.inputs[leading:], strict=True):
        inputs[index] = _retyped(inputs[index], kind)
    outputs = map(_retyped, exported.out_avals, signature.outputs[results:])
    if not keep_vjp:
        from jax import export

        exported = export.deserialize(bytearray(exported.serialize(vjp_order=0)))
    return dataclasses.replace(
        exported,
        mlir_module_serialized=exported.mlir_module_serialized if keep_vjp else ir.artifact(module),
        in_avals=tuple(inputs),
        out_avals=tuple(outputs),
    )


def _retyped(aval: Any, kind: ir.TensorType | None) -> Any:
    import jax.numpy as jnp

    if (
        kind is None
        or kind.element not in ("f16", "bf16", "f32", "f64")
        or not jnp.issubdtype(aval.dtype, jnp.floating)
    ):
        return aval
    return aval.update(dtype=ir.numpy_dtype(kind.element))
