"""Clone functions for their calls, so that callers can have different colours; merge identical clones afterwards.

JAX writes ``relu``, ``where`` or the slicing of a scan's inputs as one function with many callers.  With one colour for
all callers, a loop would cast its whole stacked input in every iteration.
"""

from __future__ import annotations

from typing import Any, Final

from xla_amp.stablehlo import ir, surgery
from xla_amp.stablehlo.scope_paths import calls

SMALL: Final = 32
"""Largest number of operations in a function that is cloned for each call: bounds the growth of the module."""


def clone_for_calls(module: Any, *, per_path: bool) -> dict[str, str]:
    """Clones private functions: small ones that call none for each call, with `per_path` others for each path.

    So a rule for modules can reach one of the calls.

    Returns:
        Name of a clone -> name of the function.
    """
    functions = ir.functions(module)
    small = {name for name, function in functions.items() if _is_small(function)}
    first: dict[str, Any] = {}
    clones: dict[tuple[str, Any], str] = {}
    copies: dict[str, str] = {}
    for name, path, call in calls(module):
        if call is None or name in copies or name not in functions or not ir.is_private(functions[name]):
            continue
        key = call if name in small else path if per_path else ""
        if first.setdefault(name, key) == key:
            continue
        if (name, key) not in clones:
            wanted = f"{name}.{sum(origin == name for origin in copies.values()) + 1}"
            copied = surgery.name_of(surgery.clone_function(module, functions[name], wanted, functions | copies))
            clones[name, key], copies[copied] = copied, name
        surgery.redirect(call, clones[name, key])
    return copies


def _is_small(function: Any) -> bool:
    count = 0
    for operation in ir.operations(function):
        count += 1
        if count > SMALL or operation.name == "func.call":
            return False
    return count > 0


def merge_identical(module: Any, copies: dict[str, str]) -> None:
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
        if operation.name == "func.call":
            kept = same.get(operation.attributes[surgery.CALLEE].value, "")
            if kept:
                surgery.redirect(operation, kept)
    for name in same:
        functions[name].erase()
