"""Which loops end when floats that they compute have become small (`xla_amp.analysis.loop_graph`) stay float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from xla_amp.analysis.loop_graph import LoopGraph
from xla_amp.stablehlo import ir, surgery
from xla_amp.stablehlo.op_table import OpClass


def kept_values(module: Any, classes: Mapping[Any, OpClass]) -> set[Any]:
    """The values inside of loops whose contents stay float32, also in functions that are called there.

    `classes`: of all operations.
    """
    loops = [each for each, treated in classes.items() if treated.structure == "loop"]
    if not loops:
        return set()
    graph, kept, others = _Values(module, classes), set[Any](), list[set[Any]]()
    for loop in reversed(loops):  # inner loops before those around them
        inside = graph.inside(loop)
        rule = classes[loop].decision
        condition = surgery.terminator(loop.regions[0].blocks[0]).operands
        if graph.ends_by_floats(condition, inside, kept) if rule is None else rule.cast == "fp32":
            kept |= inside
        elif rule is None:
            others.append(inside)
    # A backward pass computes the steps of such a loop again, in a loop that counts them.
    for inside in others if kept else ():
        if graph.follow_low(graph.compared(inside - kept, inside), inside, kept):
            kept |= inside
    return kept


class _Values(LoopGraph[Any]):
    """The values of a module."""

    def __init__(self, module: Any, classes: Mapping[Any, OpClass]) -> None:
        super().__init__(lambda value: ir.element(value).startswith(("f", "bf")))
        self._functions = ir.functions(module)
        for operation, treated in classes.items():
            self._add(operation, treated)

    def _add(self, operation: Any, treated: OpClass) -> None:
        operands, structure = list(operation.operands), treated.structure
        if treated.exact:
            self.comparisons.update(v for v in operation.results if structure == "cast" or ir.element(v) == "i1")
        if treated.colour == "allow":
            self.low.update(operation.results)
        blocks = [region.blocks[0] for region in operation.regions if len(region.blocks) == 1]
        if structure == "call":
            callee = self._functions.get(surgery.callees(operation)[0])
            blocks = [surgery.block_of(callee)] if callee and len(callee.regions[0].blocks) == 1 else []
        ends = [surgery.terminator(block).operands for block in blocks]
        if structure == "loop":
            condition, body = ends
            self._hold(operation.results, ([*held, *condition] for held in zip(operands, body, strict=True)))
            for block in blocks:
                self._hold(block.arguments, zip(operands, body, strict=True))
        elif structure == "branch":
            self._hold(operation.results, ([*held, *operands] for held in zip(*ends, strict=True)))
        elif structure in ("call", "inline") and blocks:
            self._hold(operation.results, zip(*ends, strict=True))
            self._hold(blocks[0].arguments, zip(operands, strict=True))
        elif structure == "identity":
            self._hold(operation.results, zip(operands, strict=True))
        else:
            self._hold(operation.results, itertools.repeat(operands, len(operation.results)))

    def _hold(self, values: Iterable[Any], sources: Iterable[Iterable[Any]]) -> None:
        for value, held in zip(values, sources, strict=True):
            self.sources[value].extend(held)

    def inside(self, loop: Any) -> set[Any]:
        """All values that are defined in a loop and in the functions that it calls."""
        found = set(surgery.arguments(loop))
        called = surgery.reached(self._functions, [loop]).values()
        for function in called:
            found.update(surgery.arguments(function))
        for root in (loop, *called):
            for operation in ir.operations(root):
                found.update(operation.results)
                found.update(surgery.arguments(operation))
        return found
