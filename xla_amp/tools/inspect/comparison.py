"""Compare two programs with the first one in float64: errors of each result and of each operation.

    >>> compare(f32_module, bf16_module).outputs[0].b.relative                # doctest: +SKIP
    0.0031

The float64 version of the first module (`widen.widened`) is the reference for both. The error of an operation is
accumulated: it includes the errors of its operands. To measure operations, both modules run again in segments that
return the operations' results (`segments`). That can change how a compiler rounds between operations, so the errors of
the program's results come from the unchanged programs.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from xla_amp.common import progress
from xla_amp.common.events import DecisionRecord
from xla_amp.errors import ModuleError
from xla_amp.report import operations, units
from xla_amp.report.document import Column, Document, Finding, Row, Table
from xla_amp.report.operations import Operation
from xla_amp.report.shown import Shown
from xla_amp.stablehlo import execution, ir, samples
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.autocast import as_program
from xla_amp.tools.inspect import inspection, names, segments, widen
from xla_amp.tools.inspect.widen import Site

TOLERANCE: Final = 0.05
"""Default limit of `Error.relative` for `Comparison.agrees`."""

_NO_DIGIT: Final = 0.5
"""Relative error of float32 above which no digit of a result is right: the result is zero but for rounding, as the
gradient of a bias before a norm is.  No other program can be judged by it."""

_CANCELLED: Final = 0.01
"""Relative error of float32 above which a value is mostly rounding error."""

_EXACT: Final = 3000
"""Largest number of operations that are matched exactly; above it, difflib ignores frequent ones."""


class Error(NamedTuple):
    """The error of an array against the reference, over the elements that are finite in both."""

    relative: float
    """Norm of the difference divided by the norm of the reference; for integers the share of elements that differ.

    NaN if there is no element to judge by: none is finite in both, and some are NaN."""
    largest: float
    """Largest absolute difference."""
    nonfinite: int
    """Elements that are finite in only one of the two, or not the same infinity or NaN."""


class OutputError(NamedTuple):
    """One result of the program."""

    number: int
    type: str
    a: Error
    b: Error
    name: str = ""
    """``result[0]['w']``, as the program says."""
    update_of: str = ""
    """The argument whose new value it is, by their names; empty for other results."""
    update_a: float | None = None
    """For a new value: norm of the difference divided by the norm of the update, which the reference makes."""
    update_b: float | None = None
    judged: bool = True
    """Whether it counts for `Comparison.agrees`; a result that is only rounding error in A counts if it becomes
    infinite or NaN."""


class OperationError(NamedTuple):
    """One result of an operation; functions that the entry function calls are inlined, a loop is one operation."""

    operation: str
    type_a: str
    type_b: str
    location: str
    a: Error
    b: Error
    module: str = ""
    """Path of the layer."""
    where: str = ""
    """The user's ``file:line``."""


