"""Where values of a program come from: arguments and constants, forward or backward pass.

An argument or constant that is moved, carried by a loop that does not change it, or passed to a function, is still the
same.  Whether an operation belongs to a backward pass is in the names that JAX and `xla_amp.export` write into
locations: ``transpose(...)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.module_paths import enclosing, written_name
from xla_amp.stablehlo.passes.op_table import table_name

_FLOATING: Final = ("f64", "f32", "f16", "bf16")
_MOVES: Final = frozenset(
    {
        "broadcast_in_dim", "convert.float", "custom_call.Sharding", "dynamic_slice", "optimization_barrier", "reshape",
        "reverse", "sdy.reshard", "sdy.sharding_constraint", "slice", "transpose",
    }
)  # fmt: skip
"""Operations behind which a weight is still the weight; their first operand is what they move."""
CALLS: Final = ("func.call", "call")
_GRADIENT: Final = re.compile(r"(?:^|[/(])transpose\(")
_AGAIN: Final = "rematted_computation"
"""In the name of what a backward pass computes again."""
_NAMES_GRADIENTS: Final = re.compile(r'"jit\(|transpose\(|/xla_amp/lowering/')
"""In the locations of a producer that names gradients: JAX, and `xla_amp.export`."""


def element(value: Any) -> str:
    """Element type of a tensor as MLIR writes it; empty for other values."""
    kind = ir.tensor_type(value.type)
    return kind.element if kind else ""


class Sources:
    """The argument or constant of a program that a value is, perhaps moved."""

    def __init__(self, module: Any) -> None:
        self._functions = ir.functions(module)
        self.calls: Final = _calls_of(module)
        self._known: dict[Any, Any] = {}

    def of(self, value: Any) -> Any:
        """The argument or constant, as a value; None if `value` is computed."""
        passed = []
        while value is not None and value not in self._known:
            self._known[value] = None  # of a value that a loop makes of itself
            passed.append(value)
            before = self._before(value)
            if before is value:
                self._known[value] = value
                break
            value = before
        found = None if value is None else self._known[value]
        self._known.update(dict.fromkeys(passed, found))
        return found

    def _before(self, value: Any) -> Any:
        """The value that `value` was moved from: itself for an argument or constant, None if it was computed."""
        if element(value) not in _FLOATING:
            return None
        owner = value.owner
        if isinstance(owner, ir.mlir().Block):
            return self._argument(owner, value)
        operation, index = owner.operation, list(owner.operation.results).index(value)
        if operation.name == "stablehlo.constant":
            return None if ir.is_splat(operation) else value
        if operation.name == "stablehlo.while":
            return _carried(operation, index)
        if operation.name in CALLS:
            function = self._functions.get(operation.attributes["callee"].value)
            return None if function is None or not len(function.regions[0].blocks) else _yielded(function, index)
        if table_name(operation) not in _MOVES:
            return None
        return operation.operands[index if operation.name == "stablehlo.optimization_barrier" else 0]

    def _argument(self, block: Any, value: Any) -> Any:
        index, parent = ir.mlir().BlockArgument(value).arg_number, block.owner.operation
        if parent.name == "stablehlo.while":
            return _carried(parent, index)
        if parent.name == "sdy.manual_computation":
            return parent.operands[index]
        if parent.name != "func.func":
            return None
        calls = self.calls.get(parent.attributes["sym_name"].value, [])
        if not calls:
            return value
        roots = [self.of(call.operands[index]) for call in calls]
        if any(root is None for root in roots):
            return None
        return roots[0] if all(root == roots[0] for root in roots) else value


def _carried(loop: Any, index: int) -> Any:
    """What a loop carries at `index` if its body does not change it; otherwise None."""
    body = loop.regions[1]
    return loop.operands[index] if _yielded(loop, index, 1) == body.blocks[0].arguments[index] else None


def _yielded(operation: Any, index: int, region: int = 0) -> Any:
    operations = operation.regions[region].blocks[0].operations
    return operations[len(operations) - 1].operation.operands[index]


def _calls_of(module: Any) -> dict[str, list[Any]]:
    """Calls by the name of the function that they call."""
    calls: dict[str, list[Any]] = {}
    for operation in ir.operations(module.operation):
        if operation.name in CALLS:
            calls.setdefault(operation.attributes["callee"].value, []).append(operation)
    return calls


class Gradients:
    """Which products are part of a backward pass.

    Args:
        calls: of the program's functions, by their names (`Sources.calls`).
        products: of the program.
    """

    def __init__(self, calls: Mapping[str, Sequence[Any]], products: Sequence[Any]) -> None:
        self._calls = calls
        every = (call for found in calls.values() for call in found)
        self._told = any(_NAMES_GRADIENTS.search(str(each.location)) for each in (*products, *every))
        self._functions: dict[str, bool | None] = {}

    def of(self, operation: Any) -> bool | None:
        """Whether `operation` is; None if the program does not tell."""
        return self._by_name(operation) if self._told else None

    def _by_name(self, operation: Any) -> bool | None:
        name = written_name(operation) or ""
        if _AGAIN in name:
            return False
        if _GRADIENT.search(name):
            return True
        called = enclosing(operation)
        if called not in self._functions:
            found = {self._by_name(call) for call in self._calls.get(called, [])} or {False}
            self._functions[called] = found.pop() if len(found) == 1 else None
        return self._functions[called]
