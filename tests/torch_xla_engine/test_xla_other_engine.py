"""Functions of the lazy device alone raise on torch_xla; functions of both engines work."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import xla_amp
import xla_amp.jax
from xla_amp.errors import EngineError


def double(x):
    return x * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: xla_amp.compile(double)(x), r"compile\(\) .* use torch_xla.compile there, or set XLA_AMP_ENGINE"),
        (lambda x: xla_amp.export(double, x), r"export\(\) works only on the lazy device 'jax'"),
        (lambda x: xla_amp.launch(double, 2), r"launch\(\) works .* use torch_xla.launch there"),
        (lambda x: xla_amp.make_mesh(), r"make_mesh\(\) works .* use torch_xla.distributed.spmd.Mesh there"),
        (lambda x: xla_amp.mark_sharding(x, None, ()), r"mark_sharding\(\) works .* use torch_xla.*mark_sharding"),
        (lambda x: xla_amp.jax.functional(nn.Linear(2, 2)), r"functional\(\) works only on the lazy device"),
        (lambda x: xla_amp.jax.torch_function(jnp.sin)(x), r"torch_function\(\) works .* use torch_xla.*call_jax"),
    ],
    ids=lambda value: value.split("(")[0].rstrip("\\") if isinstance(value, str) else "",
)
def test_what_torch_xla_has_not(call, words):
    with pytest.raises(EngineError, match=words):
        call(torch.ones(2).to("xla"))


def test_memory_that_torch_xla_does_not_count():
    with pytest.raises(xla_amp.errors.DeviceError, match="XLA does not count memory on the platform 'cpu'"):
        xla_amp.xla_model.get_memory_info()