def _record(each: OperationError, why: str) -> DecisionRecord:
    """An operation of both programs as the table shows it: the dtype in A, and that in B as its result."""
    dtype, _, sizes = each.type_b.rstrip("]").partition("[")
    in_a = (each.type_a.partition("[")[0],)
    return DecisionRecord(
        operation=each.operation,
        cast="keep",
        layer="builtin",
        policy="",
        front="stablehlo",
        given=in_a,
        used=in_a,
        result=(dtype,),
        result_shapes=(tuple(int(size) if size.isdigit() else -1 for size in sizes.split(",") if size),),
        module=each.module,
        location=each.where,
        why=why,
        source=each.location,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Shown):
    """The result of `compare`."""

    outputs: tuple[OutputError, ...]
    operations: tuple[OperationError, ...]
    """In program order."""
    unmatched: tuple[int, int]
    """Operations of A and of B without a counterpart in the other."""
    reference: str
    """Description of the reference."""
    not_run: tuple[tuple[str, str], ...] = ()
    """Programs (A or B) that XLA:CPU cannot run as they are -> why; they ran with these products in float32."""

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Whether each result of B is within `tolerance` of the reference, and finite where A is."""
        return all(_agrees(each, tolerance) for each in self.outputs)

    def worst(self, most: int = 10) -> list[OperationError]:
        """Operations with the largest relative error in B; those with a large error in A, too, come last.

        The latter are sums that cancel: the reference is nearly zero, so any relative error is large.
        """

        def order(each: OperationError) -> tuple[int, bool, float]:
            return -each.b.nonfinite, each.a.relative > _CANCELLED, -each.b.relative

        return sorted(self.operations, key=order)[:most]

    def document(self, title: str = "two StableHLO programs", tolerance: float = TOLERANCE) -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""
        facts = [("reference", self.reference)]
        if any(self.unmatched):
            facts.append(("without counterpart", f"{self.unmatched[0]} results in A, {self.unmatched[1]} in B"))
        return Document(
            title=title,
            kind="compare",
            facts=tuple(facts),
            findings=tuple(self._findings(tolerance)),
            tables=(self._operations(tolerance), self._results(tolerance)),
        )

    def _findings(self, tolerance: float) -> Iterator[Finding]:
        far = [each for each in self.outputs if not _agrees(each, tolerance)]
        answer = f"{'agree' if not far else 'differ'} at a tolerance of {tolerance:g}"
        items = tuple((each.name, _described(each.b)) for each in far[:5])
        items += tuple((each.name, NOT_JUDGED) for each in self.outputs if not each.judged)
        yield Finding("Do the results of B agree with A?", answer, "risk" if far else "low", items)
        if self.not_run:
            answer = "no: to compare them, their products of low operands ran in float32"
            yield Finding("Does XLA:CPU run the programs as they are?", answer, "risk", self.not_run)
        updates = [each for each in self.outputs if each.update_b is not None]
        if updates:
            worst = sorted(updates, key=lambda each: -(each.update_b or 0.0))[:5]
            items = tuple((each.update_of, units.error(each.update_b or 0.0)) for each in worst)
            yield Finding(
                "How wrong are the updates?",
                f"{len(updates)} results are new values; error relative to the update of the step",
                "could",
                items,
            )
        places: dict[tuple[str, str], OperationError] = {}
        for each in self.worst(len(self.operations)):
            if each.b.nonfinite or (each.b.relative > 0 and each.a.relative <= _CANCELLED):
                places.setdefault((each.module, each.where), each)
        if worst_operations := list(places.values())[:5]:
            items = tuple(
                (
                    each.operation,
                    ", ".join(filter(None, (f"error {units.error(each.b.relative)}", each.module, each.where))),
                )
                for each in worst_operations
            )
            yield Finding("Where do errors begin or grow?", "the places with the largest errors in B", "wide", items)

    def _results(self, tolerance: float) -> Table:
        columns = (
            Column("result", "name"),
            Column("type"),
            Column("error of A", "error", meaning="Relative error against the reference"),
            Column("error of B", "error", meaning="Relative error against the reference"),
            Column("update of", "name", meaning="The argument whose new value it is"),
            Column("of update, A", "error", meaning="Error relative to the update that the reference makes"),
            Column("of update, B", "error", meaning="Error relative to the update that the reference makes"),
            Column("largest in A", "error", meaning="Largest absolute difference"),
            Column("largest in B", "error", meaning="Largest absolute difference"),
            Column("not finite in B", "count"),
        )
        rows = tuple(
            Row(
                (
                    each.name, each.type, each.a.relative, each.b.relative, each.update_of, each.update_a,
                    each.update_b, each.a.largest, each.b.largest, each.b.nonfinite,
                ),
                "" if _agrees(each, tolerance) else "risk",
            )
            for each in self.outputs
        )  # fmt: skip
        return Table(title="Results", columns=columns, rows=rows).without_empty_columns()

    def _operations(self, tolerance: float) -> Table:
        found = []
        for each in self.worst(len(self.operations)):
            cancels = each.a.relative > _CANCELLED
            low = units.is_low(each.type_b.partition("[")[0])
            far = each.b.nonfinite > each.a.nonfinite or each.b.relative > max(tolerance, each.a.relative)
            text = f"a sum that cancels: errors {units.error(each.a.relative)} and {units.error(each.b.relative)}"
            found.append(
                Operation(
                    record=_record(each, text if cancels else ""),
                    error=None if cancels else each.b.relative,
                    reference_error=None if cancels else each.a.relative,
                    nonfinite=each.b.nonfinite or None,
                    state="risk" if far and not cancels else "low" if low else "same",
                )
            )
        table = operations.table(found, note="Errors of operations include those of their operands.")
        titles = {"before": "in A", "result": "in B", "error": "error of B", "source": "from"}
        return dataclasses.replace(table.renamed(titles), ranked=True)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""

        def plain(row: OutputError | OperationError) -> dict[str, Any]:
            return {**row._asdict(), "a": row.a._asdict(), "b": row.b._asdict()}

        return {
            "reference": self.reference,
            "outputs": [plain(each) for each in self.outputs],
            "operations": [plain(each) for each in self.operations],
            "not_run": dict(self.not_run),
            "unmatched": {"a": self.unmatched[0], "b": self.unmatched[1]},
        }


def compare(
    a: Any,
    b: Any,
    inputs: Sequence[Any] | None = None,
    *,
    seed: int = 0,
    operations: bool = True,
) -> Comparison:
    """Runs both programs, and the first one in float64, on the CPU with the same arguments.

    Results that float32 itself cannot compute are listed and not judged (`OutputError.judged`).

    Args:
        a: the reference program, usually in float32; any kind of program that `autocast` takes.
        b: the other program, with arguments and results of the same shapes.
        inputs: one array for each argument; default: `samples.random_inputs` of `seed`.
        operations: whether to compare operations too, which runs the programs again.

    Raises:
        ModuleError: the programs differ in their arguments or results, have no result, or one cannot be run on one
            device.
    """
    first, second = (_for_one_device(as_program(each).module, name) for each, name in ((a, "A"), (b, "B")))
    arrays = samples.random_inputs(first, seed) if inputs is None else samples.fitted(inputs, first, "A")
    first, second = execution.refined(first, arrays), execution.refined(second, samples.fitted(arrays, second, "B"))
    kinds = ir.signature(first).outputs, ir.signature(second).outputs
    shapes = [[kind and kind.shape for kind in each] for each in kinds]
    if shapes[0] != shapes[1]:
        raise ModuleError(f"A and B give results of different shapes: {shapes[0]} and {shapes[1]}")
    if not kinds[0]:
        raise ModuleError("A and B give no result: there is nothing to compare")
    runs = _Pair(first, second, arrays)
    progress.tell("running A, B and A in float64")
    inputs_of, outputs_of = _names(a, first)
    before = names.updated(inputs_of, outputs_of)
    outputs = []
    for index, (kind, left, right, exact) in enumerate(zip(kinds[1], *runs.results(), strict=True)):
        errors = measure(left, exact), measure(right, exact)
        output = OutputError(index, kind.element if kind else "", *errors, name=outputs_of[index])
        if index in before and np.shape(arrays[before[index]]) == np.shape(exact):
            old = arrays[before[index]]
            shares = [_of_update(made, exact, old) for made in (left, right)]
            output = output._replace(update_of=inputs_of[before[index]], update_a=shares[0], update_b=shares[1])
        outputs.append(output)
    noise = only_rounding([each.a] for each in outputs)
    outputs = [each._replace(judged=not only) for each, only in zip(outputs, noise, strict=True)]
    found, unmatched = runs.operations() if operations else ((), (0, 0))
    return Comparison(
        outputs=tuple(outputs),
        operations=tuple(found),
        unmatched=unmatched,
        reference="A in float64",
        not_run=tuple(runs.not_run.items()),
    )


def only_rounding(own: Iterable[Sequence[Error]]) -> list[bool]:
    """Whether each result is only rounding error, by the errors of float32 on each sample; none is if all are."""
    found = [any(each.relative > _NO_DIGIT for each in errors) for errors in own]
    return [False] * len(found) if all(found) else found


NOT_JUDGED: Final = (
    "not judged: it is rounding error in float32 already, as a value that is zero in exact arithmetic is"
)


def _agrees(each: OutputError, tolerance: float) -> bool:
    close = not each.judged or each.b.relative <= max(tolerance, each.a.relative)
    return close and each.b.nonfinite <= each.a.nonfinite


def _described(error: Error) -> str:
    if np.isnan(error.relative):
        return "no element to judge by: none is finite in B and in the reference"
    return f"error {units.error(error.relative)}"


def _names(program: Any, module: ir.MlirModule) -> tuple[list[str], list[str]]:
    """Names of arguments and results: those of a program from `xla_amp.export`, or those in the module."""
    if hasattr(program, "inputs") and hasattr(program, "outputs"):
        return [each.name for each in program.inputs], [each.name for each in program.outputs]
    return names.arguments(module), names.results(module)


def _of_update(array: Any, exact: Any, old: Any) -> float | None:
    """Norm of the error divided by the norm of the update from `old` to `exact`; None for other than real numbers."""
    if np.asarray(exact).dtype.kind != "f":
        return None
    new, wide = np.asarray(exact, np.float64), np.asarray(array).astype(np.float64)
    update = float(np.linalg.norm(new - np.asarray(old).astype(np.float64)))
    error = float(np.linalg.norm(wide - new))
    return error / update if update else (0.0 if error == 0 else float("inf"))


def _for_one_device(module: ir.MlirModule, name: str) -> ir.MlirModule:
    devices = inspection.device_count(module)
    if devices > 1:
        raise ModuleError(f"{name} is for {devices} devices; programs are compared on one")
    return module


class _Pair:
    def __init__(self, a: ir.MlirModule, b: ir.MlirModule, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self.a, self.b = a, b
        self.arrays = list(arrays)
        self.narrow = samples.fitted(arrays, b, "B")
        self.not_run: dict[str, str] = {}

    def results(self) -> tuple[list[Any], list[Any], list[Any]]:
        a, b = self._as_it_is("A", self.a, self.arrays), self._as_it_is("B", self.b, self.narrow)
        return a, b, _run(self.a, self.arrays, wide=True)

    def _as_it_is(self, name: str, module: ir.MlirModule, arrays: Sequence[Any]) -> list[Any]:
        try:
            return _compiled(module, wide=False, as_it_is=True)(arrays)
        except ModuleError as error:
            found = _run(module, arrays)
            self.not_run[name] = str(error)
            return found

    def operations(self) -> tuple[list[OperationError], tuple[int, int]]:
        flat_a, flat_b = widen.inlined(self.a), widen.inlined(self.b)
        sites_a, sites_b = widen.sites(flat_a), widen.sites(flat_b)
        pairs = list(matched(sites_a, sites_b))
        lefts, rights = zip(*pairs, strict=True) if pairs else ((), ())
        chosen = list(widen.comparable(flat_a)), list(widen.comparable(flat_b))
        wanted = [chosen[0][left] for left in lefts], [chosen[1][right] for right in rights]
        values = (
            segments.values(flat_a, self.arrays, wanted[0], _run),
            segments.values(flat_b, self.narrow, wanted[1], _run),
            segments.values(flat_a, self.arrays, wanted[0], functools.partial(_run, wide=True)),
        )
        found = []
        for number, ((left, right), in_a, in_b, exact) in enumerate(zip(pairs, *values, strict=True)):
            progress.tell("measuring operations", number, len(pairs))
            site, other = sites_a[left], sites_b[right]
            types = site.element + site.type, other.element + other.type
            errors = measure(in_a[1], exact[1]), measure(in_b[1], exact[1])
            location = site.location or other.location
            place = site.module or other.module, site.where or other.where
            found.append(OperationError(site.name, *types, location, *errors, *place))
        return found, (len(sites_a) - len(pairs), len(sites_b) - len(pairs))


class Runs:
    """Runs a module on the CPU, with `wide` its float64 version; it is compiled once for arguments of the same shapes.

    Raises:
        ModuleError: the module cannot be run on one device, or the inputs of a call do not fit.
    """

    def __init__(self, module: ir.MlirModule, *, wide: bool = False) -> None:
        self._module = _for_one_device(module, "the program")
        self._wide = wide
        self._compiled: dict[tuple[tuple[int, ...], ...], Callable[[Sequence[Any]], list[Any]]] = {}

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of one call."""
        arrays = samples.fitted(inputs, self._module)
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._compiled:
            self._compiled[shapes] = _compiled(execution.refined(self._module, arrays), self._wide)
        return self._compiled[shapes](arrays)


