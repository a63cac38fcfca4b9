"""Settings of an autocast region, the policy's decision for a primitive, and what the program itself asks for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp import hardware
from xla_amp import policy as policies
from xla_amp.common import events
from xla_amp.common.types import LOW_DTYPES, Cast
from xla_amp.errors import AutocastWarning, PolicyError
from xla_amp.jax import compat
from xla_amp.jax.primitives import info
from xla_amp.policy import Decision, Policy, PolicyLike, op_catalog
from xla_amp.policy.load import default_name
from xla_amp.policy.policy import Match
from xla_amp.policy.resolve import overridden

Residual: TypeAlias = Literal["keep", "low"]

LOW: Final = frozenset(map(jnp.dtype, LOW_DTYPES))
"""The low dtypes."""

_CASTABLE = LOW | {jnp.dtype("float32")}
"""The dtypes that a cast may change: float64, complex, integers and 8-bit floats stay as they are."""

F32 = jnp.dtype(jnp.float32)

LOW_CASTS: Final[tuple[Cast, ...]] = ("low", "low_fp32_out")
"""Casts with low operands."""


def dtype_of(value: Any) -> Any:
    """dtype of an array, tracer, scalar or aval; None if it has none."""
    return getattr(value, "dtype", None)


is_castable: Final = _CASTABLE.__contains__
"""Whether autocast changes a dtype."""


def castable_dtype(value: Any) -> Any:
    """dtype of a value if autocast changes it; otherwise None."""
    dtype = dtype_of(value)
    return dtype if is_castable(dtype) else None


@functools.lru_cache(maxsize=8192)
def decide(
    policy: Policy, primitive: str, aten: str = "", path: str | None = None
) -> tuple[Decision, frozenset[Match]]:
    """The policy's decision for a primitive, and the user's rules that reach it.

    It is decided by its ATen name, or by its own name if it has no ATen counterpart.

    `aten` is the name of the ATen operation that it is here, if it stands for several; `path` that of its module.
    """
    operation, *same = op_catalog.same_as(aten) if aten else op_catalog.meanings("jaxpr", primitive) or (primitive,)
    decision = policy.decision(operation, path, tuple(same))
    row = info(primitive)
    if not aten and row.kind is None and not (row.picks or row.plumbing):
        decision = decision.between_products()
    return decision, policy.reaching(operation, path, tuple(same))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Resolved arguments of one `autocast`; hashable, for use in cache keys."""

    policy: Policy
    low: Any
    """The low dtype, a NumPy dtype."""
    residual: Residual = "keep"
    as_written: str = ""
    """Why all of the program stays in the dtypes that it was written with; empty if the policy decides."""
    solves: bool = False
    """Whether the program contains a loop that stays as it was written.  One in a backward pass computes its steps
    again, and stays so, too."""
    after_gradients: bool = False
    """Whether the program follows the gradients of a training step: the optimizer's contractions are left alone."""

    def now(self) -> Settings:
        """The settings with the overrides that are open on this thread, for what runs after the call of the region."""
        policy = overridden(self.policy)
        return self if policy is self.policy else dataclasses.replace(self, policy=policy)


def resolve_settings(
    policy: PolicyLike | None, dtype: Any, residual: Residual, rules: Mapping[str, Cast] | None = None
) -> Settings:
    """Resolves the arguments of `autocast` against the current backend, file and environment.

    Raises:
        PolicyError: `policy` cannot be loaded, or `rules` are malformed.
        UnsupportedDtypeError: the policy does not offer this low dtype.
    """
    chosen = default_name(jax.default_backend()) if policy in (None, policies.DEFAULT) else policy
    effective = policies.resolve(policies.load(chosen), rules)
    return Settings(policy=effective, low=_low_dtype(effective, dtype), residual=residual)


def _low_dtype(policy: Policy, dtype: Any) -> Any:
    if dtype is None:
        return jnp.dtype(policy.jax_low if policy.jax_low == policy.low or _has_bfloat16() else policy.low)
    return jnp.dtype(policy.offered(dtype))


