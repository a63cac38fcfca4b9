"""MLIR modules through jaxlib: parse, print, walk, retype, compile and run them.

Private APIs of jax and jaxlib, and differences between their versions, are confined to this file.  A module is a
``jaxlib.mlir.ir.Module``.  Only `devices`, `compile_module`, `execute` and `run` start a device.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
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


def mlir() -> Any:
    """``jaxlib.mlir.ir``."""
    import jax  # noqa: F401 - before jaxlib: it limits what C++ prints while it is loaded
    from jaxlib.mlir import ir

    return ir


def dialect() -> Any:
    """``jaxlib.mlir.dialects.stablehlo``."""
    from jaxlib.mlir.dialects import stablehlo

    return stablehlo


def new_context() -> Any:
    """An MLIR context with every dialect that JAX emits (func, stablehlo, chlo, sdy, vhlo), and quant."""
    from jax._src.interpreters import mlir as jax_mlir

    context = jax_mlir.make_ir_context()
    # jaxlib cannot name the dialect of quantized types, but reading any artifact registers it.
    dialect().deserialize_portable_artifact(context, _empty_artifact())
    return context


@functools.cache
def _empty_artifact() -> bytes:
    from jax._src.interpreters import mlir as jax_mlir

    context = jax_mlir.make_ir_context()
    module = mlir().Module.parse("module {}", context)
    with context:
        return bytes(dialect().serialize_portable_artifact(module, dialect().get_current_version()))


def is_artifact(data: bytes) -> bool:
    """Whether `data` is a portable artifact, i.e. bytecode with StableHLO as its producer."""
    return data.startswith(BYTECODE_MAGIC) and _ARTIFACT_PRODUCER in data[:_PRODUCER_WITHIN]


def parse(source: str | bytes, name: str = "module") -> MlirModule:
    """A module from MLIR text, MLIR bytecode or a portable artifact, verified, in a new context.

    Raises:
        ModuleError: another format, or not a valid module; `name` opens the message.
    """
    ir = mlir()
    context = new_context()
    with context, _quiet(context) as problems:
        try:
            if isinstance(source, bytes) and is_artifact(source):
                module = dialect().deserialize_portable_artifact(context, source)
            else:
                module = ir.Module.parse(source, context)
        except (ir.MLIRError, ValueError) as error:
            raise ModuleError(f"{name}: not a StableHLO module: {_first_line(error, problems)}") from None
    return module


def verify(module: MlirModule, name: str = "module") -> None:
    """Runs MLIR's verifier.

    Raises:
        ModuleError: with the verifier's first message.
    """
    ir = mlir()
    with module.context, _quiet(module.context) as problems:
        try:
            valid = module.operation.verify()
        except ir.MLIRError as error:
            raise ModuleError(f"{name}: not a valid module: {_first_line(error, problems)}") from None
        if not valid:
            raise ModuleError(f"{name}: not a valid module: {_first_line('', problems)}")


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
    from jaxlib import _jax

    if missing := _without_body(module):  # the writer ends the process
        raise ModuleError(f"no portable artifact: @{missing[0]} is declared without a body")
    target, data, problem = version or dialect().get_current_version(), bytecode(module), ""
    for mixed in (False, True):
        try:
            return bytes(_jax.mlir.serialize_portable_artifact(data, target, mixed))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            problem = problem or _first_line(error, [])
    raise ModuleError(f"no portable artifact of version {target}: {problem}; MLIR text and bytecode hold every module")


def copy(module: MlirModule) -> MlirModule:
    """The same module in a new context."""
    return parse(bytecode(module))


def operations(root: Any) -> Iterator[Any]:
    """Operations under `root` (an operation or block), regions included, in program order, without `root`.

    The operations of a block are listed before the first is yielded, so the caller may change the block.
    """
    blocks = [root] if hasattr(root, "operations") else [block for region in root.regions for block in region.blocks]
    for block in blocks:
        for view in list(block.operations):
            operation = view.operation
            yield operation
            if len(operation.regions):
                yield from operations(operation)


def functions(module: MlirModule) -> dict[str, Any]:
    """Functions of the module by symbol name, declarations included."""
    found = (view.operation for view in module.body.operations)
    return {op.attributes["sym_name"].value: op for op in found if op.name == "func.func"}


_MAIN: Final = "main"
"""The function that XLA runs."""
_ENTRY: Final = "amp.entry"
"""Attribute of a module: name of the function that `choose_entry` chose."""


def entry(module: MlirModule) -> Any:
    """The function that a program runs: the chosen one, otherwise ``main``, or the only public one.

    Raises:
        ModuleError: there is no such function, or several.
    """
    by_name, attributes = functions(module), module.operation.attributes
    if _ENTRY in attributes:
        return by_name[attributes[_ENTRY].value]
    if _MAIN in by_name:
        return by_name[_MAIN]
    public = [name for name, op in by_name.items() if not is_private(op)]
    if len(public) != 1:
        choose = "; choose one: --function NAME, in Python load(path, function=name)" if public else ""
        listed = ", ".join(public) or "none"
        raise ModuleError(
            f"expected a function @main or exactly one public function; public functions: {listed}{choose}"
        )
    return by_name[public[0]]


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
    if _ENTRY not in module.operation.attributes:
        return module
    plain = copy(module)
    del plain.operation.attributes[_ENTRY]
    return plain


def runnable(module: MlirModule) -> MlirModule:
    """The module as XLA takes it: its entry is ``main``, the only public function, and constants have their values."""
    chosen = entry(module).attributes["sym_name"].value
    module = _constants_inline(module)
    if chosen == _MAIN and _ENTRY not in module.operation.attributes:
        return module
    ir, copied = mlir(), without_choice(copy(module))
    with copied.context:
        table = ir.SymbolTable(copied.operation)
        renamed = {chosen: _MAIN, _MAIN: f"{_MAIN}.other"} if chosen != _MAIN else {}
        for name, function in functions(copied).items():
            function.attributes["sym_visibility"] = ir.StringAttr.get("public" if name == chosen else "private")
        for before in sorted(renamed, key=lambda name: name != _MAIN):  # main first, whose name the chosen one gets
            if before in functions(copied):
                ir.SymbolTable.replace_all_symbol_uses(before, renamed[before], copied.operation)
                table.set_symbol_name(functions(copied)[before], renamed[before])
    return copied


def is_private(function: Any) -> bool:
    """Whether nothing outside the module can call `function`."""
    attributes = function.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


class TensorType(NamedTuple):
    """Shape (None where a dimension is dynamic) and element type as MLIR writes it (``f32``, ``i1``, ``ui32``)."""

    shape: tuple[int | None, ...]
    element: str


def tensor_type(value_type: Any) -> TensorType | None:
    """Shape and element type of a ranked tensor type; None for tokens, tuples and unranked types."""
    ir = mlir()
    if not isinstance(value_type, ir.RankedTensorType):
        return None
    dimensions = (
        None if value_type.is_dynamic_dim(axis) else value_type.get_dim_size(axis) for axis in range(value_type.rank)
    )
    return TensorType(tuple(dimensions), str(value_type.element_type))


def elements(value: Any) -> int:
    """How many elements a tensor has; sizes that are not known count as 1, and so do other values."""
    kind = tensor_type(value.type)
    return 1 if kind is None else elements_of(kind)


def elements_of(kind: TensorType) -> int:
    """How many elements a tensor of this type has; sizes that are not known count as 1."""
    return math.prod(1 if size is None else size for size in kind.shape)


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


_NUMPY: Final = {
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

    name = _NUMPY.get(element)
    if name is None:
        raise ModuleError(f"no array dtype for element type {element!r}; known: {', '.join(_NUMPY)}")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def dtype_name(element: str) -> str:
    """NumPy's name of an element type as MLIR writes it; MLIR's, where NumPy has none (``!quant.uniform<...>``)."""
    return numpy_dtype(element).name if element in _NUMPY else element


def constant_array(attribute: Any) -> np.ndarray[Any, Any] | None:
    """Values of a dense float32 attribute or resource, one element for a splat; None if they cannot be read."""
    ir = mlir()
    if is_resource(attribute):
        kind = tensor_type(attribute.type)
        return resource_array(attribute) if kind and kind.element == "f32" else None
    try:
        dense = ir.DenseElementsAttr(attribute)
        if dense.is_splat:
            return np.asarray(dense.get_splat_value().value, dtype=np.float32).reshape(1)
        return np.array(ir.DenseFPElementsAttr(dense), dtype=np.float32)
    except (ValueError, TypeError):  # a type that is not float32
        return None


def attribute(operation: Any, name: str) -> Any:
    """An attribute of an operation; None if it has none, or a complex one, which jaxlib cannot return."""
    try:
        return operation.attributes[name]
    except (KeyError, TypeError):
        return None


def is_splat(constant: Any) -> bool:
    """Whether a constant stores one element for all."""
    value = attribute(constant, "value")
    if value is None:  # complex
        return "dense<(" in constant.get_asm(large_elements_limit=1)
    return bool(getattr(value, "is_splat", False))


_BLOB: Final = re.compile(r'"0x([0-9A-Fa-f]+)"\s*}\s*}\s*#-}\s*$')
_ALIGNMENT: Final = 8
"""Hexadecimal digits of a blob before its values."""


def is_resource(attribute: Any) -> bool:
    """Whether an attribute is a ``dense_resource``, whose values are behind the text of the module."""
    try:
        mlir().DenseResourceElementsAttr(attribute)
    except ValueError:
        return False
    return True


def resource_array(attribute: Any) -> np.ndarray[Any, Any] | None:
    """Values of a ``dense_resource``; None if the module does not have them."""
    ir, kind = mlir(), tensor_type(attribute.type)
    if kind is None or kind.element not in _NUMPY or kind.element in ("i4", "ui4"):
        return None
    # Python has no access to the bytes of a resource, but a module's text has.
    with attribute.context, ir.Location.unknown():
        alone = ir.Module.create()
        with ir.InsertionPoint(alone.body):
            ir.Operation.create("stablehlo.constant", [attribute.type], attributes={"value": attribute})
        found = _BLOB.search(alone.operation.get_asm(large_elements_limit=None))
    dtype = numpy_dtype(kind.element)
    if found is None or len(found[1]) != _ALIGNMENT + 2 * dtype.itemsize * elements_of(kind):
        return None
    return np.frombuffer(bytes.fromhex(found[1][_ALIGNMENT:]), dtype).reshape([size or 0 for size in kind.shape])


def _constants_inline(module: MlirModule) -> MlirModule:
    """The module with the values of resources in its constants, as XLA takes them; itself without resources."""
    if not any(_resource_of(operation) for operation in operations(module.operation)):
        return module
    copied = copy(module)
    with copied.context:
        for operation in operations(copied.operation):
            if attribute := _resource_of(operation):
                values = resource_array(attribute)
                if values is None:
                    raise ModuleError(f"a constant without values: {attribute}; print the module with its resources")
                ir, bits = mlir(), np.ascontiguousarray(values)
                if bits.dtype.kind == "b":
                    made = ir.Attribute.parse(f"dense<{str(values.tolist()).lower()}> : {attribute.type}")
                else:
                    made = ir.DenseElementsAttr.get(
                        bits if bits.dtype.kind == "c" else bits.view(f"u{bits.dtype.itemsize}"),
                        type=attribute.type.element_type,
                        shape=list(values.shape),
                    )
                operation.attributes["value"] = made
    return copied


def _resource_of(operation: Any) -> Any:
    """The resource that an operation is the constant of, or None."""
    value = attribute(operation, "value") if operation.name == "stablehlo.constant" else None
    return value if value is not None and is_resource(value) else None


def constant_attribute(array: np.ndarray[Any, Any], value_type: Any) -> Any:
    """Dense attribute of `value_type` with the values of `array`, which has the matching dtype (ml_dtypes for bf16).

    An array of one element becomes a splat.
    """
    ir = mlir()
    splat = array.size == 1
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    if splat:
        scalar = ir.FloatAttr.get(value_type.element_type, float(array.reshape(())))
        return ir.DenseElementsAttr.get_splat(value_type, scalar)
    # MLIR does not accept buffers of ml_dtypes: pass the bits, and the element type separately.
    return ir.DenseElementsAttr.get(bits, type=value_type.element_type, shape=list(value_type.shape))


def devices(platform: str | None = None) -> list[Any]:
    """PJRT devices of a platform, which is started."""
    import jax

    return list(jax.devices(platform) if platform else jax.devices())


def run_passes(module: MlirModule, passes: str) -> None:
    """Runs passes of MLIR and StableHLO; operations that were read from the module before must not be used after it.

    Args:
        module: is changed.
        passes: as in ``builtin.module(...)``, separated by commas.

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


