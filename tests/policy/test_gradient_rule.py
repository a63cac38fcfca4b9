"""The rule for sums of gradients over devices, ``reduce_gradients``: what it may say, and who follows it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import policy
from xla_amp.backends import base
from xla_amp.common import events
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast, reduce_gradients
from xla_amp.pytorch.distributed import gradients
from xla_amp.stablehlo import autocast as convert

FILE = """
extends = "tpu"
[[rule]]
operations = ["reduce_gradients"]
cast = "low"
why = "Half the traffic."
[[rule]]
operations = ["module:*.head.reduce_gradients"]
cast = "fp32"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sums.toml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("rule", ["reduce_gradients", "module:*.head.reduce_gradients"])
@pytest.mark.parametrize("cast", ["promote", "fp32_inside", "low_fp32_out", "ban"])
def test_a_cast_that_sums_cannot_follow_is_refused_when_it_is_read(rule, cast):
    with pytest.raises(PolicyError, match="for reduce_gradients: "), policy.override({rule: cast}):
        pass


def test_other_rules_do_not_reach_it():
    with policy.override({"*": "low", "module:*.head": "low"}):
        assert policy.resolve("tpu").decide("reduce_gradients", "head").rule is None
    with policy.override(reduce_gradients="low"):
        assert policy.resolve("tpu").casts() == policy.load("tpu").casts()


class Processes:
    """Two processes of which this is one, whose sums are what this one sends."""

    def __init__(self):
        self.sent = []

    def world_size(self):
        return 2

    def all_reduce(self, kind, tensors, groups, pin_layout):
        self.sent = [tensor.dtype for tensor in tensors]
        return list(tensors)


@pytest.fixture
def processes(monkeypatch):
    made = Processes()
    monkeypatch.setattr(base, "processes", lambda: made)
    return made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.low = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.low(self.head(self.body(x)))


def trained(**region):
    device = xla_amp.xla_device()
    model = Model().to(device)
    with xla_amp.autocast(device, **region):
        model(torch.ones(2, 2, device=device)).sum().backward()
    return model, torch.optim.SGD(model.parameters())


def test_processes_follow_the_policy_of_the_last_region(processes, file):
    _, optimizer = trained()
    gradients.reduce_gradients(optimizer)
    assert processes.sent == [torch.float32] * 3
    _, optimizer = trained(policy=file)
    with events.capture() as records:
        gradients.reduce_gradients(optimizer)
    assert processes.sent == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [(each.operation, each.cast, each.used, each.module) for each in records] == [
        ("reduce_gradients", "low", ("bfloat16",), "body"),
        ("reduce_gradients", "fp32", ("float32",), "head"),
        ("reduce_gradients", "low", ("bfloat16",), "low"),
    ]
    assert records[0].why == "Half the traffic."
    gradients.reduce_gradients(optimizer, dtype=torch.float16)
    assert processes.sent == [torch.float16] * 3
    with policy.override(reduce_gradients="keep", strict=True):
        gradients.reduce_gradients(optimizer)
    assert processes.sent == [torch.float32, torch.float32, torch.bfloat16]
    assert not policy.unused_rules(file)


def added(gradients, **options):
    """What the sums of two devices, 256 and 1, are in the dtype in which they are added."""
    parts = jax.tree.map(lambda x: jnp.array([256, 1], x), gradients)
    found = jax.vmap(lambda g: reduce_gradients(g, "d", **options), axis_name="d")(parts)
    return jax.tree.map(lambda x: 2 * float(x[0]), found)


def test_jax_follows_it(file):
    tree = {"body": {"kernel": jnp.float32}, "head": {"kernel": jnp.float32}}
    assert added(tree) == {"body": {"kernel": 257.0}, "head": {"kernel": 257.0}}
    with events.capture() as records:
        assert added(tree, policy=file) == {"body": {"kernel": 256.0}, "head": {"kernel": 257.0}}
    assert [(each.module, each.cast, each.used) for each in records] == [
        ("body", "low", ("bfloat16",)),
        ("head", "fp32", ("float32",)),
    ]
    with policy.override(reduce_gradients="low"):
        assert added(tree)["body"]["kernel"] == 256.0
        assert added(tree, dtype=jnp.float32)["body"]["kernel"] == 257.0
    with pytest.raises(PolicyError, match="pass one of them"):
        added(tree, dtype=jnp.float32, policy=file)


def test_where_nothing_adds_gradients_the_rule_is_reported(file, recwarn):
    x = jnp.ones((2, 2))
    with policy.override(reduce_gradients="low"):
        autocast(jnp.dot)(x, x)  # reduce_gradients may follow
    assert not [each for each in recwarn if issubclass(each.category, RuleWarning)]
    with pytest.raises(PolicyError, match="reduce_gradients follows it"):
        autocast(jnp.dot, rules={"reduce_gradients": "low"})(x, x)
    with pytest.warns(RuleWarning, match="reduce_gradients follows it"):
        autocast(jnp.dot, policy=file)(x, x)
    program = jax.export.export(jax.jit(jnp.dot))(x, x)
    with pytest.raises(PolicyError, match="collectives keep their dtypes"):
        convert(program, rules={"reduce_gradients": "low"})
    told = re.escape("torch's DistributedDataParallel adds gradients on 'cpu'")
    with pytest.warns(RuleWarning, match=told), xla_amp.autocast("cpu", rules={"reduce_gradients": "keep"}):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def test_the_distributed_data_parallel_of_torch_refuses_a_rule_that_it_cannot_follow():
    model, _ = trained()
    with policy.override(reduce_gradients="low"), pytest.raises(PolicyError, match="adds gradients in their own dtype"):
        nn.parallel.DistributedDataParallel(model)
    told = r"adds gradients of torch.bfloat16 in torch.bfloat16; leave it out.*xla_model.reduce_gradients\(optimizer\)"
    with pytest.warns(UserWarning, match=told), pytest.raises(ValueError, match="process group"):
        nn.parallel.DistributedDataParallel(model)
    with policy.override(reduce_gradients="keep"), pytest.raises(ValueError, match="process group"):
        nn.parallel.DistributedDataParallel(model)  # warnings are errors
