"""The report of the pass: its decision about each operation."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xla_amp import events
from xla_amp.events import DecisionRecord
from xla_amp.policy import load
from xla_amp.report import operations, units
from xla_amp.report.document import Document, Finding
from xla_amp.report.shown import Shown
from xla_amp.stablehlo import ir, locations
from xla_amp.stablehlo.passes import costs
from xla_amp.stablehlo.passes.cast_graph import Node
from xla_amp.stablehlo.passes.module_paths import ModulePaths
from xla_amp.stablehlo.passes.op_table import Colour
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.types import Cast, Layer, LowDtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationDecision:
    """The decision about one operation that reads or writes float32, or one value that a loop or branch carries."""

    operation: str
    """``dot_general``, ``reduce.add``; a value that is passed on has its index: ``while#2``."""
    function: str
    module: str
    """Path of the module, as a rule names it; empty outside modules and without locations."""
    location: str
    colour: Colour
    before: str
    after: str
    """dtype of the computation; of its operands, separated by ", ", where these differ."""
    result: str
    """dtype of its result; float32 for a low contraction that returns its accumulator."""
    why: str
    cast: Cast
    """The policy's cast; ``keep`` without a rule."""
    layer: Layer
    product: bool
    """Whether it is a product or a convolution."""
    aten: str
    """ATen operation whose rule decided; empty if none corresponds."""
    origin: str
    """Location of the rule; empty without one."""
    shapes: str = ""
    """Shapes of operands and results: ``4x8, 8x8 -> 4x8``."""
    flops: int | None = None
    """Multiplications and additions of a contraction; None for others, and where a size is dynamic."""
    bytes: int = 0
    """Bytes of operands and results, before the conversion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Shown):
    """Decisions in program order, and the casts that they needed."""

    policy: str
    low: LowDtype
    operations: tuple[OperationDecision, ...]
    casts: Mapping[str, int]
    """``f32->bf16`` and ``bf16->f32``: how many casts were inserted."""
    folded: int
    """Casts of the original program that were folded or removed."""
    unconverted: tuple[str, ...] = ()
    """Functions of several blocks, which stay as they are."""

    def summary(self) -> dict[str, Any]:
        """Counts by colour and dtype, and the casts."""
        by = Counter(f"{each.colour}:{each.after}" for each in self.operations)
        return {
            "policy": self.policy,
            "low": self.low,
            "operations": len(self.operations),
            "by_colour": dict(sorted(by.items())),
            "casts_inserted": dict(self.casts),
            "casts_folded": self.folded,
            "functions_unconverted": list(self.unconverted),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict for each decision: ``pandas.DataFrame(report.rows())``."""
        return [dataclasses.asdict(each) for each in self.operations]

    def to_json(self, indent: int | None = None) -> str:
        """Summary and decisions as JSON."""
        return json.dumps({"summary": self.summary(), "operations": self.rows()}, indent=indent)

    def document(self, title: str = "a StableHLO program in mixed precision") -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""
        found = [_row(each) for each in self.operations]
        casts = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.casts.items())) or "none"
        return Document(
            title=title,
            kind="convert",
            facts=(
                ("policy", f"{self.policy}, low = {self.low}"),
                ("casts inserted", casts),
                ("casts folded", str(self.folded)),
            ),
            findings=(*operations.findings(found), *self._unconverted()),
            tables=(operations.table(found, title="Decisions"),),
        )

    def _unconverted(self) -> Iterator[Finding]:
        if self.unconverted:
            answer = "those of several blocks (branches of the dialect cf), with what is given to them"
            items = tuple((name, "") for name in self.unconverted)
            yield Finding("Which functions stay as they are?", answer, "could", items)


