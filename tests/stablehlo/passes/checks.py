"""Checks on converted StableHLO modules, for the StableHLO and the JAX front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xla_amp.policy import load
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.op_table import Classifier
from xla_amp.stablehlo.scope_paths import ModulePaths

CONTRACTIONS = ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution", "chlo.ragged_dot")


def elements(values: Any) -> list[str]:
    """Element types of floating-point tensors."""
    kinds = (ir.tensor_type(value.type) for value in values)
    return [kind.element for kind in kinds if kind and kind.element in ("f64", "f32", "f16", "bf16")]


def contractions(module: Any) -> list[tuple[str, list[str]]]:
    """(name, operand types) of each float contraction."""
    found = [(op.name, elements(op.operands)) for op in ir.operations(module.operation) if op.name in CONTRACTIONS]
    return [(name, kinds) for name, kinds in found if kinds]


def wide_contractions(module: Any) -> list[tuple[str, list[str]]]:
    """Contractions that read float32."""
    return [found for found in contractions(module) if "f32" in found[1]]


def low_denied(module: Any, policy: str, low: str = "bf16") -> Iterator[str]:
    """Operations of the deny class that read or write the low dtype."""
    classifier = Classifier(load(policy), ModulePaths(module))
    for operation in ir.operations(module.operation):
        if operation.name.startswith(("func.", "stablehlo.return")):
            continue
        op_class = classifier.classify(operation)
        if op_class.colour == "deny" and low in elements([*operation.operands, *operation.results]):
            yield op_class.name


def casts(module: Any) -> int:
    """Casts between floating-point dtypes."""
    operations = ir.operations(module.operation)
    return sum(
        1 for op in operations if op.name == "stablehlo.convert" and elements(op.operands) and elements(op.results)
    )


def error(outputs: Sequence[np.ndarray[Any, Any]], expected: Sequence[np.ndarray[Any, Any]]) -> float:
    """The largest relative error of an output, as a norm."""
    worst = 0.0
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        assert np.isfinite(got).all()
        size = float(np.linalg.norm(wanted))
        worst = max(worst, float(np.linalg.norm(got - wanted)) / (size or 1.0))
    return worst
