"""The rule for sums of gradients over devices and processes, which policies name ``reduce_gradients``.

``fp32``, also without a rule, adds in float32; ``low`` in the low dtype; ``keep`` in the dtype of each gradient.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from xla_amp.policy import effects, module_patterns, op_catalog, regions
from xla_amp.policy.load import PolicyLike
from xla_amp.policy.policy import Decision, Policy
from xla_amp.policy.resolve import resolve

_WIDE: Final = "float32"
_HALF: Final = ("bfloat16", "float16")


class SumRules(NamedTuple):
    """A policy in force, and its low dtype."""

    policy: Policy
    low: str

    def decide(self, path: str | None) -> Decision:
        """The decision for the gradients of the parameters of the module at `path`; notes that it was asked for."""
        effects.asked(self.policy, op_catalog.GRADIENT_SUM, path)
        return self.policy.decide(op_catalog.GRADIENT_SUM, path)

    def dtype(self, own: str, path: str | None) -> str:
        """The dtype in which floating gradients of the dtype `own` are added."""
        decision = self.decide(path)
        if own == "float64":
            return own
        if decision.rule is not None and decision.cast == "low":
            return self.low
        return own if decision.rule is not None and decision.cast == "keep" and own in _HALF else _WIDE

    def reported(self, path: str | None, dtype: str, asked: bool) -> tuple[Decision, str]:
        """The decision to report of gradients that are added in `dtype`, and what to tell if no rule has decided it.

        `asked`: whether the caller has passed `dtype`.
        """
        decision = self.decide(path)
        if decision.rule is not None and not asked:
            return decision, ""
        told = f"dtype={dtype} was passed" if asked else "no rule: gradients are added in float32"
        return Decision(op_catalog.GRADIENT_SUM, "low" if dtype in _HALF else "fp32", "builtin", None), told

    @property
    def has_rules(self) -> bool:
        """Whether a rule names the sums."""
        return _has_rules(self.policy)

    @property
    def by_module(self) -> bool:
        """Whether a rule for modules does."""
        return _by_module(self.policy)


def after_region(device_type: str, default: PolicyLike) -> SumRules:
    """The rules of the region that is open or was the last to be opened; those of `default` before any."""
    region = regions.latest(device_type)
    if region is None:
        return of(default)
    return SumRules(resolve(region.policy), region.low)


def of(policy: PolicyLike) -> SumRules:
    """The rules of a policy, with those of file, environment and overrides."""
    effective = resolve(policy)
    return SumRules(effective, effective.low)


@functools.lru_cache(maxsize=64)
def _by_module(policy: Policy) -> bool:
    return any(
        op_catalog.GRADIENT_SUM in module_patterns.parse(pattern).operations
        for rule in policy.rules
        for pattern in rule.operations
        if module_patterns.is_module_pattern(pattern)
    )


@functools.lru_cache(maxsize=64)
def _has_rules(policy: Policy) -> bool:
    return _by_module(policy) or policy.decide(op_catalog.GRADIENT_SUM).rule is not None
