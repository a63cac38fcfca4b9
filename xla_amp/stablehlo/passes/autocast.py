"""`autocast` for StableHLO modules: build the graph, propagate dtypes, rewrite a copy of the module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from xla_amp.common import progress
from xla_amp.common.types import Cast, LowDtype
from xla_amp.errors import ModuleError, TargetError
from xla_amp.policy import DEFAULT, PolicyLike, effects, resolve
from xla_amp.policy.policy import Policy
from xla_amp.stablehlo import io, ir
from xla_amp.stablehlo.conversion_report import Achieved, ConversionReport, emit_events
from xla_amp.stablehlo.op_table import Classifier
from xla_amp.stablehlo.passes import composite_calls
from xla_amp.stablehlo.passes.cast_graph import CastGraph, CastNode
from xla_amp.stablehlo.passes.clone_functions import clone_for_calls, merge_identical
from xla_amp.stablehlo.passes.decided import decisions
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.stablehlo.passes.rewriter import Rewriter, fold_casts
from xla_amp.stablehlo.program import Program, parse
from xla_amp.stablehlo.scope_paths import ModulePaths, has_names

_ELEMENTS: Final[Mapping[LowDtype, str]] = {"bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """A program in mixed precision, and the report of the pass."""

    program: Program
    """The argument for `xla_amp.stablehlo.save`; a program from ``jax.export`` can be called from JAX again."""
    report: ConversionReport
    achieved: Achieved | None = None
    """The errors on sample inputs, where some were given."""

    @property
    def module(self) -> Any:
        """The new ``jaxlib.mlir.ir.Module``; the argument of `autocast` is unchanged."""
        return self.program.module

    def text(self) -> str:
        """MLIR text."""
        return ir.text(self.module)

    def bytecode(self) -> bytes:
        """MLIR bytecode, for the same version of jaxlib."""
        return ir.bytecode(self.module)

    def artifact(self, version: str | None = None) -> bytes:
        """Portable artifact, for the current and later versions of StableHLO, or for `version` and later."""
        return ir.artifact(self.module, version)


def autocast(
    module: Any,
    *,
    policy: PolicyLike | None = None,
    dtype: Any = None,
    rules: Mapping[str, Cast] | None = None,
    keep_io: bool = True,
    sample_inputs: Sequence[Any] | None = None,
    max_error: float | None = None,
    strict: bool = False,
) -> Converted:
    """Puts a StableHLO module into mixed precision.

    Contractions run low and accumulate in float32.  Elementwise operations between two contractions run low.
    Exponentials, sums, solvers and the operations after them stay float32.  docs/stablehlo.md has the rules.

    Args:
        module: a program from `xla_amp.stablehlo.load`, a ``jaxlib`` module, the result of ``jax.jit(f).lower(...)``,
            ``jax.export.export(f)(...)`` or `xla_amp.export`, text or bytes of any format, or a path.  It is not
            changed.
        policy: name, path or `Policy`; default ``tpu``.
        dtype: low dtype, ``"bfloat16"`` or ``"float16"``; default the policy's `jax_low`.
        rules: rules on top of the policy, ``{"tanh": "fp32"}``.
        keep_io: True keeps the dtypes of arguments and results.  False: float32 arguments that only low operations
            read become low, and so do results that are computed low.
        sample_inputs: arguments of one call, or a list of such tuples: as few products as possible stay float32 so that
            the results on them are finite wherever they were.
        max_error: with `sample_inputs`, the largest accepted error of a result, too, relative to its norm, as of
            `compare`; default any.
        strict: a rule of yours without an effect on the module is an error instead of a `RuleWarning`.

    Raises:
        ModuleError: the module cannot be read, or is not valid.
        TargetError: not even the products in float32 bring the results within `max_error`.
        PolicyError: the policy cannot be loaded, or bans an operation; a rule of `rules` or of an override names an
            operation that StableHLO programs do not contain.
        UnsupportedDtypeError: the policy does not offer `dtype`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> text = jax.jit(jnp.dot).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).as_text()
        >>> autocast(text).report.casts
        {'f32->bf16': 2}
    """
    effective, low = settings(policy, dtype, rules)
    program = as_program(module)
    if sample_inputs is not None:
        from xla_amp.tools.search import on_stablehlo

        planned = on_stablehlo.Planned(program, effective, low, sample_inputs, keep_io=keep_io)
        warn_of_rules(program, effective, planned.first, strict=strict)
        converted = planned.within(max_error)
    elif max_error is not None:
        raise TargetError(f"autocast(max_error={max_error:g}): an error is measured on sample_inputs; pass some")
    else:
        found = convert(program, effective, low, keep_io=keep_io)
        warn_of_rules(program, effective, found, strict=strict)
        converted = found.converted
    emit_events(converted.report)
    return converted


def warn_of_rules(program: Program, policy: Policy, found: Conversion, *, strict: bool) -> None:
    """Warns of rules of the user's without an effect; an error with `strict`."""
    if any(layer.layer != "builtin" for layer in policy.layers):
        nameless = policy.by_module and not has_names(program.module)
        effects.report(policy, found.effects, "stablehlo", strict=strict, no_modules=_NO_LOCATIONS if nameless else "")


def settings(policy: PolicyLike | None, dtype: Any, rules: Mapping[str, Cast] | None) -> tuple[Policy, LowDtype]:
    """The policy in force and the low dtype; raises as `autocast` does."""
    effective = resolve("tpu" if policy in (None, DEFAULT) else policy, rules)
    return effective, effective.jax_low if dtype is None else effective.offered(dtype)


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
    keep: Mapping[int, str] = MappingProxyType({}),
    look: Callable[[list[CastNode]], None] | None = None,
) -> Conversion:
    """Converts a copy of `program`.

    `keep`: number of a node -> why it must stay float32.  `look` gets the nodes before the program is changed.
    """
    progress.tell("converting")
    copied = ir.copy(program.module)
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
        propagation = Propagation(graph, array_dtype, keep_io=keep_io, keep=keep)
        if look is not None:
            look(graph.nodes)
        decided = tuple(decisions(propagation, policy.name, low, copies, paths))
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


_NO_LOCATIONS: Final = (
    "the program has no locations, which name modules. Give the lowered program itself, bytecode, an artifact, or "
    "the text of lowered.as_text(debug_info=True)"
)


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


def as_program(module: Any) -> Program:
    """Converts every kind of argument that `autocast` takes to a `Program`.

    Raises:
        ModuleError: another kind of object, or no valid program.
    """
    if isinstance(module, Program):
        return module
    if isinstance(module, Converted):
        return module.program
    if isinstance(module, ir.mlir().Module):
        return Program(module=module, format="bytecode")
    if isinstance(module, bytes | bytearray | memoryview):
        return parse(bytes(module))
    if isinstance(module, str) and module.lstrip().startswith("HloModule"):
        return parse(module.encode())
    if isinstance(module, str) and ("\n" in module or "func.func" in module):
        return Program(module=ir.parse(module), format="text")
    if isinstance(module, str | os.PathLike):
        return io.load(module)
    if hasattr(module, "compiler_ir"):
        return Program(module=ir.copy(module.compiler_ir("stablehlo")), format="bytecode")
    module = getattr(module, "exported", module)  # xla_amp.export
    if hasattr(module, "mlir_module_serialized"):
        parsed = ir.parse(module.mlir_module_serialized)
        return Program(module=parsed, format="export", exported=module)
    raise ModuleError(
        f"autocast() expects MLIR text or bytes, a path, a module, jax.jit(f).lower(...) or a jax.export program, got "
        f"{type(module).__name__}"
    )
