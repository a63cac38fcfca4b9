"""One rule, one meaning: small programs under every cast, on every front that this environment has.

Each program applies one operation to a low value (in JAX and StableHLO the result of a convolution) and, if it takes
two operands, to a float32 argument.  Programs are traced, not run, but for torch's eager CPU kernels.  torch_xla has a
separate environment, where `tests/torch_xla_engine/test_xla_regions.py` runs the same programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.rule_programs import (
    ALL,
    CASTS,
    COMPOSITES,
    LOW,
    PRODUCTS,
    PROGRAMS,
    WIDE,
    Program,
    expected,
    following,
    refused,
    run_in_torch,
    seen,
)
from jax import lax, nn

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.common import events
from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError
from xla_amp.jax import autocast
from xla_amp.policy.op_catalog import meanings
from xla_amp.tools.explain.on_pytorch import ExplainReport


@pytest.fixture(scope="module")
def report() -> Iterator[ExplainReport]:
    """One recording for all tests: to start one takes longer than to trace a program."""
    with xla_amp.explain() as report:
        yield report


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_that_no_front_can_give_is_refused_by_name(cast: Cast) -> None:
    fewest = {"fp32_inside": 30, "low_fp32_out": 2}
    assert len(following(cast)) >= fewest.get(cast, len(ALL))
    for program in ALL:
        if refused(program, cast):
            name = program.rule.partition(".")[0]
            with pytest.raises(PolicyError, match=f"'{cast}' for {name}.*Give it 'fp32' or 'low'"):
                policy.override({program.rule: cast})


@pytest.mark.parametrize("cast", CASTS)
def test_torch(cast: Cast, device: torch.device) -> None:
    for program, record in run_in_torch(cast, device, mixed_products=False):
        assert seen(record) == expected(program, cast, asks_result=True), program.rule


def functions(programs: list[Program]) -> tuple[Callable[..., Any], Any]:
    """(function, argument): a JAX function that runs each program on the result of a matrix product."""

    def function(x: Any) -> list[Any]:
        def convolved(h: Any) -> Any:
            return lax.conv_general_dilated(h[None, None], x[None, None, :3, :3], (1, 1), "SAME")[0, 0]

        results = []
        for number, program in enumerate(programs):
            h = convolved(x + number)
            results.append(program.jax(*(h, x)[: program.operands]))
            results.append(convolved(h))  # reads it low: nothing here is only compared or returned
        return results

    return function, jnp.full((8, 8), 0.5, jnp.float32)  # not weakly typed, as numbers are


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast != "ban"])
def test_jax(cast: Cast, report: ExplainReport) -> None:
    programs = [program for program in following(cast) if program.rule != "add"]  # the programs themselves add a number
    function, x = functions(programs)
    rules: dict[str, Cast] = {program.rule: cast for program in programs}
    report.records.clear()
    with policy.override(rules):
        jax.make_jaxpr(autocast(function))(x)
    records = [each for each in report.records if each.layer == "override"]
    for program, record in zip(programs, records, strict=True):
        in_parts = program in COMPOSITES  # cast as torch's kernel does it, which has the argument `dtype`
        computed, result = expected(program, cast, asks_result=in_parts)
        assert seen(record)[0] == computed, program.rule
        # A product that is a result gives its float32 accumulator, which no rule asks to round.
        assert seen(record)[1] == result or program.rule in PRODUCTS, program.rule


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast != "ban"])
def test_stablehlo(cast: Cast) -> None:
    programs = [each for each in following(cast) if each in PROGRAMS and each.stablehlo and each.rule != "add"]
    function, x = functions(programs)
    rules: dict[str, Cast] = {program.rule: cast for program in programs}
    report = stablehlo.autocast(jax.jit(function).lower(x), rules=rules).report
    decided = [each for each in report.operations if each.layer == "context"]
    for program, decision in zip(programs, decided, strict=True):
        assert decision.operation == program.stablehlo
        computed, result = expected(program, cast, asks_result=False)
        assert decision.after == computed, program.rule
        # A product may give its float32 accumulator, which no rule asks to round.
        assert decision.result == (result,) or program.rule in PRODUCTS, program.rule


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast not in ("ban", "low_fp32_out")])
def test_stablehlo_in_parts(cast: Cast) -> None:
    programs = [each for each in following(cast) if each in COMPOSITES and each.stablehlo]
    function, x = functions(programs)
    lowered = jax.jit(function).lower(x)
    for program in programs:
        report = stablehlo.autocast(lowered, rules={program.rule: cast}, strict=True).report
        found = {(each.operation, each.after, *each.result) for each in report.operations if each.layer == "context"}
        assert found == {(program.stablehlo, *expected(program, cast, asks_result=False))}


@pytest.mark.parametrize("program", [each for each in COMPOSITES if not each.stablehlo], ids=lambda p: p.rule)
def test_stablehlo_refuses_by_name_what_it_cannot_see(program: Program) -> None:
    function, x = functions([program])
    with pytest.raises(PolicyError, match=rf"{program.rule} = low .*contain only its parts.*name the parts"):
        stablehlo.autocast(jax.jit(function).lower(x), rules={program.rule: "low"})


SCOPED: dict[str, Cast] = {"mm": "fp32", "log_softmax": "low"}
"""Operations, and a cast that the built-in rules do not give them."""


class _Whole(torch.nn.Module):
    """The same operations outside of the module `part` and in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.part = function, torch.nn.Module()
        self.part.forward = function

    def forward(self, *operands: torch.Tensor) -> Any:
        return self.function(*operands), self.part(*operands)