def _run(module: ir.MlirModule, arrays: Sequence[Any], *, wide: bool = False) -> list[Any]:
    """Runs a module of static shapes once."""
    return _compiled(module, wide)(arrays)


def _compiled(module: ir.MlirModule, wide: bool, *, as_it_is: bool = False) -> Callable[[Sequence[Any]], list[Any]]:
    """A module of static shapes, compiled for the CPU; it converts its arguments to the dtypes that it takes.

    Without `as_it_is`, products that XLA:CPU cannot run are in float32 (`widen.for_cpu`).
    """
    import jax

    if wide:
        module = widen.widened(module)
    kinds = [ir.numpy_dtype(kind.element) for kind in ir.signature(module).inputs if kind]
    device = execution.devices("cpu")[0]
    executable = execution.compile_module(
        module if as_it_is else widen.for_cpu(module), device, sizes.quick_options(module, device)
    )

    def run(arrays: Sequence[Any]) -> list[Any]:
        with jax.enable_x64(True):  # otherwise JAX converts 64-bit arguments to 32-bit
            return execution.execute(executable, [a.astype(k) for a, k in zip(arrays, kinds, strict=True)], device)

    return run


def matched(a: Sequence[Site], b: Sequence[Site]) -> Iterator[tuple[int, int]]:
    """Indices of matching operations: by name, shape and attributes, in program order."""
    located = not {site.location for site in a}.isdisjoint({site.location for site in b} - {""})
    left, right = ([site.key(located) for site in each] for each in (a, b))
    first = _common_prefix(left, right)  # shortens the input of the matcher, which takes quadratic time
    last = _common_prefix(left[first:][::-1], right[first:][::-1])
    yield from ((step, step) for step in range(first))
    left, right = left[first : len(left) - last], right[first : len(right) - last]
    exact = max(len(left), len(right)) <= _EXACT
    for block in difflib.SequenceMatcher(None, left, right, autojunk=not exact).get_matching_blocks():
        yield from ((first + block.a + step, first + block.b + step) for step in range(block.size))
    yield from ((len(a) - last + step, len(b) - last + step) for step in range(last))


def _common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the common prefix."""
    return next((n for n, (one, other) in enumerate(zip(left, right)) if one != other), min(len(left), len(right)))  # noqa: B905


def measure(array: Any, exact: Any) -> Error:
    """The error of `array` against `exact`, which has the same shape."""
    left, right = np.asarray(array), np.asarray(exact)
    if right.dtype.kind in "iub":
        different = int(np.count_nonzero(left != right))
        largest = float(np.max(np.abs(left.astype(np.float64) - right.astype(np.float64)), initial=0.0))
        return Error(different / max(1, right.size), largest, 0)
    kind = np.complex128 if right.dtype.kind == "c" else np.float64
    left, right = left.astype(kind), right.astype(kind)
    both = np.isfinite(left) & np.isfinite(right)
    same = both | (left == right) | (np.isnan(left) & np.isnan(right))
    difference, size = np.abs(left[both] - right[both]), np.linalg.norm(right[both])
    norm = float(np.linalg.norm(difference))
    relative = norm / float(size) if size else (0.0 if norm == 0 else float("inf"))
    if not both.any() and np.isnan(right).any():
        relative = math.nan
    return Error(relative, float(np.max(difference, initial=0.0)), int(np.count_nonzero(~same)))
