"""Clone small functions for each call, so that callers can have different colours; merge identical clones afterwards.

JAX writes ``relu``, ``where`` or the slicing of a scan's inputs as one function with many callers.  With one colour for
all callers, a loop would cast its whole stacked input in every iteration.
"""

from __future__ import annotations

from typing import Any, Final

from xla_amp.stablehlo import ir, surgery
from xla_amp.stablehlo.passes.op_table import Classifier

SMALL: Final = 32
"""Largest number of operations in a function that is cloned: bounds the growth of the module."""


def clone_per_call(module: Any, classifier: Classifier) -> dict[str, str]:
    """Clones each small private leaf function for each call but the first.

    Returns:
        Name of a clone -> name of the function.
    """
    functions = ir.functions(module)
    calls: dict[str, list[Any]] = {}
    for operation in ir.operations(module.operation):
        if classifier.classify(operation).structure == "call":
            calls.setdefault(operation.attributes[surgery.CALLEE].value, []).append(operation)
    copies: dict[str, str] = {}
    taken = set(functions)
    for name, callers in calls.items():
        function = functions.get(name)
        if function is None or len(callers) < 2 or not ir.is_private(function) or not _small(function, classifier):
            continue
        for number, call in enumerate(callers[1:], 1):
            copied = surgery.name_of(surgery.clone_function(module, function, f"{name}.{number}", taken))
            taken.add(copied)
            copies[copied] = name
            surgery.redirect(call, copied)
    return copies


def _small(function: Any, classifier: Classifier) -> bool:
    count = 0
    for operation in ir.operations(function):
        count += 1
        if count > SMALL or classifier.classify(operation).structure == "call":
            return False
    return count > 0


def merge_identical(module: Any, classifier: Classifier, copies: dict[str, str]) -> None:
    """Replaces clones with identical bodies by one, the original function if it is among them."""
    functions = ir.functions(module)
    first: dict[tuple[str, str], str] = {}
    same: dict[str, str] = {}
    for name in [*dict.fromkeys(copies.values()), *copies]:
        origin = copies.get(name, name)
        # Local scope: numbering the whole module for each function would take quadratic time.
        body = functions[name].get_asm(use_local_scope=True)
        body = body.replace(f"@{name}(", "@(", 1).replace(f'@"{name}"(', "@(", 1)
        kept = first.setdefault((origin, body), name)
        if kept != name:
            same[name] = kept
    if not same:
        return
    for operation in ir.operations(module.operation):
        if classifier.classify(operation).structure == "call":
            kept = same.get(operation.attributes[surgery.CALLEE].value, "")
            if kept:
                surgery.redirect(operation, kept)
    for name in same:
        functions[name].erase()
