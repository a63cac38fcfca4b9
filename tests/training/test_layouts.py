"""Layouts by name: which dimension of a parameter is split, by shapes and plans; errors for what cannot be split."""

from __future__ import annotations

import pytest
import torch
import transformers
from global_mesh_program import gpt2
from jax.sharding import AbstractMesh, Mesh

import xla_amp
from xla_amp.errors import DeviceError
from xla_amp.lazy.layouts import recipes

DATA, SQUARE = AbstractMesh((4,), ("data",)), AbstractMesh((4, 2), ("data", "model"))


def specs(model, mesh, recipe):
    axes = recipes._axes(mesh, recipe)
    return {each.name: each for each in recipes._placed(model, mesh, recipes.RECIPES[recipe], axes)}


def short(found):
    return {name.removeprefix("transformer.").removeprefix("h.0."): each.spec for name, each in found.items()}


def test_fsdp_splits_the_longest_dimension_that_divides():
    found = short(specs(gpt2(128), DATA, "fsdp"))
    assert found["wte.weight"] == (None, "data")  # a lookup then sends its rows only to the device that asks
    assert found["mlp.c_fc.weight"] == (None, "data")
    assert found["mlp.c_proj.weight"] == ("data", None)
    assert found["ln_1.weight"] == (None,)  # small


def test_a_vocabulary_that_does_not_divide_is_split_along_the_other_dimension():
    found = specs(gpt2(65), SQUARE, "tp")["transformer.wte.weight"]
    assert found.spec == (None, "model")
    assert found.why == "65 rows do not divide: its columns are split"


def test_tensor_parallel_by_a_plan():
    """The weights of transformers' Conv1D are (inputs, outputs)."""
    found = short(specs(gpt2(128), SQUARE, "tp"))
    assert found["wte.weight"] == ("model", None)
    assert found["attn.c_attn.weight"] == found["mlp.c_fc.weight"] == (None, "model")
    assert found["attn.c_attn.bias"] == found["mlp.c_fc.bias"] == ("model",)
    assert found["attn.c_proj.weight"] == found["mlp.c_proj.weight"] == ("model", None)
    assert found["attn.c_proj.bias"] == found["ln_f.weight"] == (None,)
    both = short(specs(gpt2(128), SQUARE, "fsdp+tp"))
    assert both["mlp.c_fc.weight"] == ("data", "model")
    assert both["mlp.c_proj.weight"] == ("model", "data")


def test_transformers_has_plans():
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=64
    )
    found = specs(transformers.LlamaForCausalLM(config), SQUARE, "tp")
    assert found["model.layers.0.self_attn.q_proj.weight"].spec == ("model", None)
    assert found["model.layers.0.mlp.down_proj.weight"].spec == (None, "model")
    assert found["model.norm.weight"].spec == (None,)


def test_a_plan_of_a_module_of_torch():
    """Its projections of queries, keys and values are no module."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128)
    layer.tp_plan = {"self_attn.in_proj": "colwise", "linear2": "rowwise"}
    found = specs(layer, SQUARE, "tp")
    assert found["self_attn.in_proj_weight"].spec == ("model", None)
    assert found["linear2.weight"].spec == (None, "model")
    assert found["self_attn.in_proj_bias"].spec == ("model",)


def test_sequence_splits_over_both_axes():
    mesh = AbstractMesh((2, 2), ("data", "sequence"))
    assert specs(gpt2(128), mesh, "sequence")["transformer.wte.weight"].spec == (None, ("data", "sequence"))


@pytest.fixture(scope="module")
def mesh():
    return xla_amp.make_mesh({"data": 1})


@pytest.mark.parametrize(
    ("model", "axes", "recipe", "words"),
    [
        (torch.nn.Linear(2, 2), ("data",), "zero", "expected one of 'fsdp', 'tp', 'fsdp.tp', 'sequence'"),
        (torch.nn.Linear(2, 2), ("data",), "fsdp+tp", r"lacks an axis 'model'; make it with xla_amp.make_mesh"),
        (torch.nn.Linear(2, 2), ("model",), "tp", r"no parameter of Linear has a plan, .* set a plan"),
    ],
)
def test_what_is_not_possible(model, axes, recipe, words, mesh):
    with pytest.raises(ValueError, match=words):
        xla_amp.shard(model, Mesh(mesh.devices, axes), recipe)
    assert xla_amp.lazy.programs.mesh.active is None
    assert model.weight.device.type == "cpu"


def on_device(*shape):
    return torch.ones(*shape, device=xla_amp.xla_device())


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda mesh: xla_amp.make_mesh({"data": 3}), DeviceError, r"product is the number of devices, 1, got 3"),
        (lambda mesh: xla_amp.mark_sharding(torch.ones(2), mesh, ()), DeviceError, "expects a tensor on 'jax', got"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, ("model",)), ValueError, "does not know the axis 'mod"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2, 2), mesh, ("data", "data")), ValueError, "repeats the axis"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, (None, None)), ValueError, "one entry per dimension"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, "data"), ValueError, "one entry per dimension"),
        (lambda mesh: xla_amp.mark_sharding(on_device(4)[1:], mesh, ("data",)), DeviceError, "got a view of shape"),
    ],
)
def test_bad_input_to_marks(call, kind, words, mesh):
    with pytest.raises(kind, match=words):
        call(mesh)
    assert xla_amp.lazy.programs.mesh.active is None
