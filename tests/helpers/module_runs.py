"""Run StableHLO modules once: with XLA, or with StableHLO's reference interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_amp.stablehlo import ir, surgery
from xla_amp.stablehlo.measure import execution


def run(module: ir.MlirModule, arguments: Sequence[Any], device: Any = None) -> list[np.ndarray[Any, Any]]:
    """Compiles the module for one device and runs it."""
    return execution.execute(execution.compile_module(module, device), arguments, device)


def interpret(module: ir.MlirModule, arguments: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Results of the reference interpreter, which rounds every operation to its result type."""
    interpreted = ir.copy(module)
    assert not uninterpretable(interpreted)  # the interpreter would end the process
    with interpreted.context, ir.mlir().Location.unknown():
        kinds = ir.signature(interpreted)
        widen_results(interpreted)
        taken = [argument(array, kind) for array, kind in zip(arguments, kinds.inputs, strict=True)]
        results = ir.dialect().eval_module(interpreted, taken)
        return [values(result, kind) for result, kind in zip(results, kinds.outputs, strict=True)]


NOT_INTERPRETED = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather", "all_reduce", "all_to_all", "batch_norm_grad", "batch_norm_inference", "batch_norm_training",
        "broadcast", "collective_broadcast", "collective_permute", "create_token", "partition_id", "reduce_scatter",
        "replica_id",
        "cross-replica-sum", "custom_call", "dot", "dynamic_conv", "einsum", "fft", "rng", "rng_bit_generator",
        "torch_index_select", "triangular_solve", "unary_einsum", "uniform_dequantize", "uniform_quantize",
    )
)  # fmt: skip
UNREADABLE = ("bf16", "f8E4M3FN", "f8E5M2")
"""Attributes of these types cannot be read."""


def uninterpretable(module: ir.MlirModule) -> list[str]:
    """Names of the operations that the reference interpreter does not support, sorted."""
    names = {operation.name for operation in ir.operations(module.operation)}
    return sorted(n for n in names if n in NOT_INTERPRETED or not n.startswith(("stablehlo.", "func.")))


def widen_results(module: ir.MlirModule) -> None:
    """Makes the module return float32 instead of `UNREADABLE`."""
    function = ir.entry(module)
    last = surgery.terminator(surgery.block_of(function))
    for index, operand in enumerate(list(last.operands)):
        if ir.tensor_type(operand.type).element in UNREADABLE:
            with ir.mlir().InsertionPoint(last):
                wide = ir.with_element(operand.type, ir.mlir().F32Type.get())
                last.operands[index] = ir.dialect().convert(wide, operand)
    surgery.update_type(function)


def argument(array: np.ndarray[Any, Any], kind: ir.TensorType) -> Any:
    array = np.asarray(array, dtype=ir.numpy_dtype(kind.element), order="C")
    if kind.element in UNREADABLE:
        array = array.view(f"u{array.dtype.itemsize}")
    mlir = ir.mlir()
    return mlir.DenseElementsAttr.get(array, type=mlir.Type.parse(kind.element), shape=list(array.shape))


def values(attribute: Any, kind: ir.TensorType) -> np.ndarray[Any, Any]:
    shape = [size or 0 for size in ir.tensor_type(attribute.type).shape]
    bits = [bool(each) for each in ir.mlir().DenseIntElementsAttr(attribute)] if kind.element == "i1" else attribute
    return np.array(bits).astype(ir.numpy_dtype(kind.element)).reshape(shape)
