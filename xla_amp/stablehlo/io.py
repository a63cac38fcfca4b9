"""Load and save StableHLO programs; a file is written completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Final

from xla_amp.common import arguments
from xla_amp.errors import FileError, ModuleError
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.program import FORMATS, Format, Program, dump, parse

_SUFFIXES: Final = MappingProxyType(
    {".mlir": "text", ".txt": "text", ".mlirbc": "bytecode", ".bc": "bytecode", ".artifact": "artifact",
     ".stablehlo": "artifact", ".vhlo": "artifact", ".jax": "export", ".jax_export": "export"}
)  # fmt: skip


def load(path: str | os.PathLike[str], *, function: str | None = None) -> Program:
    """The program in a file of any `Format`, or of HLO, as text or as a protocol buffer.

    Args:
        path: the file.
        function: name of the public function to run, for a module that has several, or one that is not to be ``main``.

    Raises:
        FileError: the file cannot be read.
        ModuleError: the file does not hold a program, or no such function.
    """
    arguments.require("load(path)", path, arguments.PATH, "the name of a file")
    return parse(contents(path), os.fspath(path), function=function)


def contents(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file.

    Raises:
        FileError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"reading {os.fspath(path)}: {error.strerror or error}") from None


def save(program: Program | ir.MlirModule, path: str | os.PathLike[str], format: Format | None = None) -> Format:
    """Writes a program; an existing file is replaced only by a complete one.  Returns the format.

    Args:
        program: result of `load`, or a module.
        path: file to write.
        format: default: by the suffix (``.mlir``, ``.mlirbc``, ``.artifact``, ``.jax_export``, ...), otherwise the
            program's format, otherwise ``bytecode``.

    Raises:
        FileError: the file cannot be written.
        ModuleError: the format is ``export`` and the module does not come from ``jax.export``.
    """
    if not isinstance(program, Program):
        program = Program(module=program, format="bytecode")
    chosen = check_format(program, path, format)
    write_whole(path, dump(program, chosen))
    return chosen


def check_format(program: Program, path: str | os.PathLike[str], format: Format | None = None) -> Format:
    """The format that `save` will use.

    Raises:
        ModuleError: the format is unknown, or it is ``export`` and the module does not come from ``jax.export``.
    """
    name = format or _SUFFIXES.get(Path(path).suffix.lower(), program.format)
    chosen = next((each for each in FORMATS if each == name), None)
    if chosen is None:
        raise ModuleError(f"saving {os.fspath(path)}: format {name!r}, expected one of {', '.join(FORMATS)}")
    if chosen == "export" and program.exported is None:
        raise ModuleError(
            f"saving {os.fspath(path)}: this program was read as {program.format}, without the pytrees that jax.export "
            f"keeps; use a format of {', '.join(each for each in FORMATS if each != 'export')}"
        )
    return chosen


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file atomically, through a temporary file in the same folder.

    Raises:
        FileError: the file cannot be written; an existing one is unchanged.
    """
    name, path = os.fspath(path), Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a device or a pipe cannot be replaced
            return
        path = path.resolve()  # replace the target of a link, not the link
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
