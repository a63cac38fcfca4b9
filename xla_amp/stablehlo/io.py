"""Files that hold a StableHLO program: MLIR text, MLIR bytecode, portable artifacts and ``jax.export`` blobs.

What a file is, its bytes say; its name is not asked.  Reading is safe with files from anywhere: MLIR's readers abort
the process on some damaged bytecode, so a process of our own reads them first.  Writing is whole or not at all.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import shutil
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

from xla_amp.errors import FileError, ModuleError
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.workers import Worker, WorkerEndedError

Format: TypeAlias = Literal["text", "bytecode", "artifact", "export"]
"""``text``      MLIR assembly
``bytecode``  MLIR bytecode, for the MLIR version that wrote it
``artifact``  portable artifact: bytecode of a versioned dialect, which later StableHLO reads for years
``export``    what ``jax.export`` serializes: an artifact with the pytrees to call it from JAX"""

FORMATS: Final[tuple[Format, ...]] = get_args(Format)

_SUFFIXES: Final = MappingProxyType(
    {".mlir": "text", ".txt": "text", ".mlirbc": "bytecode", ".bc": "bytecode", ".artifact": "artifact",
     ".stablehlo": "artifact", ".vhlo": "artifact", ".jax": "export", ".jax_export": "export"}
)  # fmt: skip

_PATIENCE: Final = (10.0, 5e-6)
"""Seconds that reading may take, and seconds more for each byte: some damaged bytecode is read forever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A module with the form in which it came."""

    module: ir.MlirModule
    format: Format
    exported: Any = None
    """The ``jax.export.Exported`` of format ``export``, with the module that was read."""

    def with_module(self, module: ir.MlirModule) -> Program:
        """The same program with another module, e.g. after `autocast`.

        Of a ``jax.export`` program the derivative is dropped: it belongs to the old module.

        Raises:
            ModuleError: it was exported by JAX and `module` takes or gives another number of values.
        """
        exported = self.exported and _replaced(self.exported, module)
        return dataclasses.replace(self, module=module, exported=exported)


def load(path: str | os.PathLike[str]) -> Program:
    """The program in a file of any `Format`.

    Raises:
        FileError: the file cannot be read.
        ModuleError: it does not hold a program.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"reading {os.fspath(path)}: {error.strerror or error}") from None
    return read(data, os.fspath(path))


def read(data: bytes, name: str = "module") -> Program:
    """The program in bytes of any `Format`; `name` opens messages.

    Raises:
        ModuleError: they do not hold a program.
    """
    if not data.strip():
        raise ModuleError(f"{name}: empty; expected a StableHLO module")
    _reader.check(data, name)
    return parse_program(data, name)


def detect(data: bytes) -> Format:
    """What the bytes are by their content; neither MLIR nor text is taken for ``jax.export``."""
    if data.startswith(ir.BYTECODE_MAGIC):
        return "artifact" if ir.is_artifact(data) else "bytecode"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "export"
    return "export" if b"\0" in data else "text"


def parse_program(data: bytes, name: str) -> Program:
    """`read` without its protection: for bytes that are known to be good, or in a process that may die.

    Raises:
        ModuleError: they do not hold a program.
    """
    kind = detect(data)
    if kind == "export":
        exported = _deserialized(data, name)
        module = ir.parse(exported.mlir_module_serialized, name)
        try:
            return Program(module=module, format=kind, exported=_replaced(exported, module, keep_vjp=True))
        except ModuleError as error:
            raise ModuleError(f"{name}: {error}") from None
    program = Program(module=ir.parse(data.decode() if kind == "text" else data, name), format=kind)
    try:
        ir.entry(program.module)
    except ModuleError as error:
        raise ModuleError(f"{name}: {error}") from None
    return program


def _deserialized(data: bytes, name: str) -> Any:
    what = f"{name}: neither MLIR text, MLIR bytecode nor a portable artifact"
    try:
        from jax import export
        from jax._src.export import serialization  # noqa: F401 - needs flatbuffers, and says so
    except ImportError:
        raise ModuleError(f"{what}; to read it as a jax.export blob: pip install flatbuffers") from None
    try:
        exported = export.deserialize(bytearray(data))
    except Exception as error:  # a reader without checks: whatever the damage makes of it
        detail = str(error).splitlines()[0] if str(error) else ""
        raise ModuleError(f"{what}, and not a jax.export blob ({type(error).__name__}: {detail})") from None
    if not exported.mlir_module_serialized.startswith(ir.BYTECODE_MAGIC):
        raise ModuleError(f"{what}, and a jax.export blob without a module")
    return exported


