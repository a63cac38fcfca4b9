"""What XLA's compiler for the target estimates of a plan: a check on the peak rates that the search goes by."""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from xla_amp.plan_search.measurements import Plan
from xla_amp.report import units
from xla_amp.report.document import Finding


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaEstimates:
    """Estimates of XLA's own compiler, which runs nothing."""

    seconds: Mapping[str, float]
    """Of one run in ``float32``, with ``all low``, and of the ``plan``; empty if there is none."""
    why: str
    """Why there is none; empty if there are."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"seconds": dict(self.seconds), "why": self.why}

    def finding(self, rates: Mapping[str, float | None] = MappingProxyType({})) -> Finding:
        """For a report, beside the estimates by peak rates, if there are."""
        question = "What does XLA's compiler for the target estimate?"
        return Finding(question, self.told(rates), "low" if self.seconds else "could")

    def told(self, rates: Mapping[str, float | None]) -> str:
        """In words, beside the estimates by peak rates."""
        if not self.seconds:
            return self.why
        times = ", ".join(f"{name} {units.time(value)}" for name, value in self.seconds.items())
        share, by_rates = _share(self.seconds), _share(rates)
        if share is None:
            return times
        beside = "" if by_rates is None else f", by peak rates {by_rates:.2f}"
        return f"{times}: the plan takes {share:.2f} of float32's time{beside}"


NOT_ASKED = XlaEstimates(
    seconds={}, why="not asked for: compile_for_target=True compiles three programs for the target"
)


def _share(seconds: Mapping[str, float | None]) -> float | None:
    plan, wide = seconds.get("plan"), seconds.get("float32")
    return plan / wide if plan is not None and wide else None


def compiled(
    target: str, plans: Mapping[str, Plan], module: Callable[[Plan], tuple[Any, Mapping[str, str]]]
) -> XlaEstimates:
    """Compiles each plan's program for a target.

    Args:
        target: a row of ``hardware.toml``.
        plans: name -> plan.
        module: the program of a plan as `xla_amp.stablehlo.tools.targets.Compilers` takes it, and XLA's options.
    """
    # By name: the compilers are a front's tool, and run in processes of their own.
    targets: Any = importlib.import_module("xla_amp.stablehlo.tools.targets")
    if not targets.available(target):
        return _nothing(f"the compiler for {target} is not installed: pip install 'xla-amp[targets]'")
    known: dict[Plan, float] = {}
    with targets.Compilers() as compilers:
        for name, plan in plans.items():
            if plan in known:
                continue
            try:
                program, options = module(plan)
                found = compilers.compile(program, target, options)
            except Exception as error:  # of the user's program; what the search has found must not be lost
                return _nothing(f"the program of {name} could not be compiled: {type(error).__name__}: {error}")
            if found.seconds is None:
                return _nothing(f"XLA has no estimate: {found.seconds_why}")
            known[plan] = found.seconds
    return XlaEstimates(seconds={name: known[plan] for name, plan in plans.items()}, why="")


def _nothing(why: str) -> XlaEstimates:
    # One line, since it is also a comment of the policy file.
    return XlaEstimates(seconds={}, why=textwrap.shorten(f"none: {why}", 600))
