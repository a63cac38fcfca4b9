"""MLIR modules through jaxlib: parse, print, walk and retype them; `execution` runs them.

Private APIs of jax and jaxlib, and differences between their versions, are confined to these two files.  A module is a
``jaxlib.mlir.ir.Module``.
"""

from __future__ import annotations

import functools
import graphlib
import io
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import locations

MlirModule: TypeAlias = Any
"""``jaxlib.mlir.ir.Module``; jaxlib ships no types for it."""

BYTECODE_MAGIC: Final = b"ML\xefR"
_ARTIFACT_PRODUCER: Final = b"StableHLO_v"
_PRODUCER_WITHIN: Final = 32
"""Bytecode names its producer within this many bytes."""


@functools.cache
def mlir() -> Any:
    """``jaxlib.mlir.ir``."""
    import jax  # noqa: F401 - before jaxlib: it limits what C++ prints while it is loaded
    from jaxlib.mlir import ir

    return ir


@functools.cache
def dialect() -> Any:
    """``jaxlib.mlir.dialects.stablehlo``."""
    from jaxlib.mlir.dialects import stablehlo

    return stablehlo


def new_context() -> Any:
    """An MLIR context with every dialect that JAX emits (func, stablehlo, chlo, sdy, vhlo), and quant."""
    from jax.interpreters import mlir as jax_mlir

    context = jax_mlir.make_ir_context()
    # jaxlib cannot name the dialect of quantized types, but reading any artifact registers it.
    dialect().deserialize_portable_artifact(context, _empty_artifact())
    return context


@functools.cache
def _empty_artifact() -> bytes:
    from jax.interpreters import mlir as jax_mlir

    context = jax_mlir.make_ir_context()
    module = mlir().Module.parse("module {}", context)
    with context:
        return bytes(dialect().serialize_portable_artifact(module, dialect().get_current_version()))


def is_artifact(data: bytes) -> bool:
    """Whether `data` is a portable artifact, i.e. bytecode with StableHLO as its producer."""
    return data.startswith(BYTECODE_MAGIC) and _ARTIFACT_PRODUCER in data[:_PRODUCER_WITHIN]


def parse(source: str | bytes) -> MlirModule:
    """A module from MLIR text, MLIR bytecode or a portable artifact, verified, in a new context.

    Raises:
        ModuleError: another format, or not a valid module.
    """
    ir = mlir()
    context = new_context()
    with context, _quiet(context) as problems:
        try:
            if isinstance(source, bytes) and is_artifact(source):
                module = dialect().deserialize_portable_artifact(context, source)
            else:
                module = ir.Module.parse(source, context)
        except (ir.MLIRError, ValueError, MemoryError) as error:
            raise ModuleError(f"not a StableHLO module: {_first_line(error, problems)}") from None
    if _ELIDED in (source.encode() if isinstance(source, str) else source):
        raise ModuleError(
            "its large constants were left out when it was printed (__elided__); print it with them, or write bytecode"
        )
    try:
        circle = _recursive(module)
    except (RuntimeError, UnicodeDecodeError) as error:
        if "conversion error" not in str(error) and not isinstance(error, UnicodeDecodeError):
            raise
        raise ModuleError("a name in it is not UTF-8, which Python cannot read; rename it") from None
    if circle:
        raise ModuleError(f"functions that call themselves, which XLA does not run: {' -> '.join(circle)}")
    return module


_ELIDED: Final = b"__elided__"
"""Name of the values that a printer has left out, in text and in bytecode."""


def _recursive(module: MlirModule) -> list[str]:
    """Names of functions that call each other in a circle; empty if none do."""
    calls = {
        name: [op.attributes["callee"].value for op in operations(function) if op.name == "func.call"]
        for name, function in functions(module).items()
    }
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1][::-1]  # each was called by the next
        return circle
    return []


def verify(module: MlirModule) -> None:
    """Runs MLIR's verifier.

    Raises:
        ModuleError: with the verifier's first message.
    """
    ir = mlir()
    with module.context, _quiet(module.context) as problems:
        try:
            valid = module.operation.verify()
        except ir.MLIRError as error:
            raise ModuleError(f"module: not a valid module: {_first_line(error, problems)}") from None
        if not valid:
            raise ModuleError(f"module: not a valid module: {_first_line('', problems)}")


class _quiet:
    # Collects diagnostics; without a handler MLIR prints them to stderr.
    def __init__(self, context: Any) -> None:
        self.context, self.messages = context, list[str]()

    def __enter__(self) -> list[str]:
        self.handler = self.context.attach_diagnostic_handler(self._keep)
        return self.messages

    def _keep(self, diagnostic: Any) -> bool:
        self.messages.append(f"{diagnostic.message} (at {diagnostic.location})")
        return True

    def __exit__(self, *_: object) -> None:
        self.handler.detach()


