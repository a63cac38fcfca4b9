"""Transform modules for `compare`: widen to float64, inline functions, return intermediate results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import ir, locations, surgery
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.module_paths import own_path
from xla_amp.tools.inspect import inspection

NOT_WIDENED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bitcast_convert": "the bits of another width mean another number",
        "constant": "keeps the value of the program; the cast after it widens",
        "rng": "another width draws other numbers",
        "uniform_dequantize": "its parameters are part of its type",
        "uniform_quantize": "its parameters are part of its type",
    }
)
"""Operations that keep their types, between casts -> why. Opaque operations of the pass do the same."""


class Site(NamedTuple):
    """One floating-point result, of fixed shape, of an operation of the entry function."""

    name: str
    type: str
    """Without the element type, ``[8,128]``."""
    element: str
    attributes: str
    """Dimensions, directions etc., without the precision."""
    sources: tuple[tuple[str, str], ...]
    """Name and location of the producers of a contraction's operands, which tell swapped operands apart."""
    location: str
    bytes: int
    module: str = ""
    """Path of the layer."""
    where: str = ""
    """The user's ``file:line``."""

    def key(self, located: bool) -> tuple[object, ...]:
        """The key by which sites of two modules match."""
        sources = self.sources if located else tuple(name for name, _ in self.sources)
        return self.name, self.type, self.attributes, sources


def widened(module: ir.MlirModule) -> ir.MlirModule:
    """The same program with every float32, float16 and bfloat16 value in float64, arguments and results included.

    Casts between these become no-ops. An operation whose meaning would change in float64 (`NOT_WIDENED`, library calls)
    keeps its type, between casts. The ``algorithm`` of a contraction is dropped, because it requests low precision.

    Raises:
        ModuleError: the result is not a valid module.
    """
    wide = ir.copy(module)
    ir_ = ir.mlir()
    with wide.context, ir_.Location.unknown():
        surgery.call_composites(wide)
        functions = list(ir.functions(wide).values())
        for function in functions:
            if not len(function.regions[0].blocks):
                raise ModuleError(f"the float64 version: function {surgery.name_of(function)} has no body")
        operations = [
            operation
            for function in functions
            for operation in ir.operations(function, lambda each: not _keeps_types(each))
        ]
        unwidened = [
            (operation, [each.type for each in operation.operands])
            for operation in operations
            if _keeps_types(operation)
        ]
        for operation in [*functions, *(each for each in operations if not _keeps_types(each))]:
            _retype(operation)
        for operation, types in unwidened:
            _cast_around(operation, types)
        for function in functions:
            surgery.update_type(function)
    ir.verify(wide, "the float64 version")
    return wide


def _keeps_types(operation: Any) -> bool:
    if not len(operation.results):
        return False  # the terminator of a block
    return sizes.short_name(operation) in NOT_WIDENED or inspection.structure_of(operation) == "opaque"


def _retype(operation: Any) -> None:
    if "algorithm" in operation.attributes:
        del operation.attributes["algorithm"]
    for result in operation.results:
        result.set_type(_wide(result.type))
    for argument in surgery.arguments(operation):
        argument.set_type(_wide(argument.type))


def _cast_around(operation: Any, types: Sequence[Any]) -> None:
    """Casts the operands back to the types that the operation had, and its results to float64."""
    ir_, stablehlo = ir.mlir(), ir.dialect()
    for index, (operand, narrow) in enumerate(zip(list(operation.operands), types, strict=True)):
        if operand.type != narrow:
            with ir_.InsertionPoint(operation):
                operation.operands[index] = stablehlo.convert(narrow, operand)
    for result in operation.results:
        wide = _wide(result.type)
        if wide != result.type:
            with ir_.InsertionPoint.after(operation):
                cast = stablehlo.convert(wide, result)
            result.replace_all_uses_except(cast, cast.owner.operation)


def _wide(value_type: Any) -> Any:
    ir_ = ir.mlir()
    kind = ir.tensor_type(value_type)
    if kind is None:
        return value_type
    if kind.element in ("f32", "f16", "bf16"):
        return ir.with_element(value_type, ir_.F64Type.get())
    if kind.element == "complex<f32>":
        return ir.with_element(value_type, ir_.ComplexType.get(ir_.F64Type.get()))
    return value_type


