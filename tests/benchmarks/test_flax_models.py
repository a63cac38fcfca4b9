"""The benchmarks' models in Flax under autocast: what the rule about biases changes in their steps."""

from __future__ import annotations

import flax_models
import jax
import jax.numpy as jnp
import pytest
from workloads import WORKLOADS

from xla_amp.analysis import beside_low
from xla_amp.jax import autocast


def program(workload):
    model = workload.flax_model(jnp.float32)
    params, rest, _ = flax_models.initial(workload, model, abstract=True)
    loss = autocast(flax_models.loss_of(model, list(rest)), dtype="bfloat16")
    step = jax.value_and_grad(loss, has_aux=True)
    return str(jax.make_jaxpr(step)(params, rest, *workload.flax_batch()))


@pytest.mark.parametrize("name", WORKLOADS["dry"])
def test_the_rule_about_biases_changes_no_program(name, monkeypatch):
    """The sequence of a ViT is float32 before its positions are added: its class token is."""
    got = program(WORKLOADS["dry"][name])
    assert ("f32[2,5,24] = concatenate" in got) == (name == "ViT")
    monkeypatch.setattr(beside_low, "is_bias", lambda *_: True)
    assert program(WORKLOADS["dry"][name]) == got