def _first_line(error: object, problems: list[str]) -> str:
    """The reason in one line, with line and column of the text where MLIR knows them."""
    for diagnostic in getattr(error, "error_diagnostics", ()):
        place, reason = locations.of(diagnostic), str(diagnostic.message).partition("\n")[0]
        if place.position and any(place.position):
            return f"line {place.position[0]}, column {place.position[1]}: {reason}"
        return f"{reason} (at {place.text})" if place.text and not place.position else reason
    lines = [line for line in [*problems, *str(error).splitlines()] if line.strip()]
    return lines[0] if lines else "no further message"


def text(module: MlirModule, *, locations: bool = False, large_constants: bool = True) -> str:
    """MLIR text of a module; constants of more than 16 elements are left out with ``large_constants=False``."""
    limit = None if large_constants else 16
    return str(module.operation.get_asm(enable_debug_info=locations, large_elements_limit=limit))


def bytecode(module: MlirModule) -> bytes:
    """MLIR bytecode of a module, locations included; only the same MLIR version reads it."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def artifact(module: MlirModule, version: str | None = None) -> bytes:
    """Portable artifact, which later StableHLO versions read for years; default: the current version.

    chlo operations are legalized to StableHLO; other dialects (sdy) are kept.

    Raises:
        ModuleError: an operation or type has no portable form.
    """
    import jax
    from jax.extend import mlir

    if missing := without_body(module):  # the writer ends the process
        raise ModuleError(f"no portable artifact: @{missing[0]} is declared without a body")
    target, data, problem = version or dialect().get_current_version(), bytecode(module), ""
    for mixed in (False, True):
        try:
            return bytes(mlir.serialize_portable_artifact(data, target, mixed))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            problem = problem or _first_line(error, [])
    raise ModuleError(f"no portable artifact of version {target}: {problem}; MLIR text and bytecode hold every module")


def copy(module: MlirModule) -> MlirModule:
    """The same module in a new context."""
    return parse(bytecode(module))


def operations(root: Any, enters: Callable[[Any], bool] | None = None) -> list[Any]:
    """Operations under `root` (an operation or block), regions included, in program order, without `root`.

    `enters`: whether to list the operations in the regions of an operation; by default of all.
    """
    blocks = [root] if hasattr(root, "operations") else [block for region in root.regions for block in region.blocks]
    found = []
    for block in blocks:
        for view in block.operations:
            operation = view.operation
            found.append(operation)
            if len(operation.regions) and (enters is None or enters(operation)):
                found += operations(operation, enters)
    return found


def functions(module: MlirModule) -> dict[str, Any]:
    """Functions of the module by symbol name, declarations included."""
    named = {}
    for view in module.body.operations:
        operation = view.operation
        if operation.name == "func.func":
            named[operation.attributes["sym_name"].value] = operation
    return named


MAIN: Final = "main"
"""The function that XLA runs."""
_ENTRY: Final = "amp.entry"
"""Attribute of a module: name of the function that `choose_entry` chose."""


def entry(module: MlirModule) -> Any:
    """The function that a program runs: the chosen one, otherwise ``main``, or the only public one.

    Raises:
        ModuleError: there is no such function, or several.
    """
    by_name, attributes = functions(module), module.operation.attributes
    if is_chosen(module):
        return by_name[attributes[_ENTRY].value]
    if MAIN in by_name:
        return by_name[MAIN]
    public = [name for name, op in by_name.items() if not is_private(op)]
    if len(public) != 1:
        choose = "; choose one: --function NAME, in Python load(path, function=name)" if public else ""
        listed = ", ".join(public) or "none"
        raise ModuleError(
            f"expected a function @main or exactly one public function; public functions: {listed}{choose}"
        )
    return by_name[public[0]]


def is_chosen(module: MlirModule) -> bool:
    """Whether `choose_entry` chose the entry."""
    return _ENTRY in module.operation.attributes


def choose_entry(module: MlirModule, name: str) -> None:
    """Makes a public function the one that the program runs.

    Raises:
        ModuleError: the module has no such public function.
    """
    public = [each for each, op in functions(module).items() if not is_private(op)]
    if name not in public:
        raise ModuleError(f"no public function {name!r}; public functions: {', '.join(public) or 'none'}")
    with module.context:
        module.operation.attributes[_ENTRY] = mlir().StringAttr.get(name)


def without_choice(module: MlirModule) -> MlirModule:
    """The module as it was before `choose_entry`."""
    if not is_chosen(module):
        return module
    plain = copy(module)
    del plain.operation.attributes[_ENTRY]
    return plain


def is_private(function: Any) -> bool:
    """Whether nothing outside the module can call `function`."""
    attributes = function.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


class TensorType(NamedTuple):
    """Shape (-1 where a dimension is dynamic) and element type as MLIR writes it (``f32``, ``i1``, ``ui32``)."""

    shape: tuple[int, ...]
    element: str

    def __str__(self) -> str:
        """``f32[8,?]``."""
        return f"{self.element}[{','.join('?' if size < 0 else str(size) for size in self.shape)}]"


def tensor_type(value_type: Any) -> TensorType | None:
    """Shape and element type of a ranked tensor type; None for tokens, tuples and unranked types."""
    if not isinstance(value_type, mlir().RankedTensorType):
        return None
    shape = value_type.shape
    if not value_type.has_static_shape:
        shape = [-1 if value_type.is_dynamic_dim(axis) else size for axis, size in enumerate(shape)]
    return TensorType(tuple(shape), str(value_type.element_type))


def element(value: Any) -> str:
    """Element type of a tensor as MLIR writes it; the type of another value."""
    kind = tensor_type(value.type)
    return str(value.type) if kind is None else kind.element


def elements(value: Any) -> int:
    """How many elements a tensor has; sizes that are not known count as 1, and so do other values."""
    kind = tensor_type(value.type)
    return 1 if kind is None else abs(math.prod(kind.shape))


def with_element(value_type: Any, element: Any) -> Any:
    """A ranked tensor type of the same shape and encoding with another element type."""
    return mlir().RankedTensorType.get(value_type.shape, element, value_type.encoding)


class Signature(NamedTuple):
    """Argument and result types of the entry function; None for types other than ranked tensors."""

    inputs: tuple[TensorType | None, ...]
    outputs: tuple[TensorType | None, ...]


def signature(module: MlirModule) -> Signature:
    """Argument and result types of the entry function."""
    function_type = mlir().FunctionType(entry(module).attributes["function_type"].value)
    return Signature(
        tuple(tensor_type(each) for each in function_type.inputs),
        tuple(tensor_type(each) for each in function_type.results),
    )


NUMPY: Final = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i1": "bool", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64", "ui8": "uint8", "ui16": "uint16", "ui32": "uint32",
    "ui64": "uint64", "complex<f32>": "complex64", "complex<f64>": "complex128", "i4": "int4", "ui4": "uint4",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "f8E8M0FNU": "float8_e8m0fnu",
}  # fmt: skip


def numpy_dtype(element: str) -> np.dtype[Any]:
    """NumPy dtype of an element type as MLIR writes it.

    Raises:
        ModuleError: NumPy and ml_dtypes have none.
    """
    import ml_dtypes

    name = NUMPY.get(element)
    if name is None:
        raise ModuleError(f"no array dtype for element type {element!r}; known: {', '.join(NUMPY)}")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def dtype_name(element: str) -> str:
    """NumPy's name of an element type as MLIR writes it; MLIR's, where NumPy has none (``!quant.uniform<...>``)."""
    return numpy_dtype(element).name if element in NUMPY else element


def attribute(operation: Any, name: str) -> Any:
    """An attribute of an operation; None if it has none, or a complex one, which jaxlib cannot return."""
    try:
        return operation.attributes[name]
    except (KeyError, TypeError):
        return None


def run_passes(module: MlirModule, passes: str) -> None:
    """Runs passes of MLIR and StableHLO; operations that were read from the module before must not be used after it.

    `passes` are written as in ``builtin.module(...)``, separated by commas.

    Raises:
        ModuleError: a pass fails; the message is its reason.
    """
    from jaxlib.mlir.passmanager import PassManager

    dialect().register_stablehlo_passes()
    with module.context, _quiet(module.context) as problems:
        try:
            PassManager.parse(f"builtin.module({passes})").run(module.operation)
        except (mlir().MLIRError, ValueError) as error:
            raise ModuleError(_first_line("" if problems else error, problems)) from None


def is_quantized(value: Any) -> bool:
    """Whether a value has quantized elements, at which XLA:CPU ends the process."""
    return "!quant." in str(value.type)


def without_body(module: MlirModule) -> list[str]:
    """Functions without a body, at which XLA and the writer of artifacts end the process."""
    return sorted(name for name, function in functions(module).items() if not len(function.regions[0].blocks))