def refined(module: MlirModule, arguments: Sequence[Any]) -> MlirModule:
    """The module with the shapes of `arguments` instead of dynamic ones; itself if all its arguments have fixed shapes.

    Calls are inlined.

    Raises:
        ModuleError: the shapes do not fit, or do not determine those of all values.
    """
    import jax
    from jaxlib import _jax

    inputs = signature(module).inputs
    if not any(kind is not None and None in kind.shape for kind in inputs):
        return module
    ir, copied = mlir(), copy(runnable(module))
    with copied.context, ir.Location.unknown():
        types = [
            str(ir.RankedTensorType.get(np.shape(array), given.element_type)) if kind else str(given)
            for array, kind, given in zip(
                arguments, inputs, ir.FunctionType(entry(copied).attributes["function_type"].value).inputs, strict=True
            )
        ]
        try:
            run_passes(copied, f"stablehlo-refine-arguments{{types='{','.join(types)}'}}")
            data = _jax.mlir.refine_polymorphic_shapes(bytecode(copied), True, True)
        except (ModuleError, jax.errors.JaxRuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ModuleError(f"the samples' shapes do not determine the program's: {reason}") from None
    return parse(data, "the program of the samples' shapes")


_QUANTIZED: Final = "quant"


def is_quantized(value: Any) -> bool:
    """Whether a value has quantized elements, at which XLA:CPU ends the process."""
    return f"!{_QUANTIZED}." in str(value.type)


def _without_body(module: MlirModule) -> list[str]:
    """Functions without a body, at which XLA and the writer of artifacts end the process."""
    return sorted(name for name, function in functions(module).items() if not len(function.regions[0].blocks))


def _has_quantized(module: MlirModule) -> bool:
    function = entry(module)
    given = [argument for block in function.regions[0].blocks for argument in block.arguments]
    made = (result for operation in operations(module.operation) for result in operation.results)
    return any(map(is_quantized, (*given, *made)))


def compile_module(module: MlirModule, device: Any = None, options: Mapping[str, bool | int] | None = None) -> Any:
    """A loaded executable of the module for one device (default: the first of JAX's default platform).

    Args:
        module: the module.
        device: of JAX.
        options: XLA's options by name, on top of its defaults.

    Raises:
        ModuleError: XLA rejects the module.
    """
    import jax
    from jaxlib import _jax, xla_client

    device = device or devices()[0]
    client = device.client
    chosen = xla_client.CompileOptions()
    chosen.env_option_overrides = list((options or {}).items())
    placed = _jax.DeviceList((device,))
    # Every version of jaxlib accepts bytecode; not every one accepts a module of another context.
    data = bytecode(runnable(module))
    if _QUANTIZED.encode() in data and _has_quantized(module):
        raise ModuleError("XLA cannot run quantized types (!quant.uniform); they can be read and converted only")
    if missing := _without_body(module):
        raise ModuleError(f"XLA cannot run @{missing[0]}, a function that is declared without a body")
    try:
        return client.compile_and_load(data, placed, chosen)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ModuleError(f"XLA cannot compile the module: {str(error).splitlines()[0]}") from None


def execute(executable: Any, arguments: Sequence[Any], device: Any = None) -> list[np.ndarray[Any, Any]]:
    """Runs the result of `compile_module` on arrays; returns the results as NumPy arrays.

    Raises:
        ModuleError: XLA cannot run it.
    """
    import jax

    device = device or devices()[0]
    placed = [jax.device_put(argument, device) for argument in arguments]
    try:
        results = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
        return [np.asarray(each[0]) for each in results]
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ModuleError(f"XLA cannot run the module: {str(error).splitlines()[0]}") from None


def run(module: MlirModule, arguments: Sequence[Any], device: Any = None) -> list[np.ndarray[Any, Any]]:
    """Compiles the module for one device and runs it once."""
    return execute(compile_module(module, device), arguments, device)


def evaluate(module: MlirModule, arguments: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Results of StableHLO's reference interpreter, which rounds every operation to its result type.

    Raises:
        ModuleError: the interpreter does not support an operation or a type.
    """
    ir = mlir()
    interpreted = copy(module)
    with interpreted.context, ir.Location.unknown(), _quiet(interpreted.context) as problems:
        kinds = signature(interpreted)
        if None in kinds.inputs or None in kinds.outputs:
            raise ModuleError("the reference interpreter supports tensor arguments and results only")
        # The interpreter aborts the process at an unsupported operation.
        if unknown := uninterpretable(interpreted):
            raise ModuleError(f"the reference interpreter does not support {', '.join(unknown)}")
        _widen_results(interpreted)
        try:
            taken = [_argument(array, kind) for array, kind in zip(arguments, kinds.inputs, strict=True) if kind]
            results = dialect().eval_module(interpreted, taken)
            return [_values(result, kind) for result, kind in zip(results, kinds.outputs, strict=True) if kind]
        except (ir.MLIRError, ValueError, TypeError) as error:
            raise ModuleError(f"the reference interpreter: {_first_line(error, problems)}") from None


_NOT_INTERPRETED: Final = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather", "all_reduce", "all_to_all", "batch_norm_grad", "batch_norm_inference", "batch_norm_training",
        "broadcast", "collective_broadcast", "collective_permute", "create_token", "partition_id", "reduce_scatter",
        "replica_id",
        "cross-replica-sum", "custom_call", "dot", "dynamic_conv", "einsum", "fft", "rng", "rng_bit_generator",
        "torch_index_select", "triangular_solve", "unary_einsum", "uniform_dequantize", "uniform_quantize",
    )
)  # fmt: skip


def uninterpretable(module: MlirModule) -> list[str]:
    """Names of the operations that the reference interpreter does not support, sorted."""
    names = {operation.name for operation in operations(module.operation)}
    return sorted(n for n in names if n in _NOT_INTERPRETED or not n.startswith(("stablehlo.", "func.")))


def _widen_results(module: MlirModule) -> None:
    # bfloat16 attributes cannot be read back: return the same values as float32.
    ir, function = mlir(), entry(module)
    last = function.regions[0].blocks[0].operations[len(function.regions[0].blocks[0].operations) - 1].operation
    f32 = ir.F32Type.get()
    for index, operand in enumerate(list(last.operands)):
        if tensor_type(operand.type).element in _UNREADABLE:  # type: ignore[union-attr]
            with ir.InsertionPoint(last):
                last.operands[index] = dialect().convert(with_element(operand.type, f32), operand)
    inputs = ir.FunctionType(function.attributes["function_type"].value).inputs
    results = [operand.type for operand in last.operands]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))


_UNREADABLE: Final = ("bf16", "f8E4M3FN", "f8E5M2")


def _argument(array: np.ndarray[Any, Any], kind: TensorType) -> Any:
    ir = mlir()
    array = np.asarray(array, dtype=numpy_dtype(kind.element), order="C")
    if kind.element in _UNREADABLE:
        array = array.view(f"u{array.dtype.itemsize}")
    return ir.DenseElementsAttr.get(array, type=ir.Type.parse(kind.element), shape=list(array.shape))


def _values(attribute: Any, kind: TensorType) -> np.ndarray[Any, Any]:
    shape = [size or 0 for size in tensor_type(attribute.type).shape]  # type: ignore[union-attr]
    if kind.element == "i1":
        values = np.array([bool(each) for each in mlir().DenseIntElementsAttr(attribute)])
    else:
        values = np.array(attribute)
    return values.astype(numpy_dtype(kind.element)).reshape(shape)
