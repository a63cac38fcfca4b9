"""Compare two programs: run both on the same inputs, and subtract their results.

    >>> compare(f32_module, bf16_module).outputs[0].error.relative            # doctest: +SKIP
    0.0031

A runs once more on inputs that are off by one rounding.  A result that this changes beyond recognition is only rounding
error, as the gradient of a bias before a norm is, and no program can be judged by it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from xla_amp.common import progress, units
from xla_amp.common.tables import Table
from xla_amp.errors import ModuleError
from xla_amp.pages.page import Page, Report, Section
from xla_amp.stablehlo import ir, sizes
from xla_amp.stablehlo.converted import as_program
from xla_amp.stablehlo.measure import execution, inspection, samples

TOLERANCE: Final = 0.05
"""Default limit of `Error.relative` for `Comparison.agrees`."""
NOT_JUDGED: Final = (
    "not judged: it is rounding error in float32 already, as a value that is zero in exact arithmetic is"
)
_UNNAMED: Final = "result "
"""Begins the name of a result that the program gives none."""
_NO_DIGIT: Final = 0.5
"""Relative change by one rounding of the inputs above which no digit of a result is right."""


class Error(NamedTuple):
    """The error of an array against the reference, over the elements that are finite in both."""

    relative: float
    """Norm of the difference divided by the norm of the reference; for integers the share of elements that differ.

    NaN if there is no element to judge by: none is finite in both, and some are NaN."""
    nonfinite: int
    """Elements that are finite in only one of the two, or not the same infinity or NaN."""


class OutputError(NamedTuple):
    """One result of the program."""

    number: int
    type: str
    """In B."""
    name: str
    """``result[0]['w']``, as the program says."""
    error: Error
    """Of B against A."""
    rounding: float
    """Relative change of A's result where its inputs are off by one rounding."""
    judged: bool = True
    """Whether it counts for `Comparison.agrees`; a result that is only rounding error counts if it is not finite."""

    def agrees(self, tolerance: float) -> bool:
        """Whether it is within `tolerance`, or within what one rounding changes, and finite where A's is."""
        return not self.error.nonfinite and (
            not self.judged or self.error.relative <= max(tolerance, min(self.rounding, _NO_DIGIT))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Report):
    """The result of `compare`."""

    outputs: tuple[OutputError, ...]

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Whether each result of B is within `tolerance` of A's, and finite where that is."""
        return self.first_difference(tolerance) is None

    def first_difference(self, tolerance: float = TOLERANCE) -> OutputError | None:
        """The first result that differs, a named one if there is one; None if all agree."""
        differ = [each for each in self.outputs if not each.agrees(tolerance)]
        return min(differ, key=lambda each: each.name.startswith(_UNNAMED), default=None)

    def page(self, title: str = "two StableHLO programs", tolerance: float = TOLERANCE) -> Page:
        """The report for people."""
        return Page(title, sections=[self._answer(tolerance), Section("Results", table=self._table(tolerance))])

    def _answer(self, tolerance: float) -> Section:
        first = self.first_difference(tolerance)
        if first is None:
            answer = f"agree at a tolerance of {tolerance:g}"
        else:
            count = sum(not each.agrees(tolerance) for each in self.outputs)
            answer = f"{count} of {len(self.outputs)} differ at a tolerance of {tolerance:g}; the first is {first.name}"
        items = [] if first is None else [(first.name, described(first.error))]
        items += [(each.name, NOT_JUDGED) for each in self.outputs if not each.judged]
        return Section("Do the results of B agree with A?", answer, items)

    def _table(self, tolerance: float) -> Table:
        rows = [
            (
                each.name,
                each.type,
                units.error(each.error.relative),
                units.error(each.rounding),
                each.error.nonfinite or None,
            )
            for each in self.outputs
        ]
        columns = ("result", "type", "error", "by one rounding", "not finite")
        return Table(
            columns=columns,
            rows=rows,
            right=("error", "by one rounding"),
            optional=("by one rounding",),
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {"outputs": [{**each._asdict(), "error": each.error._asdict()} for each in self.outputs]}


def compare(a: Any, b: Any, inputs: Sequence[Any] | None = None, *, seed: int = 0) -> Comparison:
    """Runs both programs on the CPU with the same arguments.

    Results that float32 itself cannot compute are listed and not judged (`OutputError.judged`).

    Args:
        a: the reference program, usually in float32; any kind of program that `autocast` takes.
        b: the other program, with arguments and results of the same shapes.
        inputs: one array for each argument; default: `samples.random_inputs` of `seed`.

    Raises:
        ModuleError: the programs differ in their arguments or results, have no result, or one cannot be run on one
            device.
    """
    first, second = (_for_one_device(as_program(each).module, name) for each, name in ((a, "A"), (b, "B")))
    arrays = samples.random_inputs(first, seed) if inputs is None else samples.fitted(inputs, first, "A")
    narrow = samples.fitted(arrays, second, "B")
    first, second = execution.refined(first, arrays), execution.refined(second, narrow)
    shapes = [[kind and kind.shape for kind in ir.signature(each).outputs] for each in (first, second)]
    if shapes[0] != shapes[1]:
        raise ModuleError(f"A and B give results of different shapes: {shapes[0]} and {shapes[1]}")
    progress.tell("running A and B")
    names = [each.name for each in a.outputs] if hasattr(a, "outputs") else None
    return Comparison(outputs=tuple(Reference(first, [arrays], names).compare(Runs(second))))


class Runs:
    """Runs a module on the CPU.

    Raises:
        ModuleError: the module cannot be run on one device, or the inputs of a call do not fit.
    """

    def __init__(self, module: ir.MlirModule) -> None:
        self.types = [kind.element if kind else "" for kind in ir.signature(module).outputs]
        self._module = for_cpu(_for_one_device(module, "the program"))
        self._options = {**sizes.quick_options(module), "xla_allow_excess_precision": False}

    def __call__(self, inputs: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """The results of one call."""
        arrays = samples.fitted(inputs, self._module)
        return execution.run(execution.refined(self._module, arrays), arrays, self._options)


class Reference:
    """The results of a program on samples, against which those of other programs are measured.

    Raises:
        ModuleError: the program has no result, or cannot be run on one device.
    """

    def __init__(self, module: ir.MlirModule, given: Sequence[Sequence[Any]], names: Sequence[str] | None = None):
        self._module, self._samples, self._runs = module, given, Runs(module)
        self._names = result_names(module) if names is None else names
        if not self._names:
            raise ModuleError("the program gives no result: there is nothing to compare, and no error to measure")

    def compare(self, other: Runs, sample: int = 0) -> list[OutputError]:
        """The errors of another program, whose results have the same shapes, on the sample of this number."""
        exact, roundings = self._results(sample)
        rows = zip(other.types, self._names, other(self._samples[sample]), exact, roundings, self._noisy(), strict=True)
        return [
            OutputError(index, kind, name, measure(made, right), rounding, judged=not noisy)
            for index, (kind, name, made, right, rounding, noisy) in enumerate(rows)
        ]

    @functools.cache  # noqa: B019 - lives as long as one search
    def _noisy(self) -> list[bool]:
        """Whether each result is only rounding error, on some sample; none is if all are."""
        changes = zip(*(self._results(number)[1] for number in range(len(self._samples))), strict=True)
        found = [any(each > _NO_DIGIT for each in of_one) for of_one in changes]
        return [False] * len(found) if all(found) else found

    @functools.cache  # noqa: B019 - as above
    def _results(self, number: int) -> tuple[list[np.ndarray[Any, Any]], list[float]]:
        """The results on a sample, and the relative change of each where its floats are off by one rounding."""
        sample = samples.fitted(self._samples[number], self._module)
        random = np.random.default_rng(0)
        nudged = [
            np.nextafter(array, (random.choice([-np.inf, np.inf], array.shape)).astype(array.dtype))
            if array.dtype in (np.float16, np.float32, np.float64)
            else array
            for array in sample
        ]
        exact = self._runs(sample)
        return exact, [measure(*pair).relative for pair in zip(self._runs(nudged), exact, strict=True)]


def result_names(module: ir.MlirModule) -> list[str]:
    """Names of the results: ``result[0]['w']``; ``result 3`` where the program has none."""
    function = ir.entry(module)
    count = len(ir.signature(module).outputs)
    attributes: Sequence[Any] = function.attributes["res_attrs"] if "res_attrs" in function.attributes else [{}] * count
    names = [str(each["jax.result_info"].value) if "jax.result_info" in each else "" for each in attributes]
    return [name or f"{_UNNAMED}{index}" for index, name in enumerate(names)]


def described(error: Error) -> str:
    """An error in words."""
    if np.isnan(error.relative):
        return "no element to judge by: none is finite in A and in B"
    nonfinite = f", {error.nonfinite} elements are not finite in one of them" if error.nonfinite else ""
    return f"error {units.error(error.relative)}{nonfinite}"


def _for_one_device(module: ir.MlirModule, name: str) -> ir.MlirModule:
    devices = inspection.device_count(module)
    if devices > 1:
        raise ModuleError(f"{name} is for {devices} devices; programs are compared on one")
    return module


def for_cpu(module: ir.MlirModule) -> ir.MlirModule:
    """The same program with products that XLA:CPU can run: low operands are cast to float32 where the result is.

    XLA:CPU cannot run some of the others (jaxlib 0.10.2: "Unsupported element type for DotThunk::Execute: BF16 x BF16 =
    F32", for instance a transposed sum over batch and tokens).  The values are the same: products of float16 and
    bfloat16 numbers are exact in float32, in which they are summed anyway.
    """
    copied = ir.copy(module)
    ir_, stablehlo = ir.mlir(), ir.dialect()
    with copied.context, ir_.Location.unknown():
        functions = ir.functions(copied).values()
        for operation in [each for function in functions for each in ir.operations(function)]:
            if "dot_dimension_numbers" not in operation.attributes:
                continue
            result = ir.tensor_type(operation.results[0].type)
            if result is None or result.element != "f32":
                continue
            for index, operand in enumerate(list(operation.operands)):
                kind = ir.tensor_type(operand.type)
                if kind is not None and kind.element in ("f16", "bf16"):
                    with ir_.InsertionPoint(operation):
                        wide = ir.with_element(operand.type, ir_.F32Type.get())
                        operation.operands[index] = stablehlo.convert(wide, operand)
                    if "algorithm" in operation.attributes:
                        del operation.attributes["algorithm"]  # it names the types of the operands
    return copied


def measure(array: Any, exact: Any) -> Error:
    """The error of `array` against `exact`, which has the same shape."""
    left, right = np.asarray(array), np.asarray(exact)
    if right.dtype.kind in "iub":
        different = int(np.count_nonzero(left != right))
        return Error(different / max(1, right.size), 0)
    kind = np.complex128 if right.dtype.kind == "c" else np.float64
    left, right = left.astype(kind), right.astype(kind)
    both = np.isfinite(left) & np.isfinite(right)
    same = both | (left == right) | (np.isnan(left) & np.isnan(right))
    norm, size = float(np.linalg.norm(left[both] - right[both])), float(np.linalg.norm(right[both]))
    relative = norm / size if size else (0.0 if norm == 0 else float("inf"))
    if not both.any() and np.isnan(right).any():
        relative = math.nan
    return Error(relative, int(np.count_nonzero(~same)))
