"""One rule, one meaning: small programs under every cast, on every front that this environment has.

Each program applies one operation to a low value (in JAX and StableHLO the result of a convolution) and, if it takes
two operands, to a float32 argument.  Programs are traced, not run, but for torch's eager CPU kernels.  torch_xla has a
separate environment; its engine casts with the kernels of the lazy device (`tests/torch_xla_engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.errors import PolicyError
from xla_amp.events import DecisionRecord
from xla_amp.jax import autocast
from xla_amp.policy.cast_dtypes import cast_dtypes
from xla_amp.policy.op_catalog import meanings
from xla_amp.types import Cast

LOW, WIDE = "bfloat16", "float32"
CASTS: tuple[Cast, ...] = ("low", "fp32", "promote", "keep", "fp32_out", "ban")


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
    Program("asin", torch.asin, lax.asin, "chlo.asin", 1),
    Program("cosh", torch.cosh, lax.cosh, "chlo.cosh", 1),
    Program("sinh", torch.sinh, lax.sinh, "chlo.sinh", 1),
    Program("lgamma", torch.lgamma, lax.lgamma, "chlo.lgamma", 1),
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

_NORM = nn.LayerNorm(use_bias=False, use_scale=False)
COMPOSITES = [
    Program("softmax", lambda h: torch.softmax(h, -1), jax.nn.softmax, "softmax", 1),
    Program("log_softmax", lambda h: torch.log_softmax(h, -1), jax.nn.log_softmax, "log_softmax", 1),
    Program("layer_norm", lambda h: F.layer_norm(h, (4,)), lambda h: _NORM.apply({}, h), "layer_norm", 1),
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


def test_the_table_has_sixty_programs() -> None:
    assert len(set(NAMES)) == len(ALL) == 60


def expected(program: Program, cast: Cast, *, asks_result: bool) -> tuple[str, str]:
    """The dtype that the operation computes in, and that of its result."""
    given = (LOW, WIDE)[: program.operands]
    used, result = cast_dtypes(cast, given, LOW, WIDE, asks_result=asks_result)
    computed = WIDE if WIDE in used else LOW
    return computed, result or computed


def seen(record: DecisionRecord) -> tuple[str, str]:
    """dtype of the computation and of the result."""
    return (WIDE if WIDE in record.used else LOW), record.result[0]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_torch(cast: Cast, device: str) -> None:
    place = xla_amp.xla_device() if device == "lazy" else torch.device(device)
    y = torch.full((4, 4), 0.5, device=place)
    low = y.bfloat16()
    rules = policy.override(dict.fromkeys(NAMES, cast))
    with rules, xla_amp.autocast(place, policy="tpu"), xla_amp.explain() as report:
        for program in ALL:
            name = program.rule.partition(".")[0]
            operands = (low, y)[: program.operands]
            if cast == "ban":
                with pytest.raises(RuntimeError, match=name):
                    program.torch(*operands)
            elif cast == "fp32_out" and name not in TAKES_DTYPE:
                with pytest.raises(PolicyError, match=f"'fp32_out' for {name}.*give it 'fp32'"):
                    program.torch(*operands)
            elif cast == "keep" and name in PRODUCTS:
                with pytest.raises(RuntimeError, match=r"type|dtype"):  # torch's own error
                    program.torch(*operands)
            else:
                report.records.clear()
                program.torch(*operands)
                (record,) = [each for each in report.records if each.layer == "override"]
                assert record.cast == cast
                assert seen(record) == expected(program, cast, asks_result=True), name


def functions(programs: list[Program]) -> tuple[Callable[..., Any], Any]:
    """(function, argument): a JAX function that runs each program on the result of a matrix product."""

    def function(x: Any) -> list[Any]:
        results = []
        for number, program in enumerate(programs):
            h = lax.conv_general_dilated(x[None, None] + number, x[None, None, :1, :1], (1, 1), "SAME")[0, 0]
            results.append(program.jax(*(h, x)[: program.operands]))
        return results

    return function, jnp.full((4, 4), 0.5)


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast != "ban"])
def test_jax(cast: Cast) -> None:
    programs = [program for program in ALL if program.rule != "add"]  # the programs themselves add a number
    function, x = functions(programs)
    rules: dict[str, Cast] = {program.rule: cast for program in programs}
    with xla_amp.explain() as report, policy.override(rules):
        jax.make_jaxpr(autocast(function))(x)
    records = [each for each in report.records if each.layer == "override"]
    for program, record in zip(programs, records, strict=True):
        in_parts = program in COMPOSITES  # cast as torch's kernel does it, which has the argument `dtype`
        assert seen(record) == expected(program, cast, asks_result=in_parts), program.rule


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast != "ban"])
def test_stablehlo(cast: Cast) -> None:
    programs = [program for program in PROGRAMS if program.stablehlo and program.rule != "add"]
    function, x = functions(programs)
    rules: dict[str, Cast] = {program.rule: cast for program in programs}
    report = stablehlo.autocast(jax.jit(function).lower(x), rules=rules).report
    decided = [each for each in report.operations if each.layer == "context"]
    for program, decision in zip(programs, decided, strict=True):
        assert decision.operation == program.stablehlo
        computed, result = expected(program, cast, asks_result=False)
        assert decision.after == computed, program.rule
        # A product may give its float32 accumulator, which no rule asks to round.
        assert decision.result == result or program.rule in PRODUCTS, program.rule


@pytest.mark.parametrize("cast", ["low", "fp32", "fp32_out"])
def test_stablehlo_in_parts(cast: Cast) -> None:
    programs = [program for program in COMPOSITES if program.stablehlo]
    function, x = functions(programs)
    lowered = jax.jit(function).lower(x)
    for program in programs:
        report = stablehlo.autocast(lowered, rules={program.rule: cast}, strict=True).report
        found = {(each.operation, each.after, each.result) for each in report.operations if each.layer == "context"}
        assert found == {(program.stablehlo, *expected(program, cast, asks_result=False))}


@pytest.mark.parametrize("program", [each for each in COMPOSITES if not each.stablehlo], ids=lambda p: p.rule)
def test_stablehlo_refuses_by_name_what_it_cannot_see(program: Program) -> None:
    function, x = functions([program])
    with pytest.raises(PolicyError, match=rf"{program.rule} = low .*contain only its parts.*name the parts"):
        stablehlo.autocast(jax.jit(function).lower(x), rules={program.rule: "low"})


SCOPED = [each for each in ALL if each.rule in ("exp", "mm", "softmax", "layer_norm")]


class _Part(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *operands: torch.Tensor) -> Any:
        return self.program.torch(*operands)


class _Whole(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.outside, self.part = _Part(program), _Part(program)

    def forward(self, *operands: torch.Tensor) -> Any:
        return self.outside(*operands), self.part(*operands)


@pytest.mark.parametrize("program", SCOPED, ids=lambda program: program.rule)
@pytest.mark.parametrize("pattern", ["module:*.part", "*/part/{}"])
def test_a_rule_for_a_module_reaches_it_on_every_front(program: Program, pattern: str) -> None:
    casts: list[Cast] = ["low", "fp32"]
    for cast in casts:
        rules: dict[str, Cast] = {pattern.format(program.rule): cast}
        found: dict[str, Any] = {}
        for name in ("cpu", "lazy"):
            place = xla_amp.xla_device() if name == "lazy" else torch.device(name)
            y = torch.full((4, 4), 0.5, device=place)
            with xla_amp.explain() as report, xla_amp.autocast(place, policy="tpu", rules=rules, strict=True):
                _Whole(program)(*(y.bfloat16(), y)[: program.operands])
            found[name] = [each for each in report.records if each.layer == "context"]

        def function(x: Any) -> Any:
            h = lax.conv_general_dilated(x[None, None], x[None, None, :1, :1], (1, 1), "SAME")[0, 0]
            with jax.named_scope("outside"):
                outside = program.jax(*(h, x)[: program.operands])
            with jax.named_scope("part"):
                return outside, program.jax(*(h, x)[: program.operands])

        x = jnp.full((4, 4), 0.5)
        with xla_amp.explain() as report:
            jax.make_jaxpr(autocast(function, rules=rules, strict=True))(x)
        found["jax"] = [each for each in report.records if each.layer == "context"]
        with xla_amp.explain() as report:
            stablehlo.autocast(jax.jit(function).lower(x), rules=rules, strict=True)
        found["stablehlo"] = [each for each in report.records if each.layer == "context"]
        wanted = WIDE if cast == "fp32" else LOW
        for front, records in found.items():
            assert {each.module.partition(".")[0] for each in records} == {"part"}, front
            assert {used for each in records for used in each.used} == {wanted}, front


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.stablehlo], ids=lambda program: program.rule)
def test_a_ban_stops_every_front(program: Program) -> None:
    x = jnp.full((4, 4), 0.5)
    function = jax.jit(lambda h, y: program.jax(*(h, y)[: program.operands]))
    rules: dict[str, Cast] = {program.rule: "ban"}
    with policy.override(rules), pytest.raises(PolicyError, match="bans it"):
        jax.make_jaxpr(autocast(function))(x, x)
    with pytest.raises(PolicyError, match="bans it"):
        stablehlo.autocast(function.lower(x, x), rules=rules)


@pytest.mark.parametrize(
    ("names", "vocabulary", "native"),
    [
        (("linear", "mm", "addmm", "mv", "einsum", "matmul", "dot_general"), "jaxpr", "dot_general"),
        (("linear", "mm", "addmm", "mv", "einsum", "matmul", "stablehlo.dot_general"), "stablehlo", "dot_general"),
        (("bmm", "baddbmm", "einsum", "dot_general"), "stablehlo", "dot_general.batched"),
        (("outer", "ger", "dot_general"), "stablehlo", "dot_general.outer"),
        (("conv1d", "conv2d", "conv_transpose2d", "convolution"), "jaxpr", "conv_general_dilated"),
        (("conv2d", "conv_general_dilated"), "stablehlo", "convolution"),
        (("subtract", "sub", "rsub", "stablehlo.subtract"), "jaxpr", "sub"),
        (("exp", "exponential", "stablehlo.exponential"), "jaxpr", "exp"),
        (("max", "maximum", "stablehlo.maximum"), "stablehlo", "maximum"),
        (("sum", "reduce_sum", "reduce.add", "reduce"), "stablehlo", "reduce.add"),
        (("scatter_add", "scatter-add"), "jaxpr", "scatter-add"),
        (("class:contraction", "mat*"), "jaxpr", "dot_general"),
    ],
)
def test_one_operation_has_names_in_three_vocabularies(names: Any, vocabulary: Any, native: str) -> None:
    operation, *same = meanings(vocabulary, native)
    for name in names:
        with policy.override({name: "fp32_append"}):
            assert policy.resolve("cpu").decide(operation, None, tuple(same)).cast == "fp32_append", name


def test_a_product_with_batch_axes_is_no_linear() -> None:
    def both(x: Any) -> Any:
        return lax.batch_matmul(x, x), lax.dot(x[0], x[1])

    x = jnp.full((2, 4, 4), 0.5)
    lowered = jax.jit(both).lower(x)
    for rules, batched, plain in (
        ({"linear": "fp32"}, LOW, WIDE),
        ({"bmm": "fp32"}, WIDE, LOW),
        ({"linear": "fp32", "bmm": "keep"}, WIDE, WIDE),
        ({"matmul": "fp32"}, WIDE, WIDE),
    ):
        report = stablehlo.autocast(lowered, rules=rules).report
        assert [each.after for each in report.operations if each.operation == "dot_general"] == [batched, plain]
        with policy.override(rules), xla_amp.explain() as records:
            jax.make_jaxpr(autocast(both))(x)
        products = [each for each in records.records if each.operation in ("bmm", "matmul")]
        assert [each.used[0] for each in products] == [batched, plain]


def test_names_that_a_front_cannot_tell_apart_must_agree() -> None:
    x = jnp.full((4, 4), 0.5)
    with (
        policy.override({"linear": "fp32", "mm": "low"}),
        pytest.raises(PolicyError, match=r"the same as .*linear.*rules of one layer that disagree: .*linear = fp32"),
    ):
        jax.make_jaxpr(autocast(jnp.matmul))(x, x)


def test_errors_name_the_nearest_of_all_vocabularies() -> None:
    for wrong, right in (("dot_genral", "dot_general"), ("exponentail", "exponential"), ("sofmax", "softmax")):
        with pytest.raises(PolicyError, match=f"unknown operation '{wrong}'; nearest: {right}"):
            policy.override({wrong: "fp32"})
    with pytest.raises(PolicyError, match="takes no rule"):
        policy.override({"broadcast_in_dim": "fp32"})
