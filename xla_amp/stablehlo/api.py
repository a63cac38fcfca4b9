"""`xla_amp.stablehlo.autocast`: settings, the pass, and a search where sample inputs are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from xla_amp.common.types import Cast, LowDtype
from xla_amp.errors import TargetError
from xla_amp.policy import DEFAULT, PolicyLike, effects, resolve
from xla_amp.policy.policy import Policy
from xla_amp.stablehlo.conversion_report import emit_events
from xla_amp.stablehlo.converted import Converted, as_program
from xla_amp.stablehlo.passes.convert import Conversion, convert
from xla_amp.stablehlo.program import Program
from xla_amp.stablehlo.scope_paths import has_names

_NO_LOCATIONS: Final = (
    "the program has no locations, which name modules. Give the lowered program itself, bytecode, an artifact, or "
    "the text of lowered.as_text(debug_info=True)"
)


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
        from xla_amp.stablehlo.measure.planned import Planned

        planned = Planned(program, effective, low, sample_inputs, keep_io=keep_io)
        warn_of_rules(program, effective, planned.first, strict=strict)
        converted = planned.within(max_error)
    elif max_error is not None:
        raise TargetError(f"autocast(max_error={max_error:g}): an error is measured on sample_inputs; pass some")
    else:
        given = any(each is program.module for each in (module, getattr(module, "module", None)))
        found = convert(program, effective, low, keep_io=keep_io, in_place=not given)  # what was read here is ours
        warn_of_rules(program, effective, found, strict=strict)
        converted = found.converted
    emit_events(converted.report)
    return converted


def warn_of_rules(program: Program, policy: Policy, found: Conversion, *, strict: bool) -> None:
    """Warns of rules of the user's without an effect; an error with `strict`."""
    if policy.from_user:
        nameless = policy.by_module and not has_names(program.module)
        effects.report(policy, found.effects, "stablehlo", strict=strict, no_modules=_NO_LOCATIONS if nameless else "")


def settings(policy: PolicyLike | None, dtype: Any, rules: Mapping[str, Cast] | None) -> tuple[Policy, LowDtype]:
    """The policy in force and the low dtype; raises as `autocast` does."""
    effective = resolve("tpu" if policy in (None, DEFAULT) else policy, rules)
    return effective, effective.jax_low if dtype is None else effective.offered(dtype)
