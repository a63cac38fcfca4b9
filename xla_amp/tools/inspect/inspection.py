"""Count the operations, casts and bytes of a module by dtype.

    >>> inspect(module).contractions                                         # doctest: +SKIP
    {('bf16', 'bf16', 'f32'): 5}

Counts are static: a loop body or a function counts once. The scalar bodies of reductions, sorts and scatters are not
counted.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from xla_amp.common import units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.tables import Cell, Table
from xla_amp.policy import load
from xla_amp.stablehlo import constants, ir, locations
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.autocast import as_program
from xla_amp.stablehlo.passes.module_paths import ModulePaths
from xla_amp.stablehlo.passes.op_table import Classifier, OpClass, Structure, table, table_name
from xla_amp.tools.explain import operations as report_operations
from xla_amp.tools.explain.operations import Operation
from xla_amp.tools.explain.page import Page, Report, Section

_CONTROL: Final = frozenset({"loop", "branch", "inline", "call", "identity", "constant"})
"""Structures that compute nothing themselves."""
_COMPUTES: Final = frozenset({"abs", "clamp", "maximum", "minimum", "negate", "sign"})
"""Operations that do not round and are not plumbing either."""


class Tally(NamedTuple):
    """A number of operations and the bytes of their results."""

    number: int
    bytes: int


class ModuleValue(NamedTuple):
    """One result of one operation, or one argument of the program."""

    name: str
    """The operation, or ``argument 3``."""
    type: str
    """``f32[8,128]``; ``?`` where a dimension is dynamic."""
    bytes: int
    function: str
    location: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection(Report):
    """The result of `inspect`. Element types have MLIR's names: ``f32``, ``bf16``, ``i1``."""

    dtypes: Mapping[str, Tally]
    """By the element type of the first result."""
    operations: Mapping[str, Mapping[str, int]]
    """Operation -> element type of the first result -> how many."""
    contractions: Mapping[tuple[str, str, str], int]
    """Matrix products and convolutions by (left, right, result); 8-bit floats where operands were rounded to these."""
    casts: Mapping[tuple[str, str], Tally]
    """Conversions by (from, to), with the bytes of their results."""
    largest: tuple[ModuleValue, ...]
    """Arguments and results with the most bytes."""
    arguments: int
    """Bytes of the program's arguments."""
    results: int
    constants: int
    """Bytes of the constants as stored: one element for a splat."""
    rows: tuple[Operation, ...]
    """Every operation with its layer, shapes, cost and line, for a report."""

    def page(self, title: str = "a StableHLO program") -> Page:
        """The report for people."""
        return Page(
            title,
            {
                "operations": f"{sum(tally.number for tally in self.dtypes.values()):,}",
                "arguments": units.size(self.arguments),
                "results": units.size(self.results),
                "constants": units.size(self.constants),
            },
            (
                *report_operations.findings(self.rows),
                report_operations.table(self.rows),
                *sections({"": self}),
                _largest(self.largest),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {
            "dtypes": {dtype: {"count": tally.number, "bytes": tally.bytes} for dtype, tally in self.dtypes.items()},
            "operations": {name: dict(by) for name, by in self.operations.items()},
            "contractions": [
                {"left": left, "right": right, "result": result, "count": count}
                for (left, right, result), count in self.contractions.items()
            ],
            "casts": [
                {"from": before, "to": after, "count": tally.number, "bytes": tally.bytes}
                for (before, after), tally in self.casts.items()
            ],
            "largest": [value._asdict() for value in self.largest],
            "arguments": self.arguments,
            "results": self.results,
            "constants": self.constants,
        }


def inspect(program: Any, *, largest: int = 10) -> Inspection:
    """Counts the operations of a module by dtype.

    Args:
        program: any kind of program that `autocast` takes: the result of `load`, a module, text, bytes, a path.
        largest: how many of the largest values to list.
    """
    module = as_program(program).module
    paths = ModulePaths(module)
    classifier = Classifier(load("tpu"), paths)
    rows: list[Operation] = []
    dtypes: dict[str, Tally] = {}
    operations: dict[str, collections.Counter[str]] = {}
    contractions: collections.Counter[tuple[str, str, str]] = collections.Counter()
    casts: dict[tuple[str, str], Tally] = {}
    stored = 0
    for operation, function in walk(module):
        if not len(operation.results):
            continue
        kind = classifier.classify(operation)
        row = _operation(operation, kind, paths.of(operation, function))
        rows.append(row)
        name, given, element = row.record.operation, row.record.given, row.record.result[0]
        size = sum(sizes.size(each.type) for each in operation.results)
        dtypes[element] = _increased(dtypes.get(element), size)
        operations.setdefault(name, collections.Counter())[element] += 1
        if kind.structure == "constant":
            stored += _stored(operation, size)
        elif structure_of(operation) == "cast":
            casts[given[0], element] = _increased(casts.get((given[0], element)), size)
        elif row.product:
            contractions[given[0], given[1], element] += 1
    signature = ir.signature(module)
    return Inspection(
        dtypes=_most_bytes_first(dtypes),
        operations={
            name: dict(by.most_common()) for name, by in sorted(operations.items(), key=lambda item: -item[1].total())
        },
        contractions=dict(contractions.most_common()),
        casts=_most_bytes_first(casts),
        largest=tuple(sorted(values(module), key=lambda value: -value.bytes)[:largest]),
        arguments=sum(map(sizes.size_of, signature.inputs)),
        results=sum(map(sizes.size_of, signature.outputs)),
        constants=stored,
        rows=tuple(rows),
    )


def _operation(operation: Any, kind: OpClass, scope: str) -> Operation:
    """An operation as a row of the report."""
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
        verdict=report_operations.verdict(
            floating=floating or (cast and any(map(units.is_floating, (*given, *made)))),
            cast=cast,
            low=all(map(units.is_low, computes)),
            product=product,
            ruled=kind.colour == "deny" or any(map(units.is_low, given)),
            risky=kind.colour == "deny",
        ),
    )


def _most_bytes_first(tallies: dict[Any, Tally]) -> dict[Any, Tally]:
    return dict(sorted(tallies.items(), key=lambda item: -item[1].bytes))


def _increased(tally: Tally | None, size: int) -> Tally:
    return Tally(1, size) if tally is None else Tally(tally.number + 1, tally.bytes + size)


def _stored(operation: Any, size: int) -> int:
    kind = ir.tensor_type(operation.results[0].type)
    return (
        size
        if kind is None or not constants.is_splat(operation)
        else max(1, size // max(1, math.prod(d or 0 for d in kind.shape)))
    )


def walk(module: ir.MlirModule) -> Iterator[tuple[Any, str]]:
    """Operations of all functions with the function's name, in program order; without scalar bodies."""
    for name, function in ir.functions(module).items():
        for operation in ir.operations(function, lambda each: structure_of(each) != "body"):
            yield operation, name


def values(module: ir.MlirModule) -> Iterator[ModuleValue]:
    """The program's arguments, then every result of every operation."""
    for index, kind in enumerate(ir.signature(module).inputs):
        yield ModuleValue(f"argument {index}", _text(kind), sizes.size_of(kind), "main", "")
    for operation, function in walk(module):
        name, location = sizes.short_name(operation), locations.of(operation).first_name
        for result in operation.results:
            kind = ir.tensor_type(result.type)
            yield ModuleValue(name, _text(kind), sizes.size_of(kind), function, location)


def device_count(module: ir.MlirModule) -> int:
    """Devices that run the program together: partitions times replicas."""
    attributes = module.operation.attributes
    counts = (attributes.get(name, None) for name in ("mhlo.num_partitions", "mhlo.num_replicas"))
    return math.prod(count.value for count in counts if count is not None)


def structure_of(operation: Any) -> Structure:
    """The `Structure` of an operation in the table of the pass; every conversion is a ``cast``."""
    name, rows = table_name(operation), table().rows
    base = name.partition(".")[0]
    if table().narrowed.get(base) == "source":
        return "cast"
    return (rows.get(name) or rows.get(base) or table().unknown).structure


def _text(kind: ir.TensorType | None) -> str:
    return "(not a tensor)" if kind is None else str(kind)


_Key = TypeVar("_Key")
States: TypeAlias = Mapping[str, Inspection]
"""Column title -> inspection: ``{"": ...}`` for one module, ``{"before": ..., "after": ...}`` for a conversion."""


def sections(states: States) -> tuple[Section, ...]:
    """Contractions by the dtypes of their operands, operations by dtype, and casts."""
    products: list[tuple[Cell, ...]] = [
        (f"{key[0]} x {key[1]} -> {key[2]}", *(found.contractions.get(key, 0) for found in states.values()))
        for key in _keys(found.contractions for found in states.values())
    ]
    by_dtype: list[tuple[Cell, ...]] = [
        (dtype, *_tallies(found.dtypes.get(dtype) for found in states.values()))
        for dtype in _keys(found.dtypes for found in states.values())
    ]
    casts: list[tuple[Cell, ...]] = [
        (f"{kind[0]} -> {kind[1]}", *_tallies(found.casts.get(kind) for found in states.values()))
        for kind in _keys(found.casts for found in states.values())
    ]
    counts = tuple(_title("count", state) for state in states)
    return (
        Section("Contractions", table=Table(columns=("operands and result", *counts), rows=products)),
        _with_bytes("Operations by dtype of their result", ("dtype", "operations"), states, by_dtype),
        _with_bytes("Casts", ("from and to", "count"), states, casts),
    )


def _largest(found: Iterable[ModuleValue]) -> Section:
    rows = [(each.type, units.size(each.bytes), each.name, each.function, each.location) for each in found]
    return Section(
        "Largest values", table=Table(columns=("type", "bytes", "of", "in", "where"), rows=rows, right=("bytes",))
    )


def _with_bytes(title: str, names: tuple[str, str], states: States, rows: list[tuple[Cell, ...]]) -> Section:
    """A table with a number and its bytes for each state."""
    sizes = tuple(_title("bytes", state) for state in states)
    pairs = (name for state, size in zip(states, sizes, strict=True) for name in (_title(names[1], state), size))
    return Section(title, table=Table(columns=(names[0], *pairs), rows=rows, right=sizes))


def _tallies(found: Iterable[Tally | None]) -> list[Cell]:
    return [cell for tally in found for cell in ((tally.number, units.size(tally.bytes)) if tally else (0, "0 B"))]


def _title(word: str, state: str) -> str:
    return f"{word} {state}".rstrip()


def _keys(mappings: Iterable[Mapping[_Key, object]]) -> list[_Key]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