def for_cpu(module: ir.MlirModule) -> ir.MlirModule:
    """The same program in operations that XLA:CPU can run: some products in float32.

    Low operands of products are cast to float32 where the result is float32.

    XLA:CPU cannot run some of the others (jaxlib 0.10.2: "Unsupported element type for DotThunk::Execute: BF16 x BF16 =
    F32", for instance a transposed sum over batch and tokens).  The values are the same: products of float16 and
    bfloat16 numbers are exact in float32, in which they are summed anyway.
    """
    copied = ir.copy(module)
    ir_, stablehlo = ir.mlir(), ir.dialect()
    with copied.context, ir_.Location.unknown():
        functions = ir.functions(copied).values()
        for operation in [each for function in functions for each in ir.operations(function)]:
            if "dot_dimension_numbers" not in operation.attributes:
                continue
            result = ir.tensor_type(operation.results[0].type)
            if result is None or result.element != "f32":
                continue
            for index, operand in enumerate(list(operation.operands)):
                kind = ir.tensor_type(operand.type)
                if kind is not None and kind.element in ("f16", "bf16"):
                    with ir_.InsertionPoint(operation):
                        wide = ir.with_element(operand.type, ir_.F32Type.get())
                        operation.operands[index] = stablehlo.convert(wide, operand)
                    if "algorithm" in operation.attributes:
                        del operation.attributes["algorithm"]  # it names the types of the operands
    return copied


def inlined(module: ir.MlirModule) -> ir.MlirModule:
    """The same program with the calls and composites of the entry function inlined.

    Raises:
        ModuleError: a function calls itself.
    """
    flat = ir.copy(module)
    surgery.call_composites(flat)
    with flat.context:
        functions = ir.functions(flat)
        found: list[tuple[Any, frozenset[str]]] = [
            (operation, frozenset()) for operation in surgery.body(surgery.block_of(ir.entry(flat)))
        ]
        while found:
            operation, callers = found.pop()
            if inspection.structure_of(operation) != "call":
                continue
            name = operation.attributes[surgery.CALLEE].value
            if name in callers:
                raise ModuleError(f"function {name} calls itself")
            if len(functions[name].regions[0].blocks):
                found += [(each, callers | {name}) for each in surgery.inline(operation, functions[name])]
    return flat


def sites(module: ir.MlirModule) -> list[Site]:
    """Results of the entry function's operations that can be compared, without casts and constants."""
    return [_site(result) for result in comparable(module)]


def comparable(module: ir.MlirModule) -> Iterator[Any]:
    """The results that `sites` describes, in the same order."""
    for operation in surgery.body(surgery.block_of(ir.entry(module))):
        if inspection.structure_of(operation) in ("cast", "constant"):
            continue
        for result in operation.results:
            kind = ir.tensor_type(result.type)
            if kind and kind.element in ("f64", "f32", "f16", "bf16") and None not in kind.shape:
                yield result


def _site(result: Any) -> Site:
    operation, kind = result.owner.operation, ir.tensor_type(result.type)
    shape, element = (kind.shape, kind.element) if kind else ((), "")
    return Site(
        name=sizes.short_name(operation),
        type=f"[{','.join(map(str, shape))}]",
        element=element,
        attributes=sizes.written(operation).partition(" ")[2],
        sources=tuple(map(_source, operation.operands)) if inspection.structure_of(operation) == "contraction" else (),
        location=locations.of(operation).first_name,
        bytes=sizes.size(result.type),
        module=own_path(operation) or "",
        where=locations.of(operation).line,
    )


def _source(value: Any) -> tuple[str, str]:
    """Name and location of the producer of a value, ignoring casts."""
    operation = surgery.producer(value)
    while operation is not None and inspection.structure_of(operation) == "cast":
        value = operation.operands[0]
        operation = surgery.producer(value)
    if operation is None:
        return f"argument {ir.mlir().BlockArgument(value).arg_number}", ""
    return sizes.short_name(operation), locations.of(operation).first_name
