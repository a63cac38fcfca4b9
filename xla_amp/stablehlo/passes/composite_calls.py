"""Operations of torch that a StableHLO program contains in parts (``softmax``, ``layer_norm``), for rules for these.

The parts are found by who wrote them: a function in their locations (``LayerNorm.__call__`` of Flax and Equinox, the
lowering of an operation in a program from torch), by the private function that they are in (``@relu``, ``@silu``), or
by a ``stablehlo.composite`` (``aten.softmax``), which becomes a call of its decomposition.

A rule decides the parts as torch's kernel does it: what enters is cast, the parts run in float32, the result is cast.
For that, a conversion without effect is put at each edge; the pass colours it by the rule, and `remove` takes it away.
If the rule's result depends on what enters (``fp32_inside``, ``promote``, ``keep``), nothing is cast at the entry, and
`composite_marks.leaders` says which values decide about the result.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from xla_amp.common.types import Cast
from xla_amp.policy import Policy, op_catalog
from xla_amp.policy.policy import decided_as_a_whole
from xla_amp.stablehlo import ir, locations, surgery
from xla_amp.stablehlo.composite_marks import LEADS, MARK, mark_of
from xla_amp.stablehlo.scope_paths import ModulePaths

_MEANS: Final = "amp.means"
"""Attribute of the decomposition of a composite: the operation."""
_RAGGED: Final = "chlo.ragged_dot"
_AXES: Final = (
    "lhs_batching_dimensions",
    "rhs_batching_dimensions",
    "lhs_contracting_dimensions",
    "rhs_contracting_dimensions",
    "lhs_ragged_dimensions",
    "rhs_group_dimensions",
)
"""Of a ragged product, in the order in which its composite has them."""
_NUMBERED: Final = re.compile(r"([._]\d+)+$")
_BY_OPERANDS: Final = ("fp32_inside", "promote", "keep")
"""Casts whose result has the dtype of operands: of the main one (the largest), or the widest of all."""


def restore_ragged_products(module: Any) -> None:
    """Makes a ragged product, which is a composite in a portable artifact, an operation again that may be low."""
    mlir, written = ir.mlir(), [name for name in ir.functions(module) if name.startswith(_RAGGED)]
    for operation in ir.operations(module.operation) if written else ():
        if operation.name != "stablehlo.composite" or operation.attributes["name"].value != _RAGGED:
            continue
        given = operation.attributes["composite_attributes"]
        axes = zip(_AXES, given["ragged_dot_dimension_numbers"], strict=True)
        numbers = ", ".join(f"{name} = {list(mlir.DenseIntElementsAttr(each))}" for name, each in axes)
        precisions = ", ".join(f"#chlo<precision {each.value}>" for each in given["precision_config"])
        texts = {"ragged_dot_dimension_numbers": f"#{_RAGGED}<{numbers}>", "precision_config": f"[{precisions}]"}
        surgery.replace(operation, _RAGGED, {key: mlir.Attribute.parse(text) for key, text in texts.items()})
    for name in written:
        if name not in surgery.reached(ir.functions(module), [module.operation]):
            ir.functions(module)[name].erase()


def call_decompositions(module: Any, policy: Policy) -> None:
    """Replaces composites that a rule may decide as a whole by calls of their decompositions."""
    mlir, ruled = ir.mlir(), decided_as_a_whole(policy)
    for operation in ir.operations(module.operation) if ruled else ():
        if operation.name != "stablehlo.composite":
            continue
        name = operation.attributes["name"].value.rpartition(".")[2]
        meant = op_catalog.composite(f"aten::{name}", "")
        symbol = operation.attributes["decomposition"].value
        function = ir.functions(module).get(symbol)
        if meant not in ruled or function is None or not ir.is_private(function):
            continue
        function.attributes[_MEANS] = mlir.StringAttr.get(meant)
        surgery.call_instead(operation, symbol)


def mark(module: Any, policy: Policy, paths: ModulePaths, copies: Mapping[str, str]) -> bool:
    """Marks the parts of the operations that a rule decides as a whole, and their edges; whether there are any.

    `copies`: name of a cloned function -> name of the function.
    """
    ruled = decided_as_a_whole(policy)
    numbers = itertools.count()
    for function in list(ir.functions(module).values()) if ruled else ():
        if len(function.regions[0].blocks):
            for name, parts in list(_groups(function, ruled, copies)):
                path = paths.of(parts[0])
                decision = policy.decision(name, path, op_catalog.same_as(name)[1:])
                if decision.of_whole:
                    # Statistics (mean, variance, running averages) stay float32, as in torch's kernels.
                    statistics = op_catalog.operation_class(name) == "normalization"
                    _mark(f"{name} {next(numbers)} {path}", parts, decision.cast, statistics=statistics)
    return next(numbers) > 0


def remove(module: Any) -> None:
    """Takes the marks and the edges away."""
    for function in ir.functions(module).values():
        if _MEANS in function.attributes:
            del function.attributes[_MEANS]
    for operation in ir.operations(module.operation):
        marked = mark_of(operation)
        if marked is None:
            continue
        if marked.is_edge:
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
        else:
            del operation.attributes[MARK]
            if LEADS in operation.attributes:
                del operation.attributes[LEADS]


def _groups(function: Any, ruled: frozenset[str], copies: Mapping[str, str]) -> Iterator[tuple[str, list[Any]]]:
    """(operation, its parts in one block)."""
    symbol = surgery.name_of(function)
    symbol = copies.get(symbol, symbol)
    operation, _ = op_catalog.catalogue().composites.get(_NUMBERED.sub("", symbol), ("", ""))
    if _MEANS in function.attributes:
        operation = function.attributes[_MEANS].value
    if operation in ruled and ir.is_private(function):
        yield operation, surgery.body(surgery.block_of(function))
        return
    for block in _blocks(function):
        yield from _by_location(block, ruled)


def _blocks(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            yield block
            for view in block.operations:
                if view.operation.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
                    yield from _blocks(view.operation)


def _by_location(block: Any, ruled: frozenset[str]) -> Iterator[tuple[str, list[Any]]]:
    """Runs of operations that one call of a function wrote; constants inside do not end a run."""
    called = ((_call(locations.of(operation), ruled), operation) for operation in surgery.body(block))
    parts = (pair for pair in called if pair[0] or pair[1].name != "stablehlo.constant")
    for call, run in itertools.groupby(parts, lambda pair: pair[0]):
        if call is not None:
            yield call[0], [operation for _, operation in run]


def _call(location: locations.Location, ruled: frozenset[str]) -> tuple[str, str] | None:
    """The operation that a location is in, and a key of the call."""
    for frame in location.frames:
        operation = op_catalog.composite(frame.function, frame.file)
        if operation in ruled:
            caller = "" if frame.function.startswith("aten::") else frame.caller
            return operation, caller or location.text.partition("(callsite")[2] or location.text
    return None


def _mark(text: str, parts: Sequence[Any], cast: Cast, *, statistics: bool) -> None:
    mlir, wide = ir.mlir(), ir.mlir().F32Type.get()
    part_mark, edge_mark = (mlir.StringAttr.get(f"{kind} {text}") for kind in ("part", "edge"))

    def edge(value: Any, place: Any, location: Any) -> Any:
        with place, location:
            made = ir.dialect().convert(value.type, value)
        made.owner.attributes[MARK] = edge_mark
        return made

    def is_part(operation: Any) -> bool:
        """Whether it is one of `parts`, or in a region of one."""
        while operation is not None and operation.name != "func.func":
            if MARK in operation.attributes:
                return bool(operation.attributes[MARK] == part_mark)
            operation = surgery.parent(operation)
        return False

    def is_wide(value: Any) -> bool:
        return isinstance(value.type, mlir.RankedTensorType) and value.type.element_type == wide

    for part in parts:
        part.attributes[MARK] = part_mark
    entering: dict[Any, list[tuple[Any, int]]] = {}
    for part in parts:
        for index, operand in enumerate(part.operands):
            owner = surgery.producer(operand)
            if is_wide(operand) and (owner is None or not (is_part(owner) or owner.name == "stablehlo.constant")):
                entering.setdefault(operand, []).append((part, index))
    largest = max(map(ir.elements, entering), default=0)
    if cast in _BY_OPERANDS:
        main = next((value for value in entering if ir.elements(value) == largest), None)
        for value, reads in entering.items():
            if cast != "fp32_inside" or value == main:
                part, index = reads[0]
                before = [*part.attributes[LEADS]] if LEADS in part.attributes else []
                part.attributes[LEADS] = mlir.DenseI64ArrayAttr.get([*before, index])
    else:
        for value, reads in entering.items():
            entered = edge(value, mlir.InsertionPoint(reads[0][0]), reads[0][0].location)
            for part, index in reads:
                part.operands[index] = entered
    for part in parts:
        for result in part.results:
            outside = [use for use in result.uses if not is_part(getattr(use.owner, "operation", use.owner))]
            if outside and is_wide(result) and not (statistics and ir.elements(result) < largest):
                left = edge(result, mlir.InsertionPoint.after(part), part.location)
                for use in outside:
                    use.owner.operands[use.operand_number] = left
