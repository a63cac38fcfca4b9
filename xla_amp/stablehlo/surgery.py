"""Changes of MLIR that several passes make: ends of blocks, types of functions, calls, clones, new programs.

What creates operations needs a current MLIR location.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from xla_amp.stablehlo import ir

CALLEE: Final = "callee"
"""Attribute of a call: name of the function."""
_NAME: Final = "sym_name"
_TYPE: Final = "function_type"


def block_of(function: Any) -> Any:
    """The only block of a function, of a loop's body, ..."""
    return function.regions[0].blocks[0]


def terminator(block: Any) -> Any:
    """The last operation of a block, which returns values."""
    return block.operations[len(block.operations) - 1].operation


def body(block: Any) -> list[Any]:
    """The operations of a block without the last one."""
    return [view.operation for view in block.operations][:-1]


def arguments(operation: Any) -> list[Any]:
    """The arguments of all blocks in the regions of an operation."""
    return [argument for region in operation.regions for block in region.blocks for argument in block.arguments]


def producer(value: Any) -> Any:
    """The operation that makes a value; None for the argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.mlir().Block) else owner.operation


def parent(operation: Any) -> Any:
    """The operation that has `operation` in a region; None for the module."""
    return getattr(operation.parent, "operation", operation.parent)


def is_unused(operation: Any) -> bool:
    """Whether nothing reads a result of the operation."""
    return all(next(iter(result.uses), None) is None for result in operation.results)


def end(block: Any, operands: Sequence[Any]) -> None:
    """Makes a block return `operands`."""
    last = terminator(block)
    with ir.mlir().InsertionPoint(last):
        ir.mlir().Operation.create(last.name, operands=operands)
    last.erase()


def argument_types(function: Any) -> list[Any]:
    """Types of the arguments of a function, by its type."""
    return list(ir.mlir().FunctionType(function.attributes[_TYPE].value).inputs)


def update_type(function: Any) -> None:
    """Gives a function the type of its arguments and of what it returns."""
    mlir, block = ir.mlir(), block_of(function)
    inputs = [argument.type for argument in block.arguments]
    results = [operand.type for operand in terminator(block).operands]
    function.attributes[_TYPE] = mlir.TypeAttr.get(mlir.FunctionType.get(inputs, results))


def call(name: str, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """A new call of a function at the current insertion point; `results` are types."""
    mlir = ir.mlir()
    return mlir.Operation.create("func.call", results, operands, {CALLEE: mlir.FlatSymbolRefAttr.get(name)})


def replace(operation: Any, name: str, attributes: Mapping[str, Any]) -> None:
    """Replaces an operation by one called `name` with its operands and the types of its results."""
    mlir, types = ir.mlir(), [result.type for result in operation.results]
    with mlir.InsertionPoint(operation), operation.location:
        made = mlir.Operation.create(name, types, list(operation.operands), attributes)
    for before, after in zip(operation.results, made.results, strict=True):
        before.replace_all_uses_with(after)
    operation.erase()


def call_instead(operation: Any, name: str) -> None:
    """Replaces an operation by a call of a function with its operands."""
    replace(operation, "func.call", {CALLEE: ir.mlir().FlatSymbolRefAttr.get(name)})


def callees(operation: Any) -> list[str]:
    """Names of the functions that an operation refers to in its attributes."""
    mlir = ir.mlir()
    names: list[str] = []
    for name in _REFERRING:
        attribute = ir.attribute(operation, name)
        for each in attribute if isinstance(attribute, mlir.ArrayAttr) else (attribute,):
            if isinstance(each, mlir.FlatSymbolRefAttr):
                names.append(each.value)
    return names


_REFERRING: Final = (CALLEE, "decomposition", "called_computations")
"""Attributes that name functions: of calls, of composites, of custom calls."""


_CALLS: Final = frozenset({"func.call", "call", "stablehlo.composite", "stablehlo.custom_call"})


def reached(functions: Mapping[str, Any], roots: Iterable[Any]) -> dict[str, Any]:
    """Those of the functions (by name) that the roots, or operations in them, call, directly or not."""
    found: dict[str, Any] = {}
    todo = [*roots]
    while todo:
        root = todo.pop()
        for operation in (root, *ir.operations(root)):
            for name in callees(operation) if operation.name in _CALLS else ():
                if name in functions and name not in found:
                    found[name] = functions[name]
                    todo.append(functions[name])
    return found


def redirect(operation: Any, name: str) -> None:
    """Makes a call reach another function."""
    operation.attributes[CALLEE] = ir.mlir().FlatSymbolRefAttr.get(name)


def clone_function(module: Any, function: Any, name: str, taken: Container[str]) -> Any:
    """A copy of a function at the end of the module, called `name` with as many ``_`` as that is `taken`."""
    while name in taken:
        name += "_"
    # Without a current insertion point the clone is detached; the module appends it.
    clone = function.clone()
    clone.operation.attributes[_NAME] = ir.mlir().StringAttr.get(name)
    module.body.append(clone)
    return clone.operation


def name_of(function: Any) -> str:
    """Name of a function."""
    return str(function.attributes[_NAME].value)
