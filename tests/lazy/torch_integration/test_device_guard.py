"""Backward passes whose hooks raise, as on the CPU, and those of a process whose first one was on the CPU."""

from __future__ import annotations

import traceback

import forked
import pytest
import torch

from xla_amp.errors import DeviceError

KINDS = ("tensor", "intermediate", "post accumulate", "module", "module pre", "node", "node pre")


class StopTraining(BaseException):
    """An error that is no Exception."""


def backward_that_raises(kind: str, device: torch.device | str, error: BaseException) -> torch.nn.Linear:
    """A backward pass in which a hook of `kind` raises `error`; returns the model if none did."""

    def hook(*args: object) -> None:
        raise error

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3).to(device)
    x = torch.ones(2, 3, device=device, requires_grad=True)
    if kind == "module":
        model.register_full_backward_hook(hook)
    elif kind == "module pre":
        model.register_full_backward_pre_hook(hook)
    y = model(x * 2)
    registers = {
        "tensor": x.register_hook,
        "intermediate": y.register_hook,
        "post accumulate": model.weight.register_post_accumulate_grad_hook,
        "node": y.grad_fn.register_hook,
        "node pre": y.grad_fn.register_prehook,
    }
    if kind in registers:
        registers[kind](hook)
    y.sum().backward()
    return model


@pytest.mark.parametrize("error", [ValueError("of the hook", 7), KeyboardInterrupt(), StopTraining("now")], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_reaches_the_caller(device, kind, error):
    with pytest.raises(type(error)) as on_cpu:
        backward_that_raises(kind, "cpu", error)
    assert on_cpu.value is error
    error.__traceback__ = None
    before = torch.arange(4.0, device=device) * 3  # recorded, not yet run
    with pytest.raises(type(error)) as caught:
        backward_that_raises(kind, device, error)
    assert caught.value is error
    assert caught.value.__context__ is None
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "hook"
    assert "backward_that_raises" in frames
    assert before.tolist() == [0.0, 3.0, 6.0, 9.0]


ASSERTION = 'opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED at "engine.cpp":1085, please report a bug'


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says to be on a GPU, where torch was built without CUDA."""

    device = torch.device("cuda", 0)


class Asserts(torch.autograd.Function):
    """As torch's node of a tensor on CUDA, in the middle of a graph."""

    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, grad):
        raise RuntimeError(ASSERTION)


@pytest.mark.parametrize("at", ["output", "grad's output", "node"])
def test_a_pass_on_cuda_is_refused_before_torchs_internal_assertion(device, at):
    x = torch.ones(3, requires_grad=True)
    y = (Asserts.apply(x) if at == "node" else x * 2).sum()
    if at != "node":
        y = y.as_subclass(OnCuda)
    with pytest.raises(DeviceError, match=r"one accelerator.*'jax'.*a process that does not use the other") as caught:
        torch.autograd.grad(y, x) if at == "grad's output" else y.backward()
    assert ("on 'cuda'" in str(caught.value)) == (at != "node")
    assert caught.value.__context__ is None
    assert x.grad is None


def test_other_errors_of_a_pass_stay_as_they_are(device):
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        (x * 2).backward()


PROGRAM = """
import threading
import torch

torch.ones(2, requires_grad=True).sum().backward()
import xla_amp

def work(device):
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    return weight.grad.tolist()

{start}
print(work(device))
for asked in (xla_amp.xla_device, lambda: device):
    thread = threading.Thread(target=lambda: print(work(asked())))
    thread.start()
    thread.join()
print(work("cpu"))
"""


def test_a_backward_pass_came_first():
    done = forked.run(program=PROGRAM.format(start="device = xla_amp.xla_device()"))
    assert done.stdout.splitlines() == [str([[4.0, 4.0], [4.0, 4.0]])] * 4


def test_without_our_help_it_fails():
    # The twin of the test above; when it passes, `backward_threads` can go.
    done = forked.run(program=PROGRAM.format(start="from xla_amp import lazy; device = lazy.device()"), status=None)
    assert "device_ready_queues_" in done.stderr
