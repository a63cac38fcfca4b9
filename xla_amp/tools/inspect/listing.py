"""The operations of a module as rows of a report, and what flows between its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from xla_amp.common.events import DecisionRecord
from xla_amp.policy import load
from xla_amp.report import operations, units
from xla_amp.report.document import Edge
from xla_amp.report.operations import Operation
from xla_amp.stablehlo import ir, locations
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.module_paths import ModulePaths
from xla_amp.stablehlo.passes.op_table import Classifier, OpClass

_CONTROL: Final = frozenset({"loop", "branch", "inline", "call", "identity", "constant"})
"""Structures that compute nothing themselves."""
_COMPUTES: Final = frozenset({"abs", "clamp", "maximum", "minimum", "negate", "sign"})
"""Operations that do not round and are not plumbing either."""


def rows(module: ir.MlirModule, walked: Iterator[tuple[Any, str]]) -> tuple[tuple[Operation, ...], tuple[Edge, ...]]:
    """One row for each operation, and the values that operations of one layer give to those of another.

    Args:
        module: the program.
        walked: its operations with their functions, in program order.
    """
    paths = ModulePaths(module)
    classifier = Classifier(load("tpu"), paths)
    found: list[Operation] = []
    scopes: dict[Any, str] = {}
    flows: dict[tuple[str, str, str], list[int]] = {}
    seen: set[tuple[Any, str]] = set()
    for operation, function in walked:
        if not len(operation.results):
            continue
        scope = paths.of(operation, function)
        kind = classifier.classify(operation)
        for value in operation.operands:
            source = scopes.get(value)
            if source is None or source == scope or (value, scope) in seen:
                continue
            seen.add((value, scope))
            flow = flows.setdefault((source, scope, ir.element(value)), [0, 0])
            flow[0] += 1
            flow[1] += sizes.size(value.type)
        if kind.structure != "constant":
            scopes.update((result, scope) for result in operation.results)
        found.append(_row(operation, kind, scope))
    return tuple(found), tuple(Edge(*key, number, size) for key, (number, size) in flows.items())


def _row(operation: Any, kind: OpClass, scope: str) -> Operation:
    name = sizes.short_name(operation)
    given, made = (list(map(ir.element, values)) for values in (operation.operands, operation.results))
    product, cast = kind.structure == "contraction", name in ("convert", "stablehlo.convert")
    if product:
        given[:2] = sizes.read_elements(operation)
    computes = [each for each in given[: 2 if product else None] if units.is_floating(each)] or made
    moves = kind.structure in _CONTROL or (kind.colour == "clear" and name not in _COMPUTES)
    floating = any(map(units.is_floating, made)) and not moves
    given_shapes, made_shapes = sizes.shapes(operation)
    record = DecisionRecord(
        operation=name,
        cast="keep",
        layer="builtin",
        policy="",
        front="stablehlo",
        given=tuple(given),
        used=tuple(given),
        result=tuple(made),
        shapes=given_shapes,
        result_shapes=made_shapes,
        module=scope,
        flops=sizes.flops(operation),
        bytes=sizes.bytes_moved(operation),
        location=locations.of(operation).line,
        why=kind.why,
    )
    return Operation(
        record=record,
        product=product,
        state=operations.state(
            floating=floating or (cast and any(map(units.is_floating, (*given, *made)))),
            cast=cast,
            low=all(map(units.is_low, computes)),
            product=product,
            ruled=kind.colour == "deny" or any(map(units.is_low, given)),
            risky=kind.colour == "deny",
        ),
    )