@pytest.mark.parametrize("rule", SCOPED)
@pytest.mark.parametrize("pattern", ["module:*.part", "*/part/{}"])
def test_a_rule_for_a_module_reaches_it_on_every_front(rule: str, pattern: str, report: ExplainReport) -> None:
    (program,) = [each for each in ALL if each.rule == rule]
    rules: dict[str, Cast] = {pattern.format(rule): SCOPED[rule]}

    def function(x: Any) -> Any:
        h = lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")[0, 0]
        with jax.named_scope("outside"):
            outside = program.jax(*(h, x)[: program.operands])
        with jax.named_scope("part"):
            return outside, program.jax(*(h, x)[: program.operands])

    def in_torch(place: torch.device) -> None:
        y = torch.full((8, 8), 0.5, device=place)
        with xla_amp.autocast(place, policy="tpu", rules=rules, strict=True):
            _Whole(program.torch)(*(y.bfloat16(), y)[: program.operands])

    x = jnp.full((8, 8), 0.5)
    fronts: dict[str, Callable[[], Any]] = {
        "cpu": lambda: in_torch(torch.device("cpu")),
        "lazy": lambda: in_torch(xla_amp.xla_device()),
        "jax": lambda: jax.make_jaxpr(autocast(function, rules=rules, strict=True))(x),
        "stablehlo": lambda: stablehlo.autocast(jax.jit(function).lower(x), rules=rules, strict=True),
    }
    for front, run in fronts.items():
        report.records.clear()
        run()
        records = [each for each in report.records if each.layer == "context"]
        assert {each.module.partition(".")[0] for each in records} == {"part"}, front
        assert {used for each in records for used in each.used} == {WIDE if rule == "mm" else LOW}, front


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.rule)
def test_a_ban_stops_every_front(program: Program) -> None:
    x = jnp.full((8, 8), 0.5)
    function = jax.jit(lambda h, y: program.jax(*(h, y)[: program.operands]))
    rules: dict[str, Cast] = {program.rule: "ban"}
    named = "" if program in PROGRAMS else program.rule
    with policy.override(rules), pytest.raises(PolicyError, match=f"{named}.*bans it"):
        jax.make_jaxpr(autocast(function))(x, x)
    if program.stablehlo:
        with pytest.raises(PolicyError, match=f"{named}.*bans it"):
            stablehlo.autocast(function.lower(x, x), rules=rules)


