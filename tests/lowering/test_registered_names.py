"""Registered lowerings agree with torch's schemas."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from harness import is_here, operator

from xla_amp.lowering import SUPPLIES, Lowering, table

NAMES = sorted(name for name in table() if "::" not in name and is_here(name))  # others: libraries loaded elsewhere

DROPPED = ("Device", "Layout", "Generator", "MemoryFormat")
UNCHANGED = {
    # Marked as written for torch.compile's sake; the caller counts the steps (torch/optim/adagrad.py).
    "_fused_adagrad_": {"state_steps"},
    "_fused_adagrad_.tensor_lr": {"state_steps"},
}
"""Arguments that a schema marks as written and that the operation does not change."""


def problems(lowering: Lowering) -> Iterator[str]:
    """How `lowering` disagrees with the schema of its operation."""
    try:
        schema = operator(lowering.name)._schema
    except AttributeError:
        yield "torch has no such operation"
        return
    qualified = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(qualified, "CompositeImplicitAutograd") and not has_kernel(qualified, "Autograd"):
        # A device kernel would replace the composition that autograd differentiates.
        yield "torch composes it of other operations, it must not have a kernel"
    kept = [a for a in schema.arguments if str(a.real_type).removeprefix("Optional[").removesuffix("]") not in DROPPED]
    kept = [a for a in kept if a.name != "pin_memory"]
    kinds = {a.name: str(a.real_type).removeprefix("Optional[").removesuffix("]") for a in kept}
    for argument in lowering.static:
        if kinds.get(argument) != "number":
            yield f"static argument {argument!r} is no Scalar of {schema}"
    for argument in lowering.lifted:
        if kinds.get(argument) not in ("float", "Tensor"):  # forms of one operation share a function
            yield f"lifted argument {argument!r} is no float of {schema}"
    for argument in lowering.mutates:
        if argument not in kinds:
            yield f"mutated argument {argument!r} is none of {schema}"
    written = {a.name for a in kept if a.alias_info is not None and a.alias_info.is_write}
    if not written <= set(lowering.mutates) | UNCHANGED.get(lowering.name, set()):
        yield f"{sorted(written)} are written, but mutates says {lowering.mutates}"
    positional = [None for a in kept if not a.kwarg_only]
    keywords = [a.name for a in kept if a.kwarg_only]
    try:
        inspect.signature(lowering.function).bind(*positional, **dict.fromkeys([*keywords, *lowering.supplies]))
    except TypeError as error:
        yield f"{error}: {schema}"
    if not lowering.supplies <= SUPPLIES.keys():
        yield f"asks for {sorted(lowering.supplies)}"


def test_lowerings_fit_their_operations():
    assert {name: found for name in NAMES if (found := list(problems(table()[name])))} == {}
