"""Calibration on sample inputs: find operations that must stay float32 because of their values.

The module runs in float32.  Next to each operation that would run low, the same operation runs on rounded operands.
Measured for each operation, as maxima over all runs in loops and calls: the rounding error of its result, its result,
its operands.  Rounding is a ``reduce_precision``, which compilers do not remove.  Every region and function returns its
measurements as one vector to its caller, up to the entry function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from xla_amp.common import progress
from xla_amp.common.types import LowDtype
from xla_amp.stablehlo import constants, execution, ir, samples, surgery
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.cast_graph import CastNode
from xla_amp.stablehlo.passes.op_table import Classifier
from xla_amp.stablehlo.passes.propagation import Propagation

_AT_ONCE: Final = 512
"""Operations measured by one compiled module."""
_MAX_ERROR: Final = 1 / 32
_BITS: Final[Mapping[LowDtype, tuple[int, int]]] = {"bfloat16": (8, 7), "float16": (5, 10)}
"""Exponent and mantissa bits."""
_MEASURE: Final = """
func.func private @{name}(%value: {type}, %rounded: {type}) -> tensor<2xf32> {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %gap = stablehlo.subtract %value, %rounded : {type}
  %absolute_gap = stablehlo.abs %gap : {type}
  %same = stablehlo.compare EQ, %value, %rounded : ({type}, {type}) -> {truth}
  %number = stablehlo.compare EQ, %value, %value : ({type}, {type}) -> {truth}
  %no_number = stablehlo.not %number : {truth}
  %never = stablehlo.xor %number, %number : {truth}
  %zeros = stablehlo.convert %never : ({truth}) -> {type}
  %ignored = stablehlo.or %same, %no_number : {truth}
  %counted = stablehlo.select %ignored, %zeros, %absolute_gap : {truth}, {type}
  %finite = stablehlo.is_finite %value : ({type}) -> {truth}
  %absolute = stablehlo.abs %value : {type}
  %size = stablehlo.select %finite, %absolute, %zeros : {truth}, {type}
  %most = stablehlo.reduce(%counted init: %zero) applies stablehlo.maximum across dimensions = [{axes}] : ({type}, tensor<f32>) -> tensor<f32>
  %largest = stablehlo.reduce(%size init: %zero) applies stablehlo.maximum across dimensions = [{axes}] : ({type}, tensor<f32>) -> tensor<f32>
  %a = stablehlo.reshape %most : (tensor<f32>) -> tensor<1xf32>
  %b = stablehlo.reshape %largest : (tensor<f32>) -> tensor<1xf32>
  %both = stablehlo.concatenate %a, %b, dim = 0 : (tensor<1xf32>, tensor<1xf32>) -> tensor<2xf32>
  return %both : tensor<2xf32>
}}
"""  # noqa: E501 - one operation of MLIR a line


class Measurement(NamedTuple):
    """The measurement of one operation on the sample inputs."""

    error: float
    """Largest rounding error; NaN or infinite if the low dtype overflows."""
    result: float
    """Largest finite result, as an absolute value."""
    operand: float
    """Largest finite operand, as an absolute value."""

    def problem(self, low: LowDtype, largest: float, max_error: float) -> str:
        """Why the operation must stay float32; empty if it may run low."""
        size = max(self.result, self.operand)
        if size > largest:
            return f"sample inputs: values up to {size:.4g} overflow {low} ({largest:.4g})"
        if not math.isfinite(self.error):
            return f"sample inputs: overflows in {low}"
        if self.result and self.error > max_error * self.result:
            share = self.error / self.result
            return (
                f"sample inputs: in {low} it is wrong by {share:.2g} of its largest result, more than {max_error:.2g}"
            )
        return ""


_FIELDS: Final = len(Measurement._fields)


def keep_reasons(
    module: Any, propagation: Propagation, low: LowDtype, sample_inputs: Sequence[Any], max_error: float | None
) -> Callable[[CastNode], str]:
    """Runs `module` on `sample_inputs`; returns a function: node -> why it must stay float32, or empty.

    Raises:
        ModuleError: the inputs do not match the module, or it cannot run on one device.
    """
    given = _samples(module, sample_inputs)
    order = {operation: number for number, operation in enumerate(ir.operations(module.operation))}
    wanted = {order[node.operation]: node for node in propagation.nodes if _measurable(propagation, node)}
    numbers = sorted(wanted)
    reasons: dict[Any, str] = {}
    import ml_dtypes

    largest = float(ml_dtypes.finfo(low).max)
    for start in range(0, len(numbers), _AT_ONCE):
        progress.tell("measuring operations on the samples", start, len(numbers))
        part = {n: not propagation.wide.isdisjoint(wanted[n].outputs) for n in numbers[start : start + _AT_ONCE]}
        for number, measured in _measure(module, propagation.graph.classifier, part, low, given).items():
            why = measured.problem(low, largest, _MAX_ERROR if max_error is None else max_error)
            if why:
                reasons[wanted[number].operation] = why
    return lambda node: reasons.get(node.operation, "") if node.index is None else ""


def _measurable(propagation: Propagation, node: CastNode) -> bool:
    rounds = node.colour in ("allow", "widest", "infer") and node.structure in ("op", "contraction")
    return node.low and rounds and len(node.outputs) == 1 and len(node.operation.results) == 1


def _samples(module: Any, given: Sequence[Any]) -> list[list[np.ndarray[Any, Any]]]:
    import jax

    several = isinstance(given, list) and given and all(isinstance(each, tuple) for each in given)
    return [
        samples.fitted(jax.tree.leaves(sample), module, "sample_inputs") for sample in (given if several else [given])
    ]


def _measure(
    module: Any, classifier: Classifier, wanted: Mapping[int, bool], low: LowDtype, samples: list[list[Any]]
) -> dict[int, Measurement]:
    copied = ir.copy(module)
    with copied.context, ir.mlir().Location.unknown():
        surgery.call_composites(copied)  # one operation for one, so numbers stay
        numbers = _Instrumentation(copied, classifier, wanted, low).run()
    if not numbers:
        return {}
    found: dict[int, Measurement] = {}
    for sample in samples:
        refined = execution.refined(copied, sample)
        (vector,) = execution.run(refined, sample, sizes.quick_options(refined))
        for number, row in zip(numbers, vector.reshape(len(numbers), _FIELDS), strict=True):
            before = found.get(number, Measurement(0.0, 0.0, 0.0))
            # A NaN error stays: it means an overflow.
            error, result, operand = (float(np.maximum(a, b)) for a, b in zip(before, row, strict=True))
            found[number] = Measurement(error, result, operand)
    return found


class _Instrumentation:
    """Adds the measurements to a module, in place."""

    def __init__(self, module: Any, classifier: Classifier, wanted: Mapping[int, bool], low: LowDtype) -> None:
        self.module, self.classifier, self.wanted = module, classifier, wanted
        self.bits = _BITS[low]
        self._helpers: dict[Any, str] = {}
        self._functions = ir.functions(module)
        self._number = {op: number for number, op in enumerate(ir.operations(module.operation))}
        self._done: dict[str, list[int]] = {}

    def run(self) -> list[int]:
        """Makes the entry function return the measurements; returns the numbers of the measured operations in order."""
        main = ir.entry(self.module)
        numbers = self._function(surgery.name_of(main))
        for name in ("arg_attrs", "res_attrs"):  # donation and result names do not apply to the measurements
            if name in main.attributes:
                del main.attributes[name]
        if numbers:
            block = surgery.block_of(main)
            surgery.end(block, list(surgery.terminator(block).operands)[-1:])
            surgery.update_type(main)
        return numbers

    # Blocks and structures return the numbers of the measured operations, in order, and the vector of measurements.

    def _function(self, name: str) -> list[int]:
        if name not in self._done:
            self._done[name] = []  # ends recursion; a recursive program is not valid
            function = self._functions[name]
            block = surgery.block_of(function)
            numbers, vector = self._block(block)
            if vector is not None:
                self._return_too(block, vector)
                if "res_attrs" in function.attributes:
                    del function.attributes["res_attrs"]
                surgery.update_type(function)
            self._done[name] = numbers
        return self._done[name]

    def _return_too(self, block: Any, vector: Any) -> None:
        surgery.end(block, [*surgery.terminator(block).operands, vector])

    def _block(self, block: Any) -> tuple[list[int], Any]:
        numbers: list[int] = []
        vectors: list[Any] = []
        # Look up all numbers first: a new operation can get the address of an erased one.
        numbered = [(self._number[operation], operation) for operation in surgery.body(block)]
        for number, operation in numbered:
            structure = self.classifier.classify(operation).structure
            found, vector = [], None
            if structure in ("loop", "branch", "inline", "call"):
                found, vector = getattr(self, f"_{structure}")(operation)
            elif number in self.wanted:
                found, vector = [number], self._measure(operation, wide=self.wanted[number])
            if vector is not None:
                numbers += found
                vectors.append(vector)
        if not vectors:
            return [], None
        with ir.mlir().InsertionPoint(surgery.terminator(block)):
            return numbers, self._concatenated(vectors)

    def _concatenated(self, vectors: list[Any]) -> Any:
        if len(vectors) == 1:
            return vectors[0]
        return ir.dialect().concatenate(vectors, 0)

    def _zeros(self, count: int) -> Any:
        kind = ir.mlir().RankedTensorType.get([_FIELDS * count], ir.mlir().F32Type.get())
        return ir.dialect().constant(constants.attribute_of(np.zeros(1, np.float32), kind))

    # Structures.

    def _call(self, operation: Any) -> tuple[list[int], Any]:
        name = operation.attributes[surgery.CALLEE].value
        if name not in self._functions or not len(self._functions[name].regions[0].blocks):
            return [], None
        numbers = self._function(name)
        if not numbers:
            return [], None
        return numbers, self._extended(operation, [], len(numbers))

    def _loop(self, operation: Any) -> tuple[list[int], Any]:
        body = operation.regions[len(operation.regions) - 1].blocks[0]
        numbers, vector = self._block(body)
        if vector is None:
            return [], None
        mlir = ir.mlir()
        for region in operation.regions:
            region.blocks[0].add_argument(vector.type, mlir.Location.unknown())
        with mlir.InsertionPoint(surgery.terminator(body)):
            merged = ir.dialect().maximum(body.arguments[len(body.arguments) - 1], vector)
        self._return_too(body, merged)
        with mlir.InsertionPoint(operation):
            start = self._zeros(len(numbers))
        return numbers, self._extended(operation, [start], len(numbers))

    def _branch(self, operation: Any) -> tuple[list[int], Any]:
        blocks = [region.blocks[0] for region in operation.regions]
        parts = [self._block(block) for block in blocks]
        numbers = [number for found, _ in parts for number in found]
        if not numbers:
            return [], None
        for at, block in enumerate(blocks):
            with ir.mlir().InsertionPoint(surgery.terminator(block)):
                vectors = [
                    vector if here == at else self._zeros(len(found))
                    for here, (found, vector) in enumerate(parts)
                    if vector is not None
                ]
                vector = self._concatenated(vectors)
            self._return_too(block, vector)
        return numbers, self._extended(operation, [], len(numbers))

    def _inline(self, operation: Any) -> tuple[list[int], Any]:
        return [], None  # sharded: one device does not see all values

    def _extended(self, operation: Any, operands: list[Any], count: int) -> Any:
        """Replaces `operation` by one with more operands and one more result: the vector of measurements, returned."""
        mlir = ir.mlir()
        results = [*(each.type for each in operation.results)]
        results.append(mlir.RankedTensorType.get([_FIELDS * count], mlir.F32Type.get()))
        with mlir.InsertionPoint(operation):
            made = mlir.Operation.create(
                operation.name,
                results=results,
                operands=[*operation.operands, *operands],
                attributes={name: operation.attributes[name] for name in operation.attributes},
                regions=len(operation.regions),
            )
        for source, target in zip(operation.regions, made.regions, strict=True):
            for block in list(source.blocks):
                block.append_to(target)
        for result, renewed in zip(operation.results, made.results, strict=False):
            result.replace_all_uses_with(renewed)
        operation.erase()
        return made.results[len(results) - 1]

    # One operation.

    def _measure(self, operation: Any, *, wide: bool) -> Any:
        mlir = ir.mlir()
        result = operation.results[0]
        with mlir.InsertionPoint.after(operation):
            operands = [self._rounded(operand) for operand in operation.operands]
            again = operation.clone().operation
            for index, operand in enumerate(operands):
                again.operands[index] = operand
            approximate = again.results[0] if wide else self._rounded(again.results[0])
            measured = self._compare(result, approximate)
            largest = None
            for operand in operation.operands:
                if self._wide(operand):
                    peak = ir.dialect().slice(self._compare(operand, operand), [1], [2], [1])
                    largest = peak if largest is None else ir.dialect().maximum(largest, peak)
            if largest is None:
                largest = ir.dialect().slice(measured, [1], [2], [1])
            return ir.dialect().concatenate([measured, largest], 0)

    def _wide(self, value: Any) -> bool:
        kind = ir.tensor_type(value.type)
        return kind is not None and kind.element == "f32"

    def _rounded(self, value: Any) -> Any:
        if not self._wide(value):
            return value
        return ir.dialect().reduce_precision(value, exponent_bits=self.bits[0], mantissa_bits=self.bits[1])

    def _compare(self, value: Any, rounded: Any) -> Any:
        mlir = ir.mlir()
        name = self._helpers.get(value.type)
        if name is None:
            name = self._helpers[value.type] = f"xla_amp_measured_{len(self._helpers)}"
            truth = ir.with_element(value.type, mlir.IntegerType.get_signless(1))
            axes = ", ".join(map(str, range(value.type.rank)))
            source = _MEASURE.format(name=name, type=value.type, truth=truth, axes=axes)
            self.module.body.append(mlir.Operation.parse(source))
        pair = mlir.RankedTensorType.get([2], mlir.F32Type.get())
        return surgery.call(name, [value, rounded], [pair]).results[0]
