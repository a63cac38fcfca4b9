"""Malformed and ineffective policies, in Python, in a file and on the command line: one message each, with the fix.

Also overrides around and inside of `jax.jit`, and ``rules=`` of the fronts.
"""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.cli import main
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast

# Name, cast, and what the message says: what came, and what to type instead.
MALFORMED = [
    ("sofmax", "fp32", "unknown operation 'sofmax'; nearest: softmax"),
    ("dot_genral", "fp32", "unknown operation 'dot_genral'; nearest: dot_general"),
    ("softmax.intt", "fp32", "unknown operation 'softmax.intt'; nearest: softmax.int"),
    ("torch.mm", "low", "unknown operation 'torch.mm': write it without the library, 'mm'"),
    ("nn.Linear", "low", "unknown operation 'nn.Linear': write it without the library, 'linear'"),
    ("BatchNorm2d", "keep", "unknown operation 'BatchNorm2d': its ATen name is batch_norm"),
    ("mm,bmm", "low", "unknown operation 'mm,bmm': it holds several names; write a rule for each: 'mm', 'bmm'"),
    ("lin_*", "low", "unknown operation 'lin_*': no operation matches it (a glob of *, ? and [...], e.g. 'linalg_*')"),
    ("class:reductions", "low", "unknown operation class 'class:reductions'; did you mean 'class:reduction'?"),
    ("module:", "low", "'module:' names no module; write its path, e.g. \"module:*.attention\""),
    ("module:*.head", "fp32_inside", 'end the pattern in one that can, e.g. "module:*.head.softmax", or give it'),
    ("transpose", "low", "operation 'transpose' takes no rule: it shares memory with its operand"),
    ("broadcast_in_dim", "fp32", "takes no rule"),
    ("add_", "low", "operation 'add_' never autocasts: only out-of-place forward operations do, e.g. 'add'"),
    (
        "mylib::",
        "low",
        "unknown operation 'mylib::': write namespace and name of the operator, e.g. 'mylib::attention'",
    ),
    ("", "fp32", "a rule without a name; write the operation, e.g. 'softmax'"),
    ("mm", "float32", "unknown cast 'float32' for mm; did you mean 'fp32'? Casts: low, fp32,"),
    ("mm", "fp8", "unknown cast 'fp8' for mm; did you mean 'low'?"),
    ("mm", "fp16", "unknown cast 'fp16' for mm; did you mean 'low'?"),
    ("mm", "fp32_inside", "cast 'fp32_inside' for mm: it is for operations of one tensor"),
    ("softmax", "low_fp32_out", "cast 'low_fp32_out' for softmax.int: it is for matrix products and convolutions"),
]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("modules") / "in.mlir"
    path.write_text(jax.jit(step).lower(X, W).as_text())
    return path


X, W = jnp.full((4, 8), 0.1), jnp.full((8, 8), 0.3)


def step(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w).sum(0)


