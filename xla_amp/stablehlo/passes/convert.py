"""`convert`, the pass: build the graph, propagate dtypes, rewrite a copy of the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from xla_amp.common import progress
from xla_amp.common.types import LowDtype
from xla_amp.errors import ModuleError
from xla_amp.policy import effects
from xla_amp.policy.policy import Policy
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.conversion_report import ConversionReport
from xla_amp.stablehlo.converted import Converted
from xla_amp.stablehlo.op_table import Classifier
from xla_amp.stablehlo.passes import composite_calls
from xla_amp.stablehlo.passes.cast_graph import CastGraph, CastNode
from xla_amp.stablehlo.passes.clone_functions import clone_for_calls, merge_identical
from xla_amp.stablehlo.passes.decided import decisions
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.stablehlo.passes.rewriter import Rewriter, fold_casts
from xla_amp.stablehlo.program import Program
from xla_amp.stablehlo.scope_paths import ModulePaths

_ELEMENTS: Final[Mapping[LowDtype, str]] = {"bfloat16": "bf16", "float16": "f16"}


class Conversion(NamedTuple):
    """What `convert` made."""

    converted: Converted
    effects: effects.Effects
    """The user's rules that acted."""


def convert(
    program: Program,
    policy: Policy,
    low: LowDtype,
    *,
    keep_io: bool,
    wide: Mapping[int, str] = MappingProxyType({}),
    look: Callable[[list[CastNode]], None] | None = None,
    in_place: bool = False,
) -> Conversion:
    """Converts a copy of `program`, or `in_place` itself.

    `wide`: number of a node -> why it must stay float32.  `look` gets the nodes before the program is changed.
    """
    progress.tell("converting")
    copied = program.module if in_place else ir.copy(program.module)
    with copied.context:
        composite_calls.restore_ragged_products(copied)
    before = ir.bytecode(copied)
    if not ir.functions(copied):
        raise ModuleError("autocast() expects a module with functions (func.func), got one without; nothing to convert")
    folded = fold_casts(copied)
    array_dtype = ir.numpy_dtype(_ELEMENTS[low])
    mlir = ir.mlir()
    with copied.context, mlir.Location.unknown():
        composite_calls.call_decompositions(copied, policy)
        copies = clone_for_calls(copied, per_path=policy.by_module)
        paths = ModulePaths(copied)
        classifier = Classifier(policy, paths)
        classifier.composites = composite_calls.mark(copied, policy, paths, copies)
        graph = CastGraph(copied, classifier, _ELEMENTS[low])
        propagation = Propagation(graph, array_dtype, keep_io=keep_io, wide=wide)
        if look is not None:
            look(graph.nodes)
        decided = decisions(propagation, policy.name, low, copies, paths)
        acted = _effects(graph)
        rewriter = Rewriter(graph, propagation, array_dtype)
        rewriter.run()
        if classifier.composites:
            composite_calls.remove(copied)
        folded += fold_casts(copied)
        merge_identical(copied, copies)
    ir.verify(copied)
    report = ConversionReport(
        policy=policy.name,
        low=low,
        operations=decided,
        casts=dict(rewriter.casts),
        folded=folded,
        unconverted=tuple(graph.unconverted),
    )
    # A program that needs nothing is written back as it was, with the pytrees and gradients of jax.export.
    changed = ir.bytecode(copied) != before
    made = program.with_module(copied) if changed else dataclasses.replace(program, module=copied)
    return Conversion(Converted(program=made, report=report), acted)


def _effects(graph: CastGraph) -> effects.Effects:
    """The user's rules that the nodes of `graph` follow."""
    with effects.collect() as found:
        found.paths.update(graph.classifier.paths.seen)
        for node in graph.nodes:
            each = node.op_class
            if each is None or not each.reached or each.decision is None or node.in_opaque:
                continue
            stays = each.fixed and each.decision.cast in ("low", "promote", "keep")
            lost = each.colour == "allow" and not node.low
            effects.note(each.reached, f"{each.name} stays float32: {node.why}" if stays or lost else "")
    return found