def _has_bfloat16() -> bool:
    if jax.default_backend() != "gpu":
        return True
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    if hardware.gpu_multiplies_bfloat16(capability):
        return True
    events.warn(
        f"this GPU (compute capability {capability}) does not multiply bfloat16, so the low dtype is float16, whose "
        "gradients need a loss scale: xla_amp.jax.value_and_grad(f)(LossScale.dynamic(), ...). dtype='float16' says "
        "that you know, dtype='bfloat16' is slow here",
        AutocastWarning,
    )
    return False


def ban_error(primitive: str, decision: Decision) -> PolicyError:
    """The error for a primitive that the policy bans."""
    return PolicyError(
        f"{primitive} under autocast: the rule for {decision.operation!r} ({decision.origin}) bans it: {decision.why}. "
        "Call it inside `with xla_amp.jax.autocast(enabled=False)`, or override the rule"
    )


def where(outer: tuple[str, str], eqn: Any) -> tuple[str, str]:
    """Module path and ``file:line`` of an equation in a primitive at `outer`; of the running code if `eqn` is None."""
    return ".".join(filter(None, (outer[0], *compat.scopes(eqn)))), compat.location(eqn) or outer[1]


def emit_decision(
    policy: Policy,
    primitive: str,
    decision: Decision,
    given: list[Any],
    used: list[Any],
    outs: list[Any],
    place: tuple[str, str],
    kept: str = "",
    flops: int | None = None,
    told: str = "",
) -> None:
    """Emits a `DecisionRecord` for one primitive; the caller has tested `events.decided.listeners`.

    `kept` is why a primitive runs as it was written although its rule says otherwise; `told` what else there is to say
    of it.
    """
    row = info(primitive)
    casts = [(str(dtype_of(g)), str(dtype_of(u))) for g, u in zip(given, used, strict=True) if dtype_of(g) is not None]
    events.decided(
        events.DecisionRecord(
            **decision.recorded(kept=bool(kept)),
            operation=decision.operation if policies.equivalent("jaxpr", primitive) else primitive,
            policy=policy.name,
            front="jax",
            given=tuple(before for before, _ in casts),
            used=tuple(after for _, after in casts),
            why=kept or told or (decision.why if decision.rule or row.kind is None else row.why),
            result=tuple(str(dtype_of(out)) for out in outs),
            location=place[1],
            module=place[0],
            shapes=tuple(_shape(value) for value in given if dtype_of(value) is not None),
            result_shapes=tuple(map(_shape, outs)),
            flops=flops,
        )
    )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in np.shape(value))


# ---- what the program itself says ------------------------------------------------------------------------------------
# A precision, a dtype or an algorithm of a contraction wins over the policy.

FEW_SUMMED: Final = "at most four terms are summed: a low dtype would round the operands and gain nothing"
"""Why a contraction whose results are short sums stays in the dtypes that its operands have."""

_OPEN: Final = (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)
"""Values of ``precision`` with which a program leaves the choice to the backend, hence to the policy."""


def asked_precision(eqn: Any) -> str:
    """Which precision or algorithm a contraction asks for, in words; empty if it asks for none."""
    precision = eqn.params.get("precision")
    for wish in precision if isinstance(precision, tuple) else (precision,):
        if wish not in _OPEN:
            if compat.in_lowering(eqn):  # torch's default precision, which no one asked for
                return ""
            named = isinstance(wish, lax.Precision)
            return f"the program asks for float32: precision {wish.name}" if named else f"the program asks for {wish}"
    return ""


def request(eqn: Any, low: Any) -> str:
    """Why a contraction runs in the dtypes that it was written with; empty if the program leaves them to the policy."""
    params, dtypes = eqn.params, [atom.aval.dtype for atom in eqn.invars[:2]]
    asked = asked_precision(eqn)
    is_algorithm = asked and isinstance(params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset)
    if asked and not (is_algorithm and all(dtype == low for dtype in dtypes)):
        return asked  # the low contraction is what algorithms do with operands that are low already
    for dtype in dtypes:
        if not is_castable(dtype):
            return f"an operand is {dtype}: the product would not be faster"
        if dtype not in (F32, low):
            return f"the program asks for {dtype} operands"
    wanted = params.get("preferred_element_type")
    if wanted is not None and wanted not in (F32, low):  # to NumPy, None is equal to float64
        return f"the program asks for a {wanted} result"
    return ""
