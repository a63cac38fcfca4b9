"""Rewrite the module to the decided dtypes: element types, one cast per value and direction, constants, attributes."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import constants, ir, surgery
from xla_amp.stablehlo.passes.canonicalize import untranspose
from xla_amp.stablehlo.passes.cast_graph import CastGraph, CastNode
from xla_amp.stablehlo.passes.propagation import Propagation

_CONVERT: Final = "stablehlo.convert"
_ATTRIBUTES: Final = "arg_attrs"
_ALIAS: Final = "tf.aliasing_output"


def fold_casts(module: Any) -> int:
    """Folds chains of casts whose first one is lossless, so that no rounding is lost or added.

    Returns:
        How many casts were changed or removed.
    """
    folded = 0
    for operation in ir.operations(module.operation):
        if operation.name != _CONVERT:
            continue
        inner = surgery.producer(operation.operands[0])
        if inner is None or inner.name != _CONVERT:
            continue
        source = inner.operands[0]
        first, second = ir.element(source), ir.element(inner.results[0])
        floats = all(each in ir.NUMPY and each.startswith(("f", "bf")) for each in (first, second))
        if not floats or not np.can_cast(ir.numpy_dtype(first), ir.numpy_dtype(second), "safe"):
            continue
        folded += 1
        if source.type == operation.results[0].type:
            operation.results[0].replace_all_uses_with(source)
            operation.erase()
        else:
            operation.operands[0] = source
        if surgery.is_unused(inner):
            inner.erase()
    return folded


class Rewriter:
    """Changes the module of `graph` in place; needs a current MLIR location."""

    def __init__(self, graph: CastGraph, propagation: Propagation, low: np.dtype[Any]) -> None:
        mlir = ir.mlir()
        self.graph, self.propagation = graph, propagation
        self.low_dtype = low
        self.low, self.wide = mlir.Type.parse(graph.low_element), mlir.F32Type.get()
        self.casts: Counter[str] = Counter()
        """``f32->bf16`` and ``bf16->f32``: how many were inserted."""
        self._cast: dict[tuple[Any, bool], Any] = {}
        self._replaced: list[Any] = []
        """Operations that may have no users left."""

    def run(self) -> None:
        """Rewrites the whole module."""
        for node in self.graph.nodes:
            if node.low:
                self._retype(node)
        kept = {node for node in self.graph.nodes if node.narrows and self._stays(node.operands[0].slot)}
        for node in self.graph.nodes:
            for operand in () if node in kept else node.operands:
                have, wanted = self.propagation.is_low(operand.slot), node.low and not node.inside
                if have != wanted:
                    cast = self._as(operand.value, operand.slot, low=wanted)
                    operand.operation.operands[operand.position] = cast
        for node in self.graph.nodes:
            if node.low and node.inside:
                self._round_result(node)
        for node in self.graph.nodes:
            if node.narrows and node not in kept:
                operation = node.operation
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.erase()
        for node in self.graph.nodes:
            if node.low and node.structure == "contraction" and not self.propagation.wide.isdisjoint(node.outputs):
                untranspose(node.operation)
        for function in ir.functions(self.graph._module).values():
            self._function_type(function)
        for operation in reversed(self._replaced):
            if surgery.is_unused(operation):
                operation.erase()

    # Types.

    def type(self, value_type: Any, *, low: bool) -> Any:
        """The same type in the low dtype, or in float32."""
        return ir.with_element(value_type, self.low if low else self.wide)

    def _round_result(self, node: CastNode) -> None:
        """Casts the first result of a node that computes in float32; its users read it low."""
        wide = node.writes[0]
        with ir.mlir().InsertionPoint.after(node.operation), node.operation.location:
            rounded = ir.dialect().convert(self.type(wide.type, low=True), wide)
        wide.replace_all_uses_except(rounded, rounded.owner.operation)
        self.casts[f"f32->{self.low}"] += 1

    def _retype(self, node: CastNode) -> None:
        if node.inside:
            return
        slots = node.outputs if node.index is None else node.outputs * len(node.writes)
        for slot, value in zip(slots, node.writes, strict=True):
            if slot not in self.propagation.wide:
                value.set_type(self.type(value.type, low=True))
        if node.index is not None:
            return
        if node.structure == "constant":
            node.operation.attributes["value"] = self._constant(node.operation)
        elif node.structure == "body":
            for region in node.operation.regions:
                self._retype_body(region)
        elif node.structure == "contraction":
            self._precision(node)

    def _retype_body(self, region: Any) -> None:
        for block in region.blocks:
            for argument in block.arguments:
                if self.graph.kind(argument) == "wide":
                    argument.set_type(self.type(argument.type, low=True))
            for view in block.operations:
                operation = view.operation
                for result in operation.results:
                    if self.graph.kind(result) == "wide":
                        if "value" in operation.attributes:
                            operation.attributes["value"] = self._constant(operation)
                        result.set_type(self.type(result.type, low=True))

    def _precision(self, node: CastNode) -> None:
        # Torch's default precision of float32 operands has no meaning for low ones: their products are exact.
        attributes = node.operation.attributes
        if "precision_config" in attributes:
            count = len(attributes["precision_config"])
            dialect = node.operation.name.partition(".")[0]
            default = f"#{dialect}<precision DEFAULT>"
            attributes["precision_config"] = ir.mlir().Attribute.parse(f"[{', '.join([default] * count)}]")

    def _function_type(self, function: Any) -> None:
        if len(function.regions[0].blocks) != 1:
            return
        before = surgery.argument_types(function)
        surgery.update_type(function)
        after = surgery.argument_types(function)
        changed = [index for index, (given, now) in enumerate(zip(before, after, strict=True)) if given != now]
        if changed and _ATTRIBUTES in function.attributes:
            self._keep_no_alias(function, set(changed))

    def _keep_no_alias(self, function: Any, arguments: set[int]) -> None:
        # An argument whose dtype has changed cannot be donated to its result any more.
        mlir = ir.mlir()
        kept = []
        for index, attributes in enumerate(function.attributes[_ATTRIBUTES]):
            names = [name if isinstance(name, str) else name.name for name in attributes]
            left = {name: attributes[name] for name in names if index not in arguments or name != _ALIAS}
            kept.append(mlir.DictAttr.get(left))
        function.attributes[_ATTRIBUTES] = mlir.ArrayAttr.get(kept)

    # Casts.

    def _as(self, value: Any, slot: int, *, low: bool) -> Any:
        """`value` in the other dtype, cast once for all operations that need it."""
        key = value, low
        if key not in self._cast:
            self._cast[key] = self._make(value, slot, low=low)
        return self._cast[key]

    def _stays(self, slot: int) -> bool:
        """Whether a cast of the original program, from a value of this slot to the low dtype, stays where it is."""
        return not (slot in self.graph.exact or self._is_constant(slot) or self.propagation.is_low(slot))

    def _make(self, value: Any, slot: int, *, low: bool) -> Any:
        mlir = ir.mlir()
        owner = value.owner
        if isinstance(owner, mlir.Block):
            where, location = mlir.InsertionPoint.at_block_begin(owner), mlir.Location.unknown()
        else:
            where, location = mlir.InsertionPoint.after(owner), owner.location
            if low and slot in self.graph.exact:
                self._replaced.append(owner.operation)
                return owner.operation.operands[0]
            if low and self._is_constant(slot):
                return self._narrow_constant(owner.operation, value, where)
        self.casts[f"f32->{self.low}" if low else f"{self.low}->f32"] += 1
        with where, location:
            return ir.dialect().convert(self.type(value.type, low=low), value)

    def _is_constant(self, slot: int) -> bool:
        return slot in self.propagation.constant and self.graph.nodes[self.graph.producer[slot]].index is None

    def _narrow_constant(self, operation: Any, value: Any, where: Any) -> Any:
        # A second constant, or a copy of the operation that moves it, instead of a cast.
        self._replaced.append(operation)
        narrow = operation.clone(ip=where).operation
        for index, operand in enumerate(operation.operands):
            if operand in self.graph.slot_of:
                narrow.operands[index] = self._low(operand)
        index = list(operation.results).index(value)
        if not len(operation.operands):
            narrow.attributes["value"] = self._constant(operation)
        narrow.results[index].set_type(self.type(value.type, low=True))
        return narrow.results[index]

    def _low(self, value: Any) -> Any:
        slot = self.graph.slot_of[value]
        return value if self.propagation.is_low(slot) else self._as(value, slot, low=True)

    def _constant(self, operation: Any) -> Any:
        attribute = operation.attributes["value"]
        values = constants.array_of(attribute)
        if values is None:  # propagation narrows only constants that it could read
            raise ModuleError("cannot narrow a constant whose values cannot be read")
        with np.errstate(over="ignore"):
            narrowed = values.astype(self.low_dtype)
        return constants.attribute_of(narrowed, self.type(attribute.type, low=True))
