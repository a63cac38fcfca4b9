"""Arrays between torch_xla and JAX: the values, and that the memory is the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
import torch_xla

from xla_amp.backends import base
from xla_amp.backends.torch_xla.dlpack import from_jax, to_jax
from xla_amp.errors import EngineError

MADE = {
    "uploaded": lambda: torch.arange(6.0).to("xla"),
    "not executed": lambda: torch.ones(6).to("xla") * 2,
    "just executed": lambda: (torch.ones(6).to("xla") * 2, torch_xla.sync())[0],
    "a view": lambda: (torch.arange(6.0).to("xla") + 1).reshape(2, 3).t(),
    "bfloat16": lambda: torch.arange(6.0).to("xla").bfloat16(),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(6.0).to("xla")),
    "int32": lambda: torch.arange(6, dtype=torch.int32).to("xla"),
}


@pytest.mark.parametrize("made", list(MADE))
def test_to_jax(made):
    tensor = MADE[made]()
    array = to_jax(tensor)
    assert isinstance(array, jax.Array)
    assert array.shape == tuple(tensor.shape)
    assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert array.astype(jnp.float32).tolist() == tensor.detach().float().cpu().tolist()
    again = to_jax(tensor)
    assert again.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()  # neither is a copy


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_there_and_back(dtype):
    array = (jnp.arange(6) * 2).astype(dtype)
    before = base.metrics()
    tensor = from_jax(array)
    after = base.metrics()
    assert (after["host_to_device"], after["device_to_host"]) == (before["host_to_device"], before["device_to_host"])
    assert tensor.device.type == "xla"
    assert to_jax(tensor).unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert (tensor + 1).cpu().tolist() == [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: to_jax(torch.ones(2)), TypeError, "expects a tensor on torch_xla's device, got a tensor on cpu"),
        (lambda: from_jax(torch.ones(2)), TypeError, "expects a jax.Array, got Tensor"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_platform_that_shares_no_memory(monkeypatch):
    tensor, array = torch.ones(2).to("xla"), jnp.ones(2)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(EngineError, match="client for 'tpu' shares no memory"):
        to_jax(tensor)
    with pytest.raises(EngineError, match="client for 'tpu' shares no memory"):
        from_jax(array)
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    with pytest.raises(EngineError, match="client for 'gpu' shares no memory"):
        from_jax(array)
