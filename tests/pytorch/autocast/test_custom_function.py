"""Custom autograd functions under autocast, on torch's CPU device and on ours."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

import xla_amp
from xla_amp import autocast, custom_bwd, custom_fwd, is_autocast_available, policy
from xla_amp.errors import DeviceError, XlaAmpError

LOW, FULL = torch.bfloat16, torch.float32


def matmul_function(device, cast_inputs=None):
    seen = []

    class Matmul(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            result = a.mm(b)
            seen.append((torch.is_autocast_enabled(device.type), a.dtype, result.dtype))
            return result

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            result = gradient.mm(b.t()), a.t().mm(gradient)
            seen.append((torch.is_autocast_enabled(device.type), result[0].dtype, result[1].dtype))
            return result

    return Matmul, seen


def leaves(device):
    return [torch.full((2, 2), 3.0, device=device, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize(("cast", "used"), [("low", LOW), ("fp32", FULL)])
def test_backward_runs_as_forward_did(device, cast, used):
    (function, seen), (a, b) = matmul_function(device), leaves(device)
    with policy.override(mm=cast), autocast(device, dtype=LOW):
        loss = function.apply(a, b).sum()
    loss.backward()
    assert seen == [(True, FULL, used), (True, used, used)]
    assert a.grad.dtype is FULL
    assert a.grad.tolist() == [[6.0, 6.0], [6.0, 6.0]]


@pytest.mark.parametrize("argument", [torch.ones(2), 3])
def test_a_function_with_setup_context_is_refused(argument):
    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output): ...

    with pytest.raises(TypeError, match=r"Double.forward: custom_fwd expects forward\(ctx, ...\), got .*(Tensor|int)"):
        Double.apply(argument)


def test_cast_inputs_reaches_every_container(device):
    Pair = namedtuple("Pair", ["x", "y"])
    seen = {}

    @custom_fwd(device_type=device, cast_inputs=LOW)
    def forward(ctx, pair, ordered, *, nested):
        seen.update(pair=pair, ordered=ordered, nested=nested)

    full = torch.ones(2, device=device)
    kept = {"f64": full.double(), "int": torch.ones(2, dtype=torch.int64, device=device), "text": "abc", "none": None}
    kept["elsewhere"] = torch.ones(2, device="cpu" if device.type != "cpu" else xla_amp.xla_device())
    with autocast(device, dtype=LOW):
        forward(ContextStub(), Pair(full, 1), OrderedDict(a=full), nested={"list": [full, (full,)], **kept})
    assert isinstance(seen["pair"], Pair)
    assert type(seen["ordered"]) is OrderedDict
    nested = seen["nested"]
    cast = [seen["pair"].x, seen["ordered"]["a"], nested["list"][0], nested["list"][1][0]]
    assert [tensor.dtype for tensor in cast] == [LOW] * 4
    assert {name: nested[name] is value for name, value in kept.items()} == dict.fromkeys(kept, True)


class ContextStub(torch.autograd.function.FunctionCtx):
    """What torch.autograd.Function gives forward as `ctx`, as far as custom_fwd needs it."""


@pytest.mark.parametrize("decorator", [custom_fwd, custom_bwd])
def test_what_is_no_device(decorator):
    with pytest.raises(ValueError, match=rf"{decorator.__name__}\(3\): expected a device"):
        decorator(device_type=3)
    with pytest.raises(TypeError, match="device_type"):
        decorator(lambda ctx: None)


def test_backward_needs_our_forward(device):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, gradient):
            return gradient * 2

    y = Double.apply(torch.ones(2, device=device, requires_grad=True))
    with pytest.raises(XlaAmpError, match=r"Double.backward: forward was not decorated with xla_amp.custom_fwd"):
        y.sum().backward()


def test_is_autocast_available():
    assert is_autocast_available("cpu")
    assert is_autocast_available("xla")
    assert is_autocast_available(xla_amp.xla_device())
    assert not is_autocast_available("meta")
    with pytest.raises(DeviceError, match="torch knows no device type 'gpu'"):
        is_autocast_available("gpu")
