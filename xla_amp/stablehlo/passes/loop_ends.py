"""Which loops end when floats that they compute have become small (`xla_amp.policy.loop_ends`): they stay float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_amp.policy.loop_ends import LoopValues
from xla_amp.stablehlo import ir, surgery
from xla_amp.stablehlo.passes.op_table import Classifier


def kept_values(module: Any, classifier: Classifier) -> set[Any]:
    """The values inside of loops whose contents stay float32, also in functions that are called there."""
    kept: set[Any] = set()
    functions = ir.functions(module)
    loops = [each for each in ir.operations(module.operation) if classifier.classify(each).structure == "loop"]
    others: list[_Inside] = []
    for loop in reversed(loops):  # inner loops before those around them
        inside = _Inside(loop, functions, classifier)
        rule = classifier.classify(loop).decision
        if inside.ends_by_floats(kept) if rule is None else rule.cast == "fp32":
            kept |= inside.values
        elif rule is None:
            others.append(inside)
    # A backward pass computes the steps of such a loop again, in a loop that counts them.
    for inside in others if kept else ():
        if inside.compares_low(kept):
            kept |= inside.values
    return kept


class _Inside:
    """What a loop computes, also in the functions that it calls."""

    def __init__(self, loop: Any, functions: dict[str, Any], classifier: Classifier) -> None:
        self._loop = loop
        self._functions = surgery.reached(functions, [loop])
        self._classifier = classifier
        self.values = {argument for region in loop.regions for block in region.blocks for argument in block.arguments}
        """All values that are defined in it."""
        self._entries: dict[Any, list[Any]] = {}
        """Argument of a region or of a function -> what it holds."""
        self._enter(loop, first=())
        for function in self._functions.values():
            self.values.update(surgery.arguments(function))
        for root in (loop, *self._functions.values()):
            for operation in ir.operations(root):
                self.values.update(operation.results)
                self.values.update(surgery.arguments(operation))
                self._enter(operation, first=operation.operands)

    def _enter(self, operation: Any, first: Iterable[Any]) -> None:
        """Adds what the arguments inside of an operation hold; `first`: before an iteration."""
        structure = self._classifier.classify(operation).structure
        given = list(first)
        if structure == "call":
            called = self._functions.get(surgery.callees(operation)[0])
            blocks = [] if called is None else [region.blocks[0] for region in called.regions if len(region.blocks)]
        elif structure in ("loop", "inline"):
            blocks = [region.blocks[0] for region in operation.regions]
        else:
            return
        again = [*surgery.terminator(blocks[-1]).operands] if structure == "loop" else []
        for block in blocks:
            for index, argument in enumerate(block.arguments):
                self._entries.setdefault(argument, []).extend((*given[index : index + 1], *again[index : index + 1]))

    def _values(self, kept: set[Any]) -> LoopValues[Any]:
        return LoopValues(
            sources=lambda value: self._sources(value) if value in self.values else [],
            is_float=_is_float,
            compares=self._compares,
            is_low=lambda value: value in self.values and value not in kept and self._made_low(value),
        )

    def ends_by_floats(self, kept: set[Any]) -> bool:
        """Whether its end depends on a comparison of floats that low operations would change.

        `kept`: values that stay float32 anyway.
        """
        values, condition = self._values(kept), self._loop.regions[0].blocks[0]
        return values.follow_low(values.deciding(surgery.terminator(condition).operands))

    def compares_low(self, kept: set[Any]) -> bool:
        """Whether it compares floats that low operations would change; `kept` as for `ends_by_floats`."""
        values = self._values(kept)
        return values.follow_low(each for value in self.values - kept for each in values.compared(value))

    def _compares(self, value: Any) -> bool:
        maker = surgery.producer(value)
        treated = None if maker is None else self._classifier.classify(maker)
        return bool(treated and treated.exact and (treated.structure == "cast" or ir.element(value) == "i1"))

    def _made_low(self, value: Any) -> bool:
        maker = surgery.producer(value)
        return maker is not None and self._classifier.classify(maker).colour == "allow"

    def _sources(self, value: Any) -> list[Any]:
        """The values that a value inside of the loop follows from."""
        maker = surgery.producer(value)
        if maker is None:
            return self._entries.get(value, [])
        structure, index = self._classifier.classify(maker).structure, list(maker.results).index(value)
        if structure == "call" and (called := self._functions.get(surgery.callees(maker)[0])) is not None:
            return [surgery.terminator(block).operands[index] for region in called.regions for block in region.blocks]
        ends = [surgery.terminator(region.blocks[0]) for region in maker.regions]
        if structure == "loop":
            condition, body = ends
            return [maker.operands[index], body.operands[index], *condition.operands]
        if structure in ("branch", "inline"):
            chosen = maker.operands if structure == "branch" else ()
            return [*(end.operands[index] for end in ends), *chosen]
        return [maker.operands[index]] if structure == "identity" else list(maker.operands)


def _is_float(value: Any) -> bool:
    return ir.element(value).startswith(("f", "bf"))