@pytest.mark.parametrize(
    ("names", "vocabulary", "native"),
    [
        (("linear", "mm", "addmm", "mv", "einsum", "matmul", "dot_general"), "jaxpr", "dot_general"),
        (("linear", "mm", "addmm", "mv", "einsum", "matmul", "stablehlo.dot_general"), "stablehlo", "dot_general"),
        (("bmm", "baddbmm", "einsum", "dot_general"), "stablehlo", "dot_general.bmm"),
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
            assert policy.resolve("cpu").decision(operation, None, tuple(same)).cast == "fp32_append", name


def test_a_product_with_batch_axes_is_no_linear(report: ExplainReport) -> None:
    def both(x: Any) -> Any:
        return lax.batch_matmul(x, x), lax.dot(x[0], x[1])

    x = jnp.full((2, 8, 8), 0.5)
    lowered = jax.jit(both).lower(x)
    for rules, batched, plain in (
        ({"linear": "fp32"}, LOW, WIDE),
        ({"bmm": "fp32"}, WIDE, LOW),
        ({"linear": "fp32", "bmm": "keep"}, WIDE, WIDE),
        ({"matmul": "fp32"}, WIDE, WIDE),
    ):
        found = stablehlo.autocast(lowered, rules=rules).report.operations
        assert [each.after for each in found if each.operation == "dot_general"] == [batched, plain]
        report.records.clear()
        with policy.override(rules):
            jax.make_jaxpr(autocast(both))(x)
        products = [each for each in report.records if each.operation in ("bmm", "matmul")]
        assert [each.used[0] for each in products] == [batched, plain]


def test_names_that_a_front_cannot_tell_apart_must_agree() -> None:
    x = jnp.full((8, 8), 0.5)
    with (
        policy.override({"linear": "fp32", "mm": "low"}),
        pytest.raises(PolicyError, match=r"the same as .*linear.*rules of one layer that disagree: .*linear = fp32"),
    ):
        jax.make_jaxpr(autocast(jnp.matmul))(x, x)


# ---- operations that a jaxpr contains only in parts ------------------------------------------------------------------

X = jnp.linspace(-3, 3, 32).reshape(4, 8)
W = jnp.cos(jnp.arange(64.0)).reshape(8, 8)


@pytest.mark.parametrize("name", ["softmax", "gelu", "relu"])
def test_a_composite_computes_as_torchs_kernel(name: str) -> None:
    """One with sums, one without, one that only compares."""
    (program,) = [each for each in COMPOSITES if each.rule == name]

    def after_a_product(x: Any, w: Any) -> Any:
        return program.jax(x @ w)

    product = torch.tensor(np.asarray(X)).bfloat16() @ torch.tensor(np.asarray(W)).bfloat16()
    cases: list[tuple[Any, Any, str]] = [("low", torch.bfloat16, "bfloat16"), ("fp32", torch.float32, "float32")]
    if name == "softmax":
        cases += [(cast, torch.bfloat16, "bfloat16") for cast in ("keep", "promote")]
    for cast, given, result in cases:
        with policy.override({name: cast}), events.capture() as records:
            got = jax.jit(autocast(after_a_product, strict=True))(X, W)
        (record,) = [each for each in records if each.layer == "override"]
        # A product that only a maximum reads on its way to the result keeps its float32 sums.
        read = "float32" if name == "relu" else "bfloat16"
        assert (record.cast, record.given[0], record.result) == (cast, read, (result,))
        wanted = program.torch(product.to(given))
        # JAX rounds the product after summing in another order, and the two libraries' functions differ by an ulp.
        tolerance = 0.02 if result == "bfloat16" else 0.01
        np.testing.assert_allclose(got, wanted.float().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["relu6", "softplus", "elu", "leaky_relu", "mish"])
def test_a_rule_finds_the_function(name: str) -> None:
    with policy.override({name: "low"}), events.capture() as records:
        jax.make_jaxpr(autocast(getattr(nn, name), strict=True))(X)
    (record,) = [each for each in records if each.layer == "override"]
    assert record.result == ("bfloat16",)


def test_a_rule_for_a_part_does_not_reach_into_a_ruled_composite() -> None:
    with policy.override({"softmax": "fp32", "exp": "low"}), events.capture() as records:
        jax.make_jaxpr(autocast(lambda x: jnp.exp(nn.softmax(x)), strict=True))(X)
    decided = [(each.operation, each.used) for each in records if each.layer == "override"]
    assert decided == [("softmax.int", ("float32",)), ("exp", ("bfloat16",))]


def test_without_a_rule_the_parts_are_decided_as_before() -> None:
    with events.capture() as records:
        jax.make_jaxpr(autocast(nn.softmax))(X)
    assert "exp" in [each.operation for each in records]
    with policy.override(exp="low"), events.capture() as records:
        jax.make_jaxpr(autocast(nn.softmax, strict=True))(X)
    assert [each.operation for each in records if each.layer == "override"] == ["exp"]
