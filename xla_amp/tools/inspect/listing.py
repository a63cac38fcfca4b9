"""The operations of a module as rows of a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from xla_amp.common import units
from xla_amp.common.events import DecisionRecord
from xla_amp.policy import load
from xla_amp.stablehlo import ir, locations
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.module_paths import ModulePaths
from xla_amp.stablehlo.passes.op_table import Classifier, OpClass
from xla_amp.tools.explain import operations
from xla_amp.tools.explain.operations import Operation

_CONTROL: Final = frozenset({"loop", "branch", "inline", "call", "identity", "constant"})
"""Structures that compute nothing themselves."""
_COMPUTES: Final = frozenset({"abs", "clamp", "maximum", "minimum", "negate", "sign"})
"""Operations that do not round and are not plumbing either."""


def rows(module: ir.MlirModule, walked: Iterator[tuple[Any, str]]) -> tuple[Operation, ...]:
    """One row for each operation.

    `walked` are its operations with their functions, in program order.
    """
    paths = ModulePaths(module)
    classifier = Classifier(load("tpu"), paths)
    return tuple(
        _row(operation, classifier.classify(operation), paths.of(operation, function))
        for operation, function in walked
        if len(operation.results)
    )


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
        verdict=operations.verdict(
            floating=floating or (cast and any(map(units.is_floating, (*given, *made)))),
            cast=cast,
            low=all(map(units.is_low, computes)),
            product=product,
            ruled=kind.colour == "deny" or any(map(units.is_low, given)),
            risky=kind.colour == "deny",
        ),
    )
