"""A copy of each small function for each of its calls, so that one caller's colour is not forced on the others.

JAX writes ``relu``, ``where`` or the slicing of a scan's inputs as one function that everybody calls.  With one colour
for all callers, a loop would cast its whole stacked input at every turn.  Copies that end up alike become one again.
"""

from __future__ import annotations

from typing import Any, Final

from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.op_table import Treatments

SMALL: Final = 32
"""Most operations in a function that is copied: what bounds the growth of the module."""
_CALLEE: Final = "callee"
_NAME: Final = "sym_name"


def specialize(module: Any, treatments: Treatments) -> dict[str, str]:
    """Gives each call of a small private function that calls no other its own copy.

    Returns:
        Name of a copy -> name of the function.
    """
    mlir = ir.mlir()
    functions = ir.functions(module)
    calls: dict[str, list[Any]] = {}
    for operation in ir.operations(module.operation):
        if treatments.of(operation).structure == "call":
            calls.setdefault(operation.attributes[_CALLEE].value, []).append(operation)
    copies: dict[str, str] = {}
    taken = set(functions)
    for name, callers in calls.items():
        function = functions.get(name)
        if function is None or len(callers) < 2 or not ir.is_private(function) or not _small(function, treatments):
            continue
        for number, call in enumerate(callers[1:], 1):
            copied = f"{name}.{number}"
            while copied in taken:
                copied += "_"
            taken.add(copied)
            copies[copied] = name
            # Made where no insertion point is current: the module takes it at its end.
            clone = function.clone()
            clone.operation.attributes[_NAME] = mlir.StringAttr.get(copied)
            module.body.append(clone)
            call.attributes[_CALLEE] = mlir.FlatSymbolRefAttr.get(copied)
    return copies


def _small(function: Any, treatments: Treatments) -> bool:
    count = 0
    for operation in ir.operations(function):
        count += 1
        if count > SMALL or treatments.of(operation).structure == "call":
            return False
    return count > 0


def merge(module: Any, treatments: Treatments, copies: dict[str, str]) -> None:
    """Makes copies that have become the same function one again, under the function's own name where it is one."""
    mlir = ir.mlir()
    functions = ir.functions(module)
    first: dict[tuple[str, str], str] = {}
    same: dict[str, str] = {}
    for name in [*dict.fromkeys(copies.values()), *copies]:
        origin = copies.get(name, name)
        # In its local scope: numbering the whole module for each function would take quadratic time.
        body = functions[name].get_asm(use_local_scope=True)
        body = body.replace(f"@{name}(", "@(", 1).replace(f'@"{name}"(', "@(", 1)
        kept = first.setdefault((origin, body), name)
        if kept != name:
            same[name] = kept
    if not same:
        return
    for operation in ir.operations(module.operation):
        if treatments.of(operation).structure == "call":
            kept = same.get(operation.attributes[_CALLEE].value, "")
            if kept:
                operation.attributes[_CALLEE] = mlir.FlatSymbolRefAttr.get(kept)
    for name in same:
        functions[name].erase()
