"""A module in float64, and a module that also returns what it computes on the way: what `compare` measures with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.tools import inspection

KEPT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bitcast_convert": "bits of another width are another number",
        "constant": "the constant of the program, widened behind it",
        "rng": "another width draws other numbers",
        "uniform_dequantize": "its parameters are part of its type",
        "uniform_quantize": "its parameters are part of its type",
    }
)
"""Operations that stay as they are between casts, as do those that the pass calls sealed -> why."""

_PRECISION: Final = ("algorithm", "precision_config")


class Site(NamedTuple):
    """One floating-point result, of fixed shape, of an operation of the entry function."""

    name: str
    type: str
    """Without the element type, ``[8,128]``."""
    element: str
    attributes: str
    """Dimensions, directions and the like, but not how precisely it computes."""
    sources: tuple[tuple[str, str], ...]
    """Name and location of what the operands of a contraction come from: with operands swapped it is another one."""
    location: str
    bytes: int

    def key(self, located: bool) -> tuple[object, ...]:
        """What two modules' sites have in common when they are the same operation."""
        sources = self.sources if located else tuple(name for name, _ in self.sources)
        return self.name, self.type, self.attributes, sources


def widened(module: ir.MlirModule) -> ir.MlirModule:
    """The same program with every float32, float16 and bfloat16 value in float64, arguments and results included.

    Casts between these become no-ops. Where an operation means something else in float64 (`KEPT`, library calls) it
    computes in its own type between casts. An ``algorithm`` of a product is dropped: it asks for low precision.

    Raises:
        ModuleError: the result is not a valid module.
    """
    wide = ir.copy(module)
    ir_ = ir.mlir()
    with wide.context, ir_.Location.unknown():
        functions = list(ir.functions(wide).values())
        operations = [operation for function in functions for operation in _open(function)]
        kept = [(operation, [each.type for each in operation.operands]) for operation in operations if _kept(operation)]
        for operation in [*functions, *(each for each in operations if not _kept(each))]:
            _retype(operation)
        for operation, types in kept:
            _fence(operation, types)
        for function in functions:
            _sign(function)
    ir.verify(wide, "the float64 version")
    return wide


def _open(root: Any) -> Iterator[Any]:
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                if not _kept(view.operation):
                    yield from _open(view.operation)


def _kept(operation: Any) -> bool:
    if not len(operation.results):
        return False  # the end of a block
    return inspection.short_name(operation) in KEPT or inspection.structure_of(operation) == "sealed"


def _retype(operation: Any) -> None:
    if "algorithm" in operation.attributes:
        del operation.attributes["algorithm"]
    for result in operation.results:
        result.set_type(_wide(result.type))
    for region in operation.regions:
        for block in region.blocks:
            for argument in block.arguments:
                argument.set_type(_wide(argument.type))


def _fence(operation: Any, types: Sequence[Any]) -> None:
    """Casts operands back to what the operation was written for, and its results to float64."""
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


def _sign(function: Any) -> None:
    """Makes the function's type follow its body's."""
    ir_ = ir.mlir()
    if not len(function.regions[0].blocks):
        raise ModuleError(f"the float64 version: function {function.attributes['sym_name'].value} has no body")
    block = _block(function)
    inputs = [argument.type for argument in block.arguments]
    results = [operand.type for operand in _last(block).operands]
    function.attributes["function_type"] = ir_.TypeAttr.get(ir_.FunctionType.get(inputs, results))


def _last(block: Any) -> Any:
    return block.operations[len(block.operations) - 1].operation


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


def inlined(module: ir.MlirModule) -> ir.MlirModule:
    """The same program with the bodies of the functions that its entry function calls in their places.

    Raises:
        ModuleError: a function calls itself.
    """
    flat = ir.copy(module)
    with flat.context:
        by_name = ir.functions(flat)
        found: list[tuple[Any, frozenset[str]]] = [
            (view.operation, frozenset()) for view in _block(ir.entry(flat)).operations
        ]
        while found:
            operation, callers = found.pop()
            if inspection.structure_of(operation) != "call":
                continue
            name = operation.attributes["callee"].value
            if name in callers:
                raise ModuleError(f"function {name} calls itself")
            found += [(each, callers | {name}) for each in _inline(operation, by_name[name])]
    return flat


def _inline(call: Any, function: Any) -> list[Any]:
    """Puts the function's operations where it is called; returns them."""
    if not len(function.regions[0].blocks):
        return []
    block, copies = _block(function), []
    here = dict(zip(block.arguments, call.operands, strict=True))
    *body, last = [view.operation for view in block.operations]
    for operation in body:
        copied = operation.clone(ir.mlir().InsertionPoint(call)).operation
        for inner in (copied, *ir.operations(copied)):
            for index, operand in enumerate(inner.operands):
                if operand in here:
                    inner.operands[index] = here[operand]
        here.update(zip(operation.results, copied.results, strict=True))
        copies.append(copied)
    for result, operand in zip(call.results, last.operands, strict=True):
        result.replace_all_uses_with(here[operand])
    call.erase()
    return copies


def _block(function: Any) -> Any:
    return function.regions[0].blocks[0]


def sites(module: ir.MlirModule) -> list[Site]:
    """Operations of the entry function whose results can be compared; casts and constants are not among them."""
    return [_site(result) for result in _visible(module)]


def exposing(module: ir.MlirModule, chosen: Sequence[int]) -> ir.MlirModule:
    """The same program that also returns, behind its own results, the results of the chosen `sites`."""
    ir_ = ir.mlir()
    open_ = ir.copy(module)
    with open_.context, ir_.Location.unknown():
        function = ir.entry(open_)
        visible = list(_visible(open_))
        last = _last(_block(function))
        added = [visible[index] for index in chosen]
        with ir_.InsertionPoint(last):
            ir_.Operation.create(last.name, operands=[*last.operands, *added])
        last.erase()
        if "res_attrs" in function.attributes:
            del function.attributes["res_attrs"]
        _sign(function)
    ir.verify(open_, "the version that shows what happens inside")
    return open_


def _visible(module: ir.MlirModule) -> Iterator[Any]:
    for view in _block(ir.entry(module)).operations:
        if inspection.structure_of(view.operation) in ("cast", "constant"):
            continue
        for result in view.operation.results:
            kind = ir.tensor_type(result.type)
            if kind and kind.element in ("f64", "f32", "f16", "bf16") and None not in kind.shape:
                yield result


def _site(result: Any) -> Site:
    operation, kind = result.owner.operation, ir.tensor_type(result.type)
    shape, element = (kind.shape, kind.element) if kind else ((), "")
    return Site(
        name=inspection.short_name(operation),
        type=f"[{','.join(map(str, shape))}]",
        element=element,
        attributes=_attributes(operation),
        sources=tuple(map(_source, operation.operands)) if inspection.structure_of(operation) == "contraction" else (),
        location=inspection.place(operation),
        bytes=inspection.bytes_of(result.type),
    )


def _attributes(operation: Any) -> str:
    attributes = operation.attributes
    names = sorted(name for name in attributes if name not in _PRECISION and "." not in name)
    return " ".join(f"{name}={attributes[name]}" for name in names)


def _source(value: Any) -> tuple[str, str]:
    """What a value comes from, casts aside."""
    ir_ = ir.mlir()
    while not isinstance(value.owner, ir_.Block) and inspection.structure_of(value.owner.operation) == "cast":
        value = value.owner.operation.operands[0]
    if isinstance(value.owner, ir_.Block):
        return f"argument {ir_.BlockArgument(value).arg_number}", ""
    operation = value.owner.operation
    return inspection.short_name(operation), inspection.place(operation)
