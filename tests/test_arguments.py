"""Wrong arguments of public functions: the error says what was called, what it expects and what came."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch

import xla_amp
from xla_amp import checkpoint, xla_model
from xla_amp.common import arguments
from xla_amp.errors import DeviceError


def mesh() -> Any:
    return xla_amp.make_mesh()


def on_device() -> torch.Tensor:
    return torch.ones(2, device=xla_amp.xla_device())


ROWS: list[tuple[Callable[[], Any], str]] = [
    (lambda: xla_amp.compile(torch.cos, strict="a"), "compile(strict=...): expected True or False, got 'a' (str)"),
    (lambda: xla_amp.compile(torch.cos, check=1), "compile(check=...): expected True or False, got 1 (int)"),
    (lambda: xla_amp.autocast("xla", strict="x"), "autocast(strict=...): expected True or False, got 'x' (str)"),
    (lambda: xla_amp.autocast("xla", rules=3), 'expected a mapping such as {"tanh": "fp32"}, got 3 (int)'),
    (lambda: xla_amp.sync("x"), "sync(wait='x'): expected True or False"),
    (lambda: xla_amp.make_mesh(3), 'make_mesh(axes=3): expected extents by name such as {"data": 4, "model": 2}'),
    (lambda: xla_amp.make_mesh({"a": "b"}), "expected a number of devices for 'a', got 'b' (str)"),
    (lambda: xla_amp.make_mesh({"a": True}), "expected a number of devices for 'a', got True (bool)"),
    (lambda: xla_amp.make_mesh({3: 1}), "expected names of axes that are texts, got 3 (int)"),
    (lambda: xla_amp.mark_sharding(3, mesh(), ("data",)), "mark_sharding(tensor): expected a tensor of the device"),
    (lambda: xla_amp.mark_sharding(on_device(), 3, ("data",)), "mark_sharding(mesh=...): expected a mesh from"),
    (lambda: xla_amp.full_tensor(3), "full_tensor(tensor): expected a tensor of the device, got 3 (int)"),
    (lambda: xla_amp.global_batch(torch.ones(2), 3, ("data",)), "global_batch(mesh=...): expected a mesh from"),
    (lambda: xla_amp.shard(None, mesh(), "fsdp"), "shard(model): expected a torch.nn.Module, got None (NoneType)"),
    (lambda: xla_amp.shard(torch.nn.Linear(1, 1), 3, "fsdp"), "shard(mesh=...): expected a mesh from xla_amp."),
    (lambda: xla_amp.launch(None, 2), "launch(function): expected a function of a module, called as function("),
    (lambda: xla_amp.launch(print, "2"), "launch(nprocs=...): expected the number of processes, 1 or more, got '2'"),
    (lambda: xla_amp.launch(print, 2, 3), "launch(args=...): expected a tuple such as (batches,), got 3 (int)"),
    (lambda: checkpoint.save([], "run"), 'checkpoint.save(state): expected objects by name such as {"model": model}'),
    (lambda: checkpoint.save({}, None), "checkpoint.save(path=...): expected a folder such as 'run/step-100', got"),
    (lambda: checkpoint.save_async([], "run"), "checkpoint.save_async(state): expected objects by name"),
    (lambda: checkpoint.load("run", {}), "checkpoint.load(state): expected objects by name"),
    (lambda: checkpoint.load({}, 3), "checkpoint.load(path=...): expected a folder such as 'run/step-100', got 3"),
    (lambda: checkpoint.latest(None), "checkpoint.latest(folder): expected a folder such as 'run', got None"),
    (lambda: xla_amp.pad_to_bucket(None, 8), "pad_to_bucket(tensor): expected a tensor, got None (NoneType)"),
    (lambda: xla_amp.pad_to_bucket(torch.ones(2), None), "expected the longest extent, as 512, or the extents"),
    (lambda: xla_amp.pad_to_bucket(torch.ones(2), ["a"]), "pad_to_bucket(sizes=['a']): expected the longest extent"),
    (lambda: xla_amp.pad_to_bucket(torch.ones(2), 8, "a"), "pad_to_bucket(dim=...): expected the number of"),
    (lambda: xla_amp.pad_to_bucket(torch.ones(2), 8, 0, "a"), "pad_to_bucket(value=...): expected a number, got 'a'"),
    (lambda: xla_amp.pad_batch([], 8, "a"), 'pad_batch(padding=...): expected values by name such as {"input_ids": 0}'),
    (lambda: xla_amp.DeviceLoader(None), "DeviceLoader(loader): expected a DataLoader or a list of batches, got None"),
    (lambda: xla_amp.GradScaler("xla", "a"), "GradScaler(init_scale=...): expected a number such as 65536.0, got"),
    (lambda: xla_amp.find_overflow(3), "find_overflow(step): expected one iteration of a training loop, as a"),
    (lambda: xla_amp.monitor(3, None), "monitor(model): expected a torch.nn.Module, got 3 (int)"),
    (lambda: xla_amp.jax.monitor(sinks=print), "monitor(sinks=...): expected functions of a record, e.g. [print], got"),
    (lambda: xla_amp.monitor(torch.nn.Linear(1, 1), None), "monitor(model, optimizer): expected a torch.optim.Opt"),
    (lambda: xla_amp.compilation_cache(3), "compilation_cache(path): expected a folder, or None, got 3 (int)"),
    (lambda: xla_amp.export(3), "export(step): expected a module or a function of a step, got 3 (int)"),
    (lambda: xla_amp.jax.skip_nonfinite(3), "skip_nonfinite(inner): expected an optax transformation such as"),
    (lambda: xla_amp.jax.value_and_grad(3), "value_and_grad(fn): expected a function that returns a loss, got 3 (int)"),
    (lambda: xla_amp.jax.select(3, 3, "a"), "select(finite=3): expected a bool, or an array of shape () and"),
    (lambda: xla_amp.jax.reduce_gradients(3, 3), "reduce_gradients(axis_name=3): expected the name of an axis of"),
    (lambda: xla_amp.jax.to_jax(3), "to_jax(tensor): expected a tensor of the device, got 3 (int)"),
    (lambda: xla_amp.stablehlo.load(3), "load(path): expected the name of a file, got 3"),
    (lambda: xla_model.optimizer_step(3), "reduce_gradients(optimizer): expected an optimizer of torch, got 3"),
    (lambda: xla_model.add_step_closure(3), "add_step_closure(closure): expected a function, got 3 (int)"),
    (lambda: xla_model.save({}, None), "save(file_or_path): expected a path or an open file, got None (NoneType)"),
    (lambda: xla_amp.syncfree.Adam(3), "syncfree.Adam(params): expected parameters such as model.parameters(), got 3"),
    (lambda: xla_model.set_rng_state("a"), "set_rng_state(seed): expected a number, or a state from get_rng_state"),
]


@pytest.mark.parametrize(("call", "message"), ROWS, ids=[message for _, message in ROWS])
def test_a_wrong_argument_is_named_where_it_is_given(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


def test_a_mesh_needs_an_axis() -> None:
    with pytest.raises(DeviceError, match="leave axes out for one over all"):
        xla_amp.make_mesh({})


def test_right_arguments_of_other_types_are_taken() -> None:
    """Numbers of NumPy, ranges, lists for tuples, and objects that do what an optimizer does."""
    assert xla_amp.make_mesh({"data": np.int64(1)}).size == 1
    assert xla_amp.pad_to_bucket(torch.ones(3), range(2, 6, 2), value=np.float32(2)).tolist() == [1, 1, 1, 2]
    assert xla_amp.GradScaler("xla", np.float32(8)).get_scale() == 8
    assert xla_amp.jax.skip_nonfinite(optax.sgd(0.1)).init({}).skipped == 0
    xla_model.set_rng_state(np.int64(3))

    class Wrapped:
        param_groups: list[Any] = []  # noqa: RUF012

    xla_model.reduce_gradients(Wrapped())
    arguments.require("f(x)", True, bool, "a flag")
