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
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xla_amp.common import units
from xla_amp.common.tables import Table
from xla_amp.pages.page import Page, Report, Section
from xla_amp.stablehlo import ir, sizes
from xla_amp.stablehlo.converted import as_program
from xla_amp.stablehlo.op_table import Structure, table, table_name


class Tally(NamedTuple):
    """A number of operations and the bytes of their results."""

    number: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection(Report):
    """The result of `inspect`. Element types have MLIR's names: ``f32``, ``bf16``, ``i1``."""

    dtypes: Mapping[str, Tally]
    """By the element type of the first result."""
    operations: Mapping[str, Mapping[str, int]]
    """Operation -> element type of the first result -> how many."""
    contractions: Mapping[tuple[str, str, str], int]
    """Matrix products and convolutions by (left, right, result)."""
    casts: Mapping[tuple[str, str], Tally]
    """Conversions by (from, to), with the bytes of their results."""
    arguments: int
    """Bytes of the program's arguments."""
    results: int

    def page(self, title: str = "a StableHLO program") -> Page:
        """The report for people."""
        products = [(f"{left} x {right} -> {made}", n) for (left, right, made), n in self.contractions.items()]
        casts = {f"{before} -> {after}": tally for (before, after), tally in self.casts.items()}
        return Page(
            title,
            {
                "operations": f"{sum(tally.number for tally in self.dtypes.values()):,}",
                "arguments": units.size(self.arguments),
                "results": units.size(self.results),
            },
            (
                Section(
                    "Products and convolutions", table=Table(columns=("operands and result", "count"), rows=products)
                ),
                _with_bytes("Operations by dtype of their result", ("dtype", "operations"), self.dtypes),
                _with_bytes("Casts", ("from and to", "count"), casts),
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
            "arguments": self.arguments,
            "results": self.results,
        }


def inspect(program: Any) -> Inspection:
    """Counts the operations of a module by dtype.

    Args:
        program: any kind of program that `autocast` takes: the result of `load`, a module, text, bytes, a path.
    """
    module = as_program(program).module
    dtypes: dict[str, Tally] = {}
    operations: dict[str, collections.Counter[str]] = {}
    contractions: collections.Counter[tuple[str, str, str]] = collections.Counter()
    casts: dict[tuple[str, str], Tally] = {}
    for operation in _walk(module):
        if not len(operation.results):
            continue
        name, structure = sizes.short_name(operation), structure_of(operation)
        given, element = list(map(ir.element, operation.operands)), ir.element(operation.results[0])
        size = sum(sizes.size_of(ir.tensor_type(each.type)) for each in operation.results)
        dtypes[element] = _increased(dtypes.get(element), size)
        operations.setdefault(name, collections.Counter())[element] += 1
        if structure == "cast":
            casts[given[0], element] = _increased(casts.get((given[0], element)), size)
        elif structure == "contraction":
            contractions[given[0], given[1], element] += 1
    signature = ir.signature(module)
    return Inspection(
        dtypes=_most_bytes_first(dtypes),
        operations={
            name: dict(by.most_common()) for name, by in sorted(operations.items(), key=lambda item: -item[1].total())
        },
        contractions=dict(contractions.most_common()),
        casts=_most_bytes_first(casts),
        arguments=sum(map(sizes.size_of, signature.inputs)),
        results=sum(map(sizes.size_of, signature.outputs)),
    )


def _most_bytes_first(tallies: dict[Any, Tally]) -> dict[Any, Tally]:
    return dict(sorted(tallies.items(), key=lambda item: -item[1].bytes))


def _increased(tally: Tally | None, size: int) -> Tally:
    return Tally(1, size) if tally is None else Tally(tally.number + 1, tally.bytes + size)


def _walk(module: ir.MlirModule) -> Iterator[Any]:
    """Operations of all functions, in program order; without scalar bodies."""
    for function in ir.functions(module).values():
        yield from ir.operations(function, lambda each: structure_of(each) != "body")


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


def _with_bytes(title: str, names: tuple[str, str], tallies: Mapping[str, Tally]) -> Section:
    """A table with numbers and their bytes."""
    rows = [(name, tally.number, units.size(tally.bytes)) for name, tally in tallies.items()]
    return Section(title, table=Table(columns=(*names, "bytes"), rows=rows, right=("bytes",)))
