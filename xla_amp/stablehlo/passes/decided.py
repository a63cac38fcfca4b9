"""What the pass decided about each operation, taken from its graph before the module changes."""

from __future__ import annotations

from collections.abc import Mapping

from xla_amp.common.types import LowDtype
from xla_amp.policy.policy import Decision
from xla_amp.stablehlo import ir, locations, sizes
from xla_amp.stablehlo.conversion_report import OperationDecision
from xla_amp.stablehlo.passes.cast_graph import CastNode
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.stablehlo.scope_paths import ModulePaths


def decisions(
    propagation: Propagation, policy: str, low: LowDtype, copies: Mapping[str, str], paths: ModulePaths
) -> tuple[OperationDecision, ...]:
    """The decisions of `propagation`; call it before the module changes.

    `copies`: name of a cloned function -> name of the original.
    """
    found = []
    for node in propagation.nodes:
        if node.op_class is None and not node.boundary:
            continue  # argument or result of a called function: reported with the callers' operations
        if node.structure != "constant" and not node.in_opaque:
            function = copies.get(node.function, node.function)
            found.append(_decision(propagation, node, policy, low, function, paths))
    return tuple(found)


def _decision(
    propagation: Propagation, node: CastNode, policy: str, low: LowDtype, function: str, paths: ModulePaths
) -> OperationDecision:
    op_class, location = node.op_class, locations.of(node.operation)
    decision = (op_class.decision if op_class else None) or Decision("", "keep", "builtin", None)
    name = op_class.name if op_class else ("argument" if node.writes else "result")
    gives_low = node.low and propagation.wide.isdisjoint(node.outputs[:1] if node.inside else node.outputs)
    why = node.why or "the signature is kept"
    after: str = low if node.low and not node.of_first else "float32"
    kept = _kept(node, low) if node.structure == "contraction" else ()
    overruled = bool(node.wide_reason) and node.colour == "allow"
    ends = sizes.Ends() if node.index is not None else sizes.ends(node.operation)
    return OperationDecision(
        **decision.recorded(kept=overruled),
        operation=name if node.index is None else f"{name}#{node.index}",
        function=function,
        module=paths.of(node.operation, node.function, location),
        location=location.text,
        colour=node.colour,
        given=kept or ("float32",),
        used=kept or (after,),
        result=(low if gives_low else "float32",),
        why=why,
        policy=policy,
        front="stablehlo",
        product=node.structure == "contraction",
        aten=decision.operation,
        shapes=ends.given,
        result_shapes=ends.made,
        flops=sizes.flops(node.operation) if node.structure == "contraction" else None,
        bytes=ends.bytes,
    )


def _kept(node: CastNode, low: LowDtype) -> tuple[str, ...]:
    """dtypes of a product's operands if the pass casts none of them: neither float32 nor the low dtype; else empty."""
    kinds = [ir.tensor_type(operand.type) for operand in list(node.operation.operands)[:2]]
    names = tuple(dict.fromkeys(ir.dtype_name(kind.element) for kind in kinds if kind))
    return () if {"float32", low} & {*names} else names