@pytest.mark.parametrize(("name", "cast", "message"), MALFORMED)
def test_a_malformed_rule_has_one_message(
    name: str, cast: Any, message: str, module: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out.mlir"
    file.write_text(f'extends = "tpu"\n[[rule]]\noperations = ["{name}"]\ncast = "{cast}"\n')
    with pytest.raises(PolicyError) as in_python:
        policy.override({name: cast})
    with pytest.raises(PolicyError) as in_a_file:
        policy.load(file)
    said = [str(in_python.value), str(in_a_file.value)]
    assert f"{file}:2 (rule 1)" in said[1]
    for arguments in (["--policy", str(file)], ["--rule", f"{name}={cast}"]):
        if arguments == ["--rule", "=fp32"] or "," in arguments[1]:
            continue  # refused by the parser: below
        assert main(["convert", str(module), "-o", str(out), *arguments]) == 2
        said.append(capsys.readouterr().err)
    assert len(said) == 3 or said[3].startswith(f"xla-amp: --rule '{name}'")
    assert all(message in each and len(each.strip().splitlines()) == 1 for each in said), said
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "'softmax': expected PATTERN=CAST, e.g. tanh=fp32, with one of low, fp32,"),
        (["=fp32"], "'=fp32': expected PATTERN=CAST"),
        (["mm=low;tanh=low"], "'mm=low;tanh=low': expected one rule, PATTERN=CAST; repeat --rule for another"),
        (["mm=low", "mm=fp32"], "--rule names 'mm' twice, = low and = fp32; keep one"),
    ],
)
def test_malformed_rules_of_the_command(
    arguments: list[str], message: str, module: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    given = [word for each in arguments for word in ("--rule", each)]
    try:
        code: Any = main(["convert", str(module), "-o", str(tmp_path / "out.mlir"), *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def in_jax(rules: Any, strict: bool = False) -> None:
    with policy.override(rules):
        jax.make_jaxpr(autocast(step, strict=strict))(X, W)


def in_stablehlo(rules: Any, strict: bool = False) -> None:
    stablehlo.autocast(jax.jit(step).lower(X, W), rules=rules, strict=strict)


def in_torch(rules: Any, strict: bool = False) -> None:
    with policy.override(rules, strict=strict), xla_amp.autocast("cpu", policy="tpu"):
        torch.tanh(torch.mm(torch.ones(2, 2), torch.ones(2, 2)))


def in_region(rules: Any, strict: bool = False) -> None:
    with xla_amp.autocast("cpu", rules=rules, strict=strict):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def precise(rules: Any, strict: bool = False) -> None:
    with policy.override(rules):
        jax.make_jaxpr(autocast(lambda x, w: jnp.matmul(x, w, precision="highest"), strict=strict))(X, W)


# Front, rules of which one has no effect, and the line about it.  An error where no program of the front can follow it.
INEFFECTIVE: list[tuple[Callable[..., None], Any, type[Exception], str]] = [
    (in_jax, {"sin": "fp32", "mm": "low"}, RuleWarning, r"sin = fp32 .*: it matched no operation of the program"),
    (in_jax, {"bmm": "fp32"}, RuleWarning, r"bmm = fp32 .*: it matched no operation"),
    (in_jax, {"fft_*": "fp32"}, RuleWarning, r"fft_\* = fp32 .*: it matched no operation"),
    (in_jax, {"module:*.head": "fp32"}, RuleWarning, r"module:\*\.head = fp32 .*: it matched no operation"),
    (in_jax, {"softmax": "fp32_inside"}, RuleWarning, r"softmax = fp32_inside .*: it matched no operation"),
    (in_jax, {"mse_loss": "low"}, PolicyError, r"mse_loss = low .*: JAX programs contain only its parts"),
    (in_jax, {"mylib::attention": "low"}, PolicyError, r"mylib::attention = low .*operator of a torch library"),
    (precise, {"mm": "low_fp32_out"}, RuleWarning, r"mm = low_fp32_out .*: .*precision"),
    (in_stablehlo, {"exponential": "fp32_inside"}, RuleWarning, r"exponential = fp32_inside .*matched no operation"),
    (in_stablehlo, {"sum": "low"}, RuleWarning, r"sum = low .*: reduce.add stays float32: a running sum"),
    (in_stablehlo, {"conv2d": "low_fp32_out"}, RuleWarning, r"conv2d = low_fp32_out .*: it matched no operation"),
    (in_stablehlo, {"fft_*": "low"}, RuleWarning, r"fft_\* = low .*: it matched no operation"),
    (in_stablehlo, {"module:*head": "fp32"}, RuleWarning, r"module:\*head = fp32 .*: it matched no operation"),
    (in_stablehlo, {"softmax": "low"}, PolicyError, r"softmax = low .*: StableHLO programs contain only its parts"),
    (in_stablehlo, {"mylib::attention": "low"}, PolicyError, r"mylib::attention = low .*operator of a torch library"),
    (in_stablehlo, {"upsample_*": "fp32"}, PolicyError, r"upsample_\* = fp32 .*: StableHLO programs contain only"),
    (in_torch, {"special_zeta": "fp32", "mm": "keep"}, RuleWarning, r"special_zeta = fp32 .*: it has matched no"),
    (in_torch, {"qr": "fp32"}, RuleWarning, r"qr = fp32 .*: it has matched no operation; torch<2\.14 has it"),
    (in_torch, {"mylib::scan": "low"}, RuleWarning, r"mylib::scan = low .*: it has matched no operation"),
    (in_torch, {"module:*.decoder.mm": "fp32"}, RuleWarning, r"module:\*\.decoder\.mm = fp32 .*it has matched no"),
    (in_region, {"module:*.never_there": "fp32"}, RuleWarning, r"module:\*\.never_there = fp32 .*it has matched no"),
]


@pytest.mark.parametrize(("front", "rules", "kind", "line"), INEFFECTIVE)
def test_a_rule_without_effect_has_one_message(
    front: Callable[..., None], rules: Any, kind: type[Exception], line: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind is PolicyError:
            with pytest.raises(PolicyError) as error:
                front(rules)
            said = [str(error.value)]
        else:
            front(rules)
            said = [str(each.message) for each in caught if each.category is RuleWarning]
            assert {each.filename for each in caught if each.category is RuleWarning} == {__file__}, "the caller's line"
            with pytest.raises(PolicyError, match=line):
                front(rules, strict=True)
    assert len(said) == 1, said
    first, *rest = said[0].splitlines()
    assert "this rule has no effect on" in first
    assert len(rest) == 1
    assert re.search(line, rest[0]), rest


@pytest.mark.parametrize("by", ["file", "environment", "override"])
def test_the_command_prints_one_line_for_a_rule_without_effect(
    by: str, module: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out.mlir"
    arguments = ["convert", str(module), "-o", str(out)]
    if by == "file":
        file.write_text('extends = "tpu"\n[[rule]]\noperations = ["cosh"]\ncast = "fp32"\n')
        arguments += ["--policy", str(file)]
    elif by == "environment":
        monkeypatch.setenv("XLA_AMP_RULES", "cosh=fp32")
    else:
        arguments += ["--rule", "cosh=fp32"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert said.count("cosh = fp32") == said.count("no effect") == 1
    assert main([*arguments, "--strict"]) == 2
    assert capsys.readouterr().err.count("cosh = fp32") == 1


def test_a_function_that_jax_has_traced_before_counts() -> None:
    inner = jax.jit(jnp.tanh)
    with policy.override({"tanh": "fp32"}):
        for number in range(2):
            jax.make_jaxpr(autocast(lambda x, n=number: inner(x) + n, strict=True))(X)


def test_built_in_rules_never_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in policy.BUILTIN:
            jax.make_jaxpr(autocast(step, policy=name))(X, W)
            stablehlo.autocast(jax.jit(step).lower(X, W), policy=name)


@pytest.mark.parametrize("front", [in_jax, in_stablehlo, in_torch])
def test_reports_and_unused_rules_judge_the_same_patterns(
    front: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    rules = tmp_path / "rules.toml"  # rules of this file have had no effect before
    rules.write_text('[[rule]]\noperations = ["mm", "softmax", "module:*.head"]\ncast = "fp32"\n')
    monkeypatch.setenv("XLA_AMP_POLICY", str(rules))
    monkeypatch.setenv("XLA_AMP_RULES", "mm=low")  # outranks the file's
    without = ["softmax", "module:*.head"]
    if front is in_torch:
        front({"tanh": "low"})
    else:
        with pytest.warns(RuleWarning) as caught:
            front({"tanh": "low"})
        (warning,) = caught
        assert [line.split(" = ")[0].strip() for line in str(warning.message).splitlines()[1:]] == without
    listed = [(rule.operations, rule.cast) for rule in policy.unused_rules("tpu") if str(rules) in rule.origin]
    assert listed == [(tuple(without), "fp32")]


def test_a_rule_that_its_operation_does_not_follow_is_unused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\noperations = ["scatter_add"]\ncast = "low"\n')
    monkeypatch.setenv("XLA_AMP_POLICY", str(rules))
    with pytest.warns(RuleWarning, match="scatter_add = low .*as it was writ"):
        jax.make_jaxpr(autocast(lambda x: x.at[0].add(1.0)))(X)
    assert [rule.operations for rule in policy.unused_rules("tpu")] == [("scatter_add",)]


# Overrides and jax.jit.


def low(function: Any) -> bool:
    return "bf16" in str(jax.make_jaxpr(function)(X, W))


def test_an_override_around_a_jitted_function_traces_it_again() -> None:
    traced = []

    def product(x: Any, w: Any) -> Any:
        traced.append(1)
        return x @ w

    jitted = jax.jit(autocast(product))
    before = jitted(X, W)
    with policy.override(mm="fp32"):
        exact = [jitted(X, W), jitted(X, W)]
    after = jitted(X, W)
    np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(exact[0], X @ W, rtol=1e-6)
    assert not np.allclose(before, exact[1], rtol=1e-5)
    assert len(traced) == 2, "once for each set of rules"


def inside(x: Any, w: Any) -> Any:
    with policy.override(mm="fp32"):
        return x @ w


def test_an_override_inside_a_function_under_autocast_raises() -> None:
    with pytest.raises(PolicyError, match=r'autocast\(part, rules={"mm": "fp32"}\)'):
        autocast(inside)(X, W)
    assert low(autocast(jnp.matmul))
    part = autocast(jnp.matmul, rules={"mm": "fp32"})  # what the message says
    assert not low(autocast(lambda x, w: part(x, w)))
    with policy.override(mm="fp32"):
        assert not low(autocast(jnp.matmul))


@pytest.mark.parametrize("transform", ["jit", "grad", "scan"])
def test_an_override_inside_a_transformed_function_raises(transform: str) -> None:
    jitted = jax.jit(inside)
    jitted(X, W)  # traced before, without autocast
    functions = {
        "jit": jitted,
        "grad": jax.grad(lambda x, w: inside(x, w).sum()),
        "scan": lambda x, w: jax.lax.scan(lambda carry, _: (inside(carry, w), None), x, None, length=2)[0],
    }
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"override\(mm=fp32\) opened inside a function under autocast"):
            autocast(functions[transform])(X, W)


# ``rules=`` of the fronts.


def test_a_region_in_which_no_operation_ran_has_no_rule_without_effect() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xla_amp.autocast("cpu", rules={"module:*.nor_there": "fp32"}, strict=True):
            pass


def test_a_rule_that_equals_the_devices_own_cast_has_matched(device: torch.device) -> None:
    """torch's own kernel would do the same without a word."""
    x = torch.ones(2, 2, device=device)
    with xla_amp.autocast(x.device, dtype=torch.bfloat16, rules={"mm": "low", "relu": "fp32"}, strict=True):
        assert torch.relu(torch.mm(x, x)).dtype is torch.float32


def test_strict_judges_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_RULES", "module:*.not_there_either=fp32")
    with pytest.raises(PolicyError, match="not_there_either"):
        in_region(None, strict=True)
