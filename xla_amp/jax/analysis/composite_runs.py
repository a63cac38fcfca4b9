"""Operations of torch that a jaxpr contains only in parts (``softmax``, ``layer_norm``), found by who wrote the parts.

The tracebacks of equations name the function, also of their derivatives: ``jax.nn.softmax``, Flax's
``LayerNorm.__call__`` (``[composites]`` in ``policy/tables/classes.toml``).  Consecutive equations of one call are a
*run*.  A user's rule for the operation decides the run as torch's kernel does it: the operands are cast, the parts are
computed as they were written, in float32, and the results get the dtype that the rule gives.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from xla_amp.jax import compat
from xla_amp.policy import Policy, op_catalog
from xla_amp.policy.policy import decided_as_a_whole


class Run(NamedTuple):
    """Equations of one call of a function."""

    operation: str
    """ATen name."""
    start: int
    stop: int


def runs(jaxpr: Any, policy: Policy) -> list[Run]:
    """The runs of a jaxpr that rules may decide, in order."""
    ruled = decided_as_a_whole(policy)
    if not ruled:
        return []
    found = itertools.groupby(range(len(jaxpr.eqns)), lambda index: _call(jaxpr.eqns[index], ruled))
    numbered = [(call, list(indices)) for call, indices in found]
    return [Run(call[0], indices[0], indices[-1] + 1) for call, indices in numbered if call is not None]


def _call(eqn: Any, ruled: frozenset[str]) -> tuple[Any, ...] | None:
    """The operation that an equation is part of, and a key of the call; None if no rule is for it."""
    for index, (file, function, _) in enumerate(frames := compat.frames(eqn)):
        operation = op_catalog.composite(function, file)
        if operation in ruled:
            call = frames if function.startswith("aten::") else frames[index + 1 :]
            return operation, call, str(compat.name_stack(eqn))
    operation, _ = op_catalog.catalogue().composites.get(compat.called(eqn), ("", ""))
    return (operation, eqn) if operation in ruled else None


def outside(jaxpr: Any, run: Run) -> tuple[list[Any], frozenset[Any]]:
    """The variables that a run reads, and those of its results that are read after it."""
    inside = jaxpr.eqns[run.start : run.stop]
    made = {var for eqn in inside for var in eqn.outvars}
    reads = dict.fromkeys(atom for eqn in inside for atom in compat.variables(eqn.invars) if atom not in made)
    after = {atom for eqn in jaxpr.eqns[run.stop :] for atom in compat.variables(eqn.invars)}
    return list(reads), frozenset(made & (after | set(compat.variables(jaxpr.outvars))))
