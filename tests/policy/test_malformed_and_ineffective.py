"""Malformed and ineffective policies, in Python, in a file and on the command line: one message each, with the fix."""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    with policy.override(rules, strict=strict), xla_amp.autocast("cpu"):
        torch.tanh(torch.ones(2, 2) @ torch.ones(2, 2))


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
    (in_torch, {"special_zeta": "fp32", "matmul": "keep"}, RuleWarning, r"special_zeta = fp32 .*: it has matched no"),
    (in_torch, {"qr": "fp32"}, RuleWarning, r"qr = fp32 .*: it has matched no operation; torch<2\.14 has it"),
    (in_torch, {"mylib::scan": "low"}, RuleWarning, r"mylib::scan = low .*: it has matched no operation"),
    (in_torch, {"module:*.decoder.mm": "fp32"}, RuleWarning, r"module:\*\.decoder\.mm = fp32 .*it has matched no"),
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
