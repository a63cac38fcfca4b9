"""The values inside of a program, computed by a chain of small programs.

XLA's time to compile grows faster than a program, most of all for one that returns thousands of intermediate results.
So the entry function is cut into segments of `_LENGTH` operations; each is a separate program, which takes the values
that it reads and returns those that later segments read and those that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from xla_amp.stablehlo import ir, surgery
from xla_amp.stablehlo.passes import sizes
from xla_amp.tools.inspect import inspection

_LENGTH: Final = 400
"""Operations of a segment."""
_MAX_BYTES: Final = 2**28
"""Bytes of asked values that a segment returns at most, if its operations are more than one."""

Run = Callable[[ir.MlirModule, Sequence[Any]], list[Any]]
"""Runs a module on arrays."""


class _Segment(NamedTuple):
    module: ir.MlirModule
    reads: list[Any]
    """Values of the whole program, in the order of the module's arguments."""
    gives: list[Any]
    """Values of the whole program, in the order of the module's results."""


def values(
    module: ir.MlirModule, arguments: Sequence[Any], wanted: Sequence[Any], run: Run
) -> Iterator[tuple[int, Any]]:
    """(index, array) of each wanted result of an operation of the entry function, in program order.

    Args:
        module: a program with its calls inlined (`widen.inlined`); it is not changed.
        arguments: of the program.
        wanted: results of operations of the entry function, in program order.
        run: runs one segment.
    """
    index = {value: number for number, value in enumerate(wanted)}
    block = surgery.block_of(ir.entry(module))
    known = dict(zip(block.arguments, arguments, strict=True))
    last = _last_uses(block)
    done = 0
    for operations in _cut(block, index):
        done += len(operations)
        made = [result for operation in operations for result in operation.results]
        needed = {value for value in made if value in index or last.get(value, -1) >= done}
        segment = _segment(module, operations, needed)
        results = run(segment.module, [known[value] for value in segment.reads])
        for value, array in zip(segment.gives, results, strict=True):
            if value in index:
                yield index[value], array
            if last.get(value, -1) >= done:
                known[value] = array
        for value in [value for value in known if last.get(value, -1) < done]:
            del known[value]


def _cut(block: Any, index: dict[Any, int]) -> Iterator[list[Any]]:
    """Runs of operations; a value that is no array, a token for instance, stays within one of them."""
    part: list[Any] = []
    size, tokens = 0, 0
    for operation in surgery.body(block):
        part.append(operation)
        size += sum(sizes.size(value.type) for value in operation.results if value in index)
        tokens += any(ir.tensor_type(value.type) is None for value in operation.results)
        if (len(part) >= _LENGTH or size > _MAX_BYTES) and not tokens:
            yield part
            part, size = [], 0
    if part:
        yield part


def _last_uses(block: Any) -> dict[Any, int]:
    """Value -> position of the last operation that reads it, also in a region."""
    found: dict[Any, int] = {}
    for position, operation in enumerate(surgery.body(block)):
        for each in (operation, *ir.operations(operation)):
            for operand in each.operands:
                found[operand] = position
    return found


def _segment(module: ir.MlirModule, operations: Sequence[Any], needed: Collection[Any]) -> _Segment:
    mlir = ir.mlir()
    inside: set[Any] = set()
    for operation in operations:
        for each in (operation, *ir.operations(operation)):
            inside.update((*each.results, *surgery.arguments(each)))
    reads: dict[Any, None] = {}
    constants: dict[Any, None] = {}
    for operation in operations:
        for each in (operation, *ir.operations(operation)):
            for operand in each.operands:
                if operand not in inside:
                    (constants if _is_constant(operand) else reads)[operand] = None
    gives = [
        result
        for operation in operations
        for result in operation.results
        if result in needed and not _is_constant(result)
    ]
    with module.context, mlir.Location.unknown():
        callees = surgery.reached(ir.functions(module), operations).values()
        made, block = surgery.new_program(reads, gives, callees)
        here = dict(zip(reads, block.arguments, strict=True))
        with mlir.InsertionPoint(block):
            for operation in (*(value.owner.operation for value in constants), *operations):
                copied = operation.clone().operation
                surgery.replace_operands(copied, here)
                here.update(zip(operation.results, copied.results, strict=True))
            mlir.Operation.create("func.return", operands=[here[value] for value in gives])
    return _Segment(made, list(reads), gives)


def _is_constant(value: Any) -> bool:
    operation = surgery.producer(value)
    return operation is not None and inspection.structure_of(operation) == "constant"
