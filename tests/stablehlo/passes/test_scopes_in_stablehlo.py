"""Rules for modules in StableHLO: paths from locations, through calls, loops and branches, as in the JAX front."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xla_amp import policy
from xla_amp.common import events
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast as jax_autocast
from xla_amp.stablehlo import autocast, ir, locations
from xla_amp.stablehlo.scope_paths import own_path

X = jnp.full((8, 8), 0.1)


@jax.jit
def attend(y: Any) -> Any:
    with jax.named_scope("attn"):
        for _ in range(17):  # too large for a clone per call
            y = jnp.tanh(y @ y)
    return y


def step(carry: Any, _: Any) -> Any:
    with jax.named_scope("loop"):
        return carry @ carry, None


def block(y: Any, name: str) -> Any:
    with jax.named_scope(name):
        y = attend(jax.jit(lambda y: y @ y)(y))
        return jax.lax.scan(step, y, None, length=2)[0]


def model(x: Any) -> Any:
    return block(block(x, "a"), "b").sum()


LOWERED = jax.jit(model).lower(X)


@pytest.mark.parametrize("patterns", [("a.attn", "*.loop"), ("b",), ("*.attn.tanh", "b.attn.matmul")])
def test_the_fronts_agree_about_each_module(patterns: tuple[str, ...]) -> None:
    rules: Any = {f"module:{pattern}": "fp32" for pattern in patterns}
    decided = autocast(LOWERED, rules=rules, strict=True).report.operations
    with policy.override(rules), events.capture() as records:
        jax.make_jaxpr(jax_autocast(model, strict=True))(X)
    for name, aten in (("dot_general", "matmul"), ("tanh", "tanh")):
        found = sorted((each.module, each.layer != "builtin") for each in decided if each.operation == name)
        wanted = sorted((each.module, each.layer != "builtin") for each in records if each.operation == aten)
        assert found == wanted  # functions are in another order, which is JAX's
        assert {module for module, _ in found} <= {"a", "b", "a.attn", "b.attn", "a.loop", "b.loop"}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("jit(f)/transpose(jvp(M))/head/dot_general", "M.head"),
        ("jit(f)/while/body/closed_call/inner/dot_general", "inner"),
        ("jit(f)/cond/branch_1_fun/inner/add", "inner"),
        ("jit(f)/body/add", "body"),
        ("jit(f)/rematted_computation/blocks/0/eqx.nn.Linear/add", "blocks.0"),
        ("add", ""),
    ],
)
def test_names_of_jax_are_no_modules(name: str, path: str) -> None:
    _, operation = located(f'"{name}"')
    assert own_path(operation) == path


def test_a_program_without_locations_is_an_error() -> None:
    text, rules = LOWERED.as_text(), {"module:b.attn": "fp32"}
    with pytest.raises(PolicyError, match=r"module:b\.attn = fp32 .*the program has no locations.*debug_info=True"):
        autocast(text, rules=rules)  # type: ignore[arg-type]
    autocast(LOWERED.as_text(debug_info=True), rules=rules, strict=True)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_names_the_nearest_module() -> None:
    rules: Any = {"module:*.atn": "fp32"}
    with pytest.warns(RuleWarning, match=r"module:\*\.atn = fp32 .*nearest module: [ab]\.attn"):
        autocast(LOWERED, rules=rules)
    with policy.override(rules), pytest.warns(RuleWarning, match=r"nearest module: [ab]\.attn"):
        jax.make_jaxpr(jax_autocast(model))(X)
    with pytest.warns(RuleWarning, match=r"the program names no modules"):
        autocast(jax.jit(lambda x: x @ x).lower(X), rules=rules)


def located(location: str) -> Any:
    """A module, which its operations do not keep alive, and an operation of it with that location."""
    body = f"%y = stablehlo.abs %x : tensor<f32> loc({location})"
    text = f"func.func @main(%x: tensor<f32>) -> tensor<f32> {{\n{body}\nreturn %y : tensor<f32> }}"
    module = ir.parse(text)
    return module, next(each for each in ir.operations(module.operation) if each.name == "stablehlo.abs")


@pytest.mark.parametrize(
    ("location", "name", "line"),
    [
        ("unknown", None, ""),
        ('"f/abs"', "f/abs", ""),
        ('"m.py":3:4', None, "m.py:3"),
        ('"f/abs"("m.py":3:4)', "f/abs", "m.py:3"),
        ('callsite("g"("m.py":3:4) at "main"("run.py":1:0))', None, "m.py:3"),
        ('fused["a"("m.py":3:4), "b"]', None, "m.py:3"),
        (r'"say \"hi\""("a b.py":3:4)', r"say \22hi\22", "a b.py:3"),
        (r'"not \FF UTF-8"("\FE.py":3:4)', r"not \FF UTF-8", r"\FE.py:3"),
    ],
)
def test_names_and_lines(location: str, name: str | None, line: str) -> None:
    _, operation = located(location)
    found = locations.of(operation)
    assert (found.name, found.line, found.position) == (name, line, None)
