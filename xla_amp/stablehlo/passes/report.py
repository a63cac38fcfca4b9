"""The report of the pass: its decision about each operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from xla_amp.common import events, units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.public_names import Left
from xla_amp.common.types import LowDtype
from xla_amp.stablehlo import ir, locations
from xla_amp.stablehlo.passes import sizes
from xla_amp.stablehlo.passes.cast_graph import CastNode
from xla_amp.stablehlo.passes.module_paths import ModulePaths
from xla_amp.stablehlo.passes.op_table import Colour
from xla_amp.stablehlo.passes.propagation import Propagation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationDecision(DecisionRecord):
    """The decision about one operation that reads or writes float32, or one value that a loop or branch carries.

    Its name is ``dot_general``, ``reduce.add``; a value that is passed on has its index: ``while#2``.  `given` and
    `used` have the dtypes of the computation; several only where those of a product's operands differ.  `result` is
    float32 for a low contraction that returns its accumulator.  `location` is the whole text.
    """

    function: str
    colour: Colour
    product: bool
    """Whether it is a product or a convolution."""
    aten: str
    """ATen operation whose rule decided; empty if none corresponds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """The errors of a converted program on samples, each of the worst result, against the original."""

    samples: tuple[tuple[float, str], ...]
    """For each sample the error, and the name of the result."""
    rounding: float
    """What one rounding of the samples changes in the program as it was, the worst of the results and samples."""
    not_judged: tuple[str, ...] = ()
    """Results that are rounding errors in float32 already; they only count if they become infinite or NaN."""

    @property
    def error(self) -> float:
        """The worst."""
        return max(error for error, _ in self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionReport(Left):
    """Decisions in program order, and the casts that they needed; ``print(report)`` shows a table."""

    policy: str
    low: LowDtype
    operations: tuple[OperationDecision, ...]
    casts: Mapping[str, int]
    """``f32->bf16`` and ``bf16->f32``: how many casts were inserted."""
    folded: int
    """Casts of the original program that were folded or removed."""
    unconverted: tuple[str, ...] = ()
    """Functions of several blocks, which stay as they are."""

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict for each decision: ``pandas.DataFrame(report.rows())``."""
        same = (
            "operation", "function", "module", "location", "colour", "why", "cast", "layer", "product", "aten",
            "before", "after", "origin", "flops", "bytes",
        )  # fmt: skip
        return [
            {name: getattr(each, name) for name in same}
            | {"result": ", ".join(each.result), "shapes": units.shapes(each.shapes, each.result_shapes)}
            for each in self.operations
        ]

    def facts(self) -> dict[str, str]:
        """Policy and casts as text."""
        casts = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.casts.items())) or "none"
        if not any(map(units.is_low, {dtype for each in self.operations for dtype in (each.after, *each.result)})):
            casts += ": nothing was converted"
        kept = f"{', '.join(self.unconverted)}: functions of several blocks (branches of the dialect cf)"
        return {
            "policy": f"{self.policy}, low = {self.low}",
            "casts inserted": casts,
            "casts folded": str(self.folded),
            **({"not converted": kept} if self.unconverted else {}),
        }

    def __str__(self) -> str:
        """The page of ``xla-amp convert``."""
        from xla_amp.tools.inspect import conversion

        return conversion.page(self).text()


def decisions(
    propagation: Propagation, policy: str, low: LowDtype, copies: Mapping[str, str], paths: ModulePaths
) -> Iterable[OperationDecision]:
    """The decisions, taken before the module changes.

    `copies`: name of a cloned function -> name of the original.
    """
    for node in propagation.nodes:
        if node.op_class is None and not node.boundary:
            continue  # argument or result of a called function: reported with the callers' operations
        if node.structure == "constant" or node.in_opaque:
            continue
        function = copies.get(node.function, node.function)
        yield _decision(propagation, node, policy, low, function, paths.of(node.operation, node.function))


def _decision(
    propagation: Propagation, node: CastNode, policy: str, low: LowDtype, function: str, path: str
) -> OperationDecision:
    op_class = node.op_class
    decision = op_class.decision if op_class else None
    name = op_class.name if op_class else ("argument" if node.writes else "result")
    gives = [propagation.is_low(slot) for slot in node.outputs] or [node.low]
    why = node.why or "the signature is kept"
    after: str = low if node.low and not node.of_first else "float32"
    kept, overruled = _kept(node, low), bool(node.keep_reason) and node.colour == "allow"
    given, made = ((), ()) if node.index is not None else sizes.shapes(node.operation)
    return OperationDecision(
        operation=name if node.index is None else f"{name}#{node.index}",
        function=function,
        module=path,
        location=locations.of(node.operation).text,
        colour=node.colour,
        given=kept or ("float32",),
        used=kept or (after,),
        result=(low if (gives[0] if node.inside else all(gives)) else "float32",),
        why=why,
        cast=decision.cast if decision and not overruled else "keep",
        layer=decision.layer if decision else "builtin",
        policy=policy,
        front="stablehlo",
        product=node.structure == "contraction",
        aten=decision.operation if decision else "",
        origin=decision.origin if decision and not overruled else "",
        shapes=given,
        result_shapes=made,
        flops=sizes.flops(node.operation) if node.structure == "contraction" else None,
        bytes=sizes.bytes_moved(node.operation) if node.index is None else 0,
    )


def _kept(node: CastNode, low: LowDtype) -> tuple[str, ...]:
    """dtypes of a product's operands if the pass casts none of them: neither float32 nor the low dtype; else empty."""
    if node.structure != "contraction":
        return ()
    kinds = [ir.tensor_type(operand.type) for operand in list(node.operation.operands)[:2]]
    names = tuple(dict.fromkeys(ir.dtype_name(kind.element) for kind in kinds if kind))
    return () if {"float32", low} & {*names} else names


def emit_events(report: ConversionReport) -> None:
    """Sends the decisions to the subscribers of `xla_amp.common.events` (`xla_amp.explain`)."""
    for each in report.operations if events.decided.listeners else ():
        events.decided(each)
