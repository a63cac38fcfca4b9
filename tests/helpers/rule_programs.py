"""Small programs of one operation in torch, JAX and StableHLO, and the dtypes that a cast gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import xla_amp
from xla_amp import policy
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import CASTS as CASTS
from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError
from xla_amp.policy import op_catalog
from xla_amp.policy.cast_dtypes import cast_dtypes

LOW, WIDE = "bfloat16", "float32"

CHLO_UNTIL_0_12 = "chlo.{}" if jax.__version_info__ < (0, 12) else ""
"""JAX 0.12 writes these operations in parts, except for GPUs."""

UNSHARDED: dict[str, Any] = {"out_sharding": None}


class Program(NamedTuple):
    """One operation in three vocabularies."""

    rule: str
    """The name in the rule."""
    torch: Callable[..., Any]
    jax: Callable[..., Any]
    stablehlo: str
    """Name in StableHLO; empty if StableHLO has no such operation."""
    operands: int = 2


PROGRAMS = [
    Program("add", torch.add, lax.add, "add"),
    Program("sub", torch.sub, lax.sub, "subtract"),
    Program("mul", torch.mul, lax.mul, "multiply"),
    Program("div", torch.div, lax.div, "divide"),
    Program("atan2", torch.atan2, lax.atan2, "atan2"),
    Program("pow.Tensor_Tensor", torch.pow, lax.pow, "power"),
    Program("fmod", torch.fmod, lax.rem, "remainder"),
    Program("exp", torch.exp, lax.exp, "exponential", 1),
    Program("expm1", torch.expm1, lax.expm1, "exponential_minus_one", 1),
    Program("log", torch.log, lax.log, "log", 1),
    Program("log1p", torch.log1p, lax.log1p, "log_plus_one", 1),
    Program("tanh", torch.tanh, lax.tanh, "tanh", 1),
    Program("sigmoid", torch.sigmoid, lax.logistic, "", 1),
    Program("sin", torch.sin, lax.sin, "sine", 1),
    Program("cos", torch.cos, lax.cos, "cosine", 1),
    Program("tan", torch.tan, lax.tan, "tan", 1),
    Program("sqrt", torch.sqrt, lax.sqrt, "sqrt", 1),
    Program("rsqrt", torch.rsqrt, lax.rsqrt, "rsqrt", 1),
    Program("erf", torch.erf, lax.erf, "chlo.erf", 1),
    Program("erfc", torch.erfc, lax.erfc, "chlo.erfc", 1),
    Program("acos", torch.acos, lax.acos, "chlo.acos", 1),
    Program("asin", torch.asin, lax.asin, CHLO_UNTIL_0_12.format("asin"), 1),
    Program("cosh", torch.cosh, lax.cosh, "chlo.cosh", 1),
    Program("sinh", torch.sinh, lax.sinh, "chlo.sinh", 1),
    Program("lgamma", torch.lgamma, lax.lgamma, CHLO_UNTIL_0_12.format("lgamma"), 1),
    Program("digamma", torch.digamma, lax.digamma, "chlo.digamma", 1),
    Program("maximum", torch.maximum, lax.max, ""),
    Program("minimum", torch.minimum, lax.min, ""),
    Program("abs", torch.abs, lax.abs, "", 1),
    Program("neg", torch.neg, lax.neg, "", 1),
    Program("flip", lambda h: torch.flip(h, (0,)), lambda h: lax.rev(h, (0,)), "", 1),
    Program("mm", torch.mm, lax.dot, "dot_general"),
    Program(
        "bmm",
        lambda h, y: torch.bmm(h[None], y[None]),
        lambda h, y: lax.batch_matmul(h[None], y[None]),
        "dot_general",
    ),
    Program("sum", lambda h: torch.sum(h, 0), lambda h: lax.reduce_sum_p.bind(h, axes=(0,), **UNSHARDED), "", 1),
    Program("amax", lambda h: torch.amax(h, 0), lambda h: lax.reduce_max_p.bind(h, axes=(0,), **UNSHARDED), "", 1),
    Program("cumsum", lambda h: torch.cumsum(h, 0), lambda h: lax.cumsum(h, 0), "", 1),
    Program("cat", lambda h, y: torch.cat([h, y]), lambda h, y: lax.concatenate([h, y], 0), ""),
    Program("acosh", torch.acosh, lax.acosh, "chlo.acosh", 1),
    Program("asinh", torch.asinh, lax.asinh, "chlo.asinh", 1),
    Program("atanh", torch.atanh, lax.atanh, "chlo.atanh", 1),
    Program("atan", torch.atan, lax.atan, "chlo.atan", 1),
    Program("erfinv", torch.erfinv, lax.erf_inv, "chlo.erf_inv", 1),
    Program("exp2", torch.exp2, lax.exp2, "", 1),
    Program("floor", torch.floor, lax.floor, "", 1),
    Program("ceil", torch.ceil, lax.ceil, "", 1),
    Program("sign", torch.sign, lax.sign, "", 1),
    Program("special_i0e", torch.special.i0e, lax.bessel_i0e, "", 1),
    Program("special_i1e", torch.special.i1e, lax.bessel_i1e, "", 1),
    Program("amin", lambda h: torch.amin(h, 0), lambda h: lax.reduce_min_p.bind(h, axes=(0,), **UNSHARDED), "", 1),
    Program("prod", lambda h: torch.prod(h, 0), lambda h: lax.reduce_prod_p.bind(h, axes=(0,), **UNSHARDED), "", 1),
    Program("cumprod", lambda h: torch.cumprod(h, 0), lambda h: lax.cumprod(h, 0), "", 1),
    Program("logcumsumexp", lambda h: torch.logcumsumexp(h, 0), lambda h: lax.cumlogsumexp(h, 0), "", 1),
    Program("igamma", torch.igamma, lax.igamma, ""),
]  # fmt: skip


def _layer_norm(h: Any) -> Any:
    nn = pytest.importorskip("flax.linen")  # which torch_xla's environment and the extra `dev` have not
    return nn.LayerNorm(use_bias=False, use_scale=False).apply({}, h)


COMPOSITES = [
    Program("softmax", lambda h: torch.softmax(h, -1), jax.nn.softmax, "", 1),
    Program("log_softmax", lambda h: torch.log_softmax(h, -1), jax.nn.log_softmax, "log_softmax", 1),
    Program("layer_norm", lambda h: F.layer_norm(h, (4,)), _layer_norm, "layer_norm", 1),
    Program("silu", F.silu, jax.nn.silu, "silu", 1),
    Program("relu", F.relu, jax.nn.relu, "relu", 1),
    Program("gelu", F.gelu, jax.nn.gelu, "", 1),
    Program("logsumexp", lambda h: torch.logsumexp(h, -1), lambda h: jax.nn.logsumexp(h, -1), "", 1),
]
"""Operations that JAX and StableHLO write in parts; without a name, StableHLO cannot tell that they are one."""

ALL = [*PROGRAMS, *COMPOSITES]
NAMES = [program.rule for program in ALL]
PRODUCTS = ("mm", "bmm")
TAKES_DTYPE = ("sum", "cumsum", "prod", "cumprod", "softmax", "log_softmax")


def expected(program: Program, cast: Cast, *, asks_result: bool) -> tuple[str, str]:
    """The dtype that the operation computes in, and that of its result."""
    given = (LOW, WIDE)[: program.operands]
    used, result = cast_dtypes(cast, given, LOW, WIDE, asks_result=asks_result)
    computed = WIDE if WIDE in used else LOW
    return computed, result or computed


def seen(record: DecisionRecord) -> tuple[str, str]:
    """dtype of the computation and of the result."""
    return (WIDE if WIDE in record.used else LOW), record.result[0]


def refused(program: Program, cast: Cast) -> bool:
    """Whether no front can give the operation the cast: the rule itself is an error."""
    return bool(op_catalog.unfit(op_catalog.named(program.rule), cast))


def following(cast: Cast) -> list[Program]:
    """The programs whose rule may have the cast; the others are refused by `xla_amp.policy`."""
    return [program for program in ALL if not refused(program, cast)]


def refused_by_torch(program: Program, cast: Cast) -> str:
    """The error of a cast that torch has no kernel for, as a pattern; empty if it has."""
    name = program.rule.partition(".")[0]
    if cast in ("fp32_out", "fp32_append") and not (cast == "fp32_out" and name in TAKES_DTYPE):
        return f"'{cast}' for {name}.*give it 'fp32'"
    return f"'low_fp32_out' for {name}.*JAX and StableHLO follow" if cast == "low_fp32_out" else ""


def run_in_torch(cast: Cast, place: torch.device, *, mixed_products: bool) -> Iterator[tuple[Program, DecisionRecord]]:
    """Runs the programs with that cast; each that runs, with the decision on it.  The others must raise by name.

    Products of two dtypes, too, where the device has them (`mixed_products`); torch's kernels raise.
    """
    y = torch.full((4, 4), 0.5).to(place)
    low = y.bfloat16()
    programs = following(cast)
    rules = policy.override({program.rule: cast for program in programs})
    with rules, xla_amp.autocast(place, policy="tpu"), xla_amp.explain() as report:
        for program in programs:
            name = program.rule.partition(".")[0]
            operands = (low, y)[: program.operands]
            if cast == "ban":
                with pytest.raises(RuntimeError, match=name):
                    program.torch(*operands)
            elif error := refused_by_torch(program, cast):
                with pytest.raises(PolicyError, match=error):
                    program.torch(*operands)
            elif cast == "keep" and name in PRODUCTS and not mixed_products:
                with pytest.raises(RuntimeError, match=r"type|dtype"):  # torch's own error
                    program.torch(*operands)
            else:
                report.records.clear()
                program.torch(*operands)
                (record,) = [each for each in report.records if each.layer == "override"]
                assert record.cast == cast
                yield program, record