def _replaced(exported: Any, module: ir.MlirModule, *, keep_vjp: bool = False) -> Any:
    """`exported` around `module`; dtypes of arguments and results follow the module's."""
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
    vjp = exported._get_vjp if keep_vjp else None
    return dataclasses.replace(
        exported,
        mlir_module_serialized=exported.mlir_module_serialized if keep_vjp else ir.artifact(module),
        in_avals=tuple(inputs),
        out_avals=tuple(outputs),
        _get_vjp=vjp,
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


def save(program: Program | ir.MlirModule, path: str | os.PathLike[str], format: Format | None = None) -> Format:
    """Writes a program; a file that is there stays as it is unless the new one is complete.  Returns the format.

    Args:
        program: what `load` gave, or a module.
        path: where to.
        format: default: what the suffix says (``.mlir``, ``.mlirbc``, ``.artifact``, ``.jax_export``, ...), else the
            program's own, else ``bytecode``.

    Raises:
        FileError: the file cannot be written.
        ModuleError: a module that JAX did not export is to be an ``export``.
    """
    if not isinstance(program, Program):
        program = Program(module=program, format="bytecode")
    chosen = check_format(program, path, format)
    write_whole(path, dump(program, chosen))
    return chosen


def check_format(program: Program, path: str | os.PathLike[str], format: Format | None = None) -> Format:
    """The format that `save` will use.

    Raises:
        ModuleError: it is unknown, or ``export`` for a module that JAX did not export.
    """
    chosen: Any = format or _SUFFIXES.get(Path(path).suffix.lower(), program.format)
    if chosen not in FORMATS:
        raise ModuleError(f"saving {os.fspath(path)}: format {chosen!r}, expected one of {', '.join(FORMATS)}")
    if chosen == "export" and program.exported is None:
        raise ModuleError(
            f"saving {os.fspath(path)}: this program was read as {program.format}, without the pytrees that jax.export "
            f"keeps; use a format of {', '.join(each for each in FORMATS if each != 'export')}"
        )
    return chosen


def dump(program: Program, format: Format) -> bytes:
    """The bytes of a program in one format, which `check_format` has found possible."""
    if format == "text":
        return ir.text(program.module).encode() + b"\n"
    if format == "bytecode":
        return ir.bytecode(program.module)
    if format == "artifact":
        return ir.artifact(program.module)
    return bytes(program.exported.serialize(vjp_order=1 if program.exported.has_vjp() else 0))


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file completely or leaves what was there, through a temporary file in the same folder.

    Raises:
        FileError: it cannot be written.
    """
    name, path = os.fspath(path), Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a device or a pipe: nothing to be replaced
            return
        path = path.resolve()  # what a link points to is replaced, the link stays
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"writing {name}: {error.strerror or error}") from None


class _Reader:
    """The process that reads first; started when it is first needed, ended with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def check(self, data: bytes, name: str) -> None:
        """Raises the `ModuleError` that reading would, or one for a reader that died or did not end."""
        seconds = _PATIENCE[0] + _PATIENCE[1] * len(data)
        with self._lock:
            if self._worker is None or self._worker.closed:
                self._worker = Worker("xla_amp.stablehlo.read_worker")
                atexit.register(self.close)
                seconds += 60  # its start, on a busy machine
            try:
                reply = self._worker.ask({"name": name}, data, timeout=seconds)
            except WorkerEndedError as error:
                self.close()
                how = str(error).partition(", it printed")[0]
                raise ModuleError(f"{name}: damaged: MLIR's reader did not survive it ({how})") from None
        if "error" in reply:
            raise ModuleError(f"{name}: damaged: {reply['error'].splitlines()[0]}")
        if "refused" in reply:
            raise ModuleError(reply["refused"])

    def close(self) -> None:
        """Ends the process; a later `check` starts another."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            atexit.unregister(self.close)


_reader = _Reader()