def _row(each: OperationDecision) -> operations.Operation:
    before, after, result = (units.short(dtype) for dtype in (each.before, each.after, each.result))
    low, product = units.is_low(each.after), each.product
    moves = each.colour == "clear" and not product
    return operations.Operation(
        operation=each.operation.partition("#")[0],
        scope=each.module,
        shapes=each.shapes,
        before=before,
        after=after if after != before else "",
        result=result,
        flops=each.flops,
        bytes=each.bytes,
        where=locations.Location(each.location).line,
        cast=each.cast if each.origin else "",
        layer=each.layer if each.origin else "",
        rule=each.origin,
        why=f"{each.colour}: {each.why}",
        product=product,
        state=operations.state(
            floating=not moves and each.operation not in ("argument", "result"),
            cast=False,
            low=low,
            product=product,
            ruled=each.colour in ("deny", "widest"),
            risky=low and each.layer != "builtin" and _built_in(each.aten),
        ),
    )


def _built_in(aten: str) -> bool:
    """Whether the built-in rules keep an ATen operation in float32."""
    return bool(aten) and load("tpu").decide(aten).cast in ("fp32", "fp32_inside", "fp32_out", "fp32_append")


def decisions(
    propagation: Propagation,
    low: LowDtype,
    copies: Mapping[str, str],
    paths: ModulePaths,
) -> Iterable[OperationDecision]:
    """The decisions, taken before the module changes.

    Args:
        propagation: which nodes run low.
        low: the low dtype.
        copies: name of a cloned function -> name of the original.
        paths: of modules.
    """
    for node in propagation.nodes:
        if node.op_class is None and not node.boundary:
            continue  # argument or result of a called function: reported with the callers' operations
        if node.structure == "constant" or node.in_opaque:
            continue
        function = copies.get(node.function, node.function)
        path = paths.of(node.operation, node.function)
        yield _decision(propagation, node, low, copies.get(function, function), path)


def _decision(
    propagation: Propagation,
    node: Node,
    low: LowDtype,
    function: str,
    path: str,
) -> OperationDecision:
    op_class = node.op_class
    decision = op_class.decision if op_class else None
    name = op_class.name if op_class else ("argument" if node.writes else "result")
    gives = [propagation.is_low(slot) for slot in node.outputs] or [node.low]
    why = node.why or "the signature is kept"
    after: str = low if node.low and not node.of_first else "float32"
    before = "float32"
    if kept := _kept(node, low):
        before = after = kept
    return OperationDecision(
        operation=name if node.index is None else f"{name}#{node.index}",
        function=function,
        module=path,
        location=locations.of(node.operation).text,
        colour=node.colour,
        before=before,
        after=after,
        result=low if (gives[0] if node.inside else all(gives)) else "float32",
        why=why,
        cast=decision.cast if decision else "keep",
        layer=decision.layer if decision else "builtin",
        product=node.structure == "contraction",
        aten=decision.operation if decision else "",
        origin=decision.origin if decision else "",
        shapes=costs.shapes(node.operation) if node.index is None else "",
        flops=costs.flops(node.operation) if node.structure == "contraction" else None,
        bytes=costs.bytes_moved(node.operation) if node.index is None else 0,
    )


def _kept(node: Node, low: LowDtype) -> str:
    """dtypes of a product's operands if the pass casts none of them: neither float32 nor the low dtype; else empty."""
    if node.structure != "contraction":
        return ""
    kinds = [ir.tensor_type(operand.type) for operand in list(node.operation.operands)[:2]]
    names = list(dict.fromkeys(ir.dtype_name(kind.element) for kind in kinds if kind))
    return "" if {"float32", low} & {*names} else ", ".join(names)


def emit_events(report: Report) -> None:
    """Sends the decisions to the subscribers of `xla_amp.events` (`xla_amp.explain`)."""
    if not events.sinks:
        return
    for each in report.operations:
        used = tuple(each.after.split(", "))
        events.emit(
            DecisionRecord(
                operation=each.operation,
                cast=each.cast,
                layer=each.layer,
                policy=report.policy,
                front="stablehlo",
                given=(each.before,) * len(used),
                used=used,
                why=each.why,
                origin=each.origin,
                result=(each.result,),
                location=each.location,
                module=each.module,
                flops=each.flops,
            )
        )
