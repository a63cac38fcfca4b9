"""Rules for modules of nnx and Equinox, whose paths are those that reports show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from xla_amp import policy
from xla_amp.common import events
from xla_amp.common.events import DecisionRecord
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast

RULE: Any = {"module:*.head": "fp32"}


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.tail = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs))
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.tail(x))


class EquinoxModel(eqx.Module):
    layers: list[Any]
    tail: eqx.nn.Sequential
    head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.layers = [eqx.nn.Linear(8, 8, key=key)]
        self.tail = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=key)])
        self.head = eqx.nn.Linear(8, 8, key=key)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.tail(x))


def nnx_loss(model: Any, x: Any) -> Any:
    return model(x).sum()


def equinox_loss(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x).sum()


X = jnp.ones((8, 8))
NNX, EQUINOX = NnxModel(nnx.Rngs(0)), EquinoxModel(jax.random.key(0))
FORWARD = [("layers.0", "bfloat16"), ("tail.layers.0", "bfloat16"), ("head", "float32")]
CASES: list[tuple[Callable[..., Any], Any]] = [
    (nnx_loss, NNX),
    (nnx.jit(nnx_loss), NNX),
    (nnx.grad(nnx_loss), NNX),
    (lambda _, x: NNX(x).sum(), None),  # in a closure
    (equinox_loss, EQUINOX),
    (eqx.filter_jit(equinox_loss), EQUINOX),
    (eqx.filter_grad(equinox_loss), EQUINOX),
    (lambda _, x: equinox_loss(EQUINOX, x), None),
]


def products(records: list[DecisionRecord]) -> list[tuple[str, str]]:
    return [(each.module, each.used[0]) for each in records if each.operation == "matmul"]


@pytest.mark.parametrize(("function", "model"), CASES)
def test_a_rule_reaches_the_module_that_reports_name(function: Any, model: Any) -> None:
    with policy.override(RULE), events.capture() as records:
        autocast(function, strict=True)(model, X)
    found = products(records)
    assert found[:3] == FORWARD
    assert all(used == ("float32" if module == "head" else "bfloat16") for module, used in found)


def test_a_function_that_was_traced_without_rules_is_traced_again() -> None:
    jitted = eqx.filter_jit(equinox_loss)
    autocast(jitted)(EQUINOX, X)
    with policy.override(RULE):
        autocast(jitted, strict=True)(EQUINOX, X)  # would raise if the rule matched nothing
        with policy.override({"module:*.haed": "fp32"}), pytest.warns(RuleWarning, match="haed"):
            autocast(jitted)(EQUINOX, X)


def test_a_slice_of_stacked_layers_is_named_by_its_class() -> None:
    class Stack(eqx.Module):
        layers: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            def body(carry: Any, layer: Any) -> Any:
                return layer(carry), None

            return jax.lax.scan(body, x, self.layers)[0]

    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(jax.random.key(0), 2))
    with events.capture() as records:
        autocast(lambda x: Stack(layers)(x))(X[0])
    assert {module for module, _ in products(records)} == {"Linear"}


def test_classes_are_as_before() -> None:
    before = [nnx.Linear.__dict__["__call__"], eqx.nn.Linear.__dict__["__call__"]]

    def fails(x: Any) -> Any:
        assert nnx.Linear.__dict__["__call__"] is not before[0]
        raise PolicyError("inside")

    with policy.override(RULE), pytest.raises(PolicyError, match="inside"):
        autocast(fails)(X)
    assert [nnx.Linear.__dict__["__call__"], eqx.nn.Linear.__dict__["__call__"]] == before


def test_without_rules_and_reports_no_class_is_touched() -> None:
    seen = []
    autocast(lambda x: seen.append(nnx.Linear.__dict__["__call__"]) or x)(X)  # type: ignore[func-returns-value]
    assert all(each is nnx.Linear.__dict__["__call__"] for each in seen)
