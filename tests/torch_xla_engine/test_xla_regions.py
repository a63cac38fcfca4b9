"""xla_amp regions on torch_xla's device: PyTorch/XLA's own AMP tests by behaviour, and what it gets back afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch_xla
from torch import nn
from torch.nn import functional

import xla_amp
from xla_amp.errors import DeviceError, EngineError, PolicyError, UnsupportedDtypeError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KEY = "AutocastXLA"
THEIRS = 70  # operations that torch_xla 2.9 casts


def registered() -> int:
    return len(torch._C._dispatch_get_registrations_for_dispatch_key(KEY))


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.rand(4, 4).to("xla")


@pytest.mark.parametrize(
    "device",
    [torch_xla.device, xla_amp.xla_device, lambda: "xla", lambda: "xla:0"],
    ids=["torch_xla.device()", "xla_amp.xla_device()", "xla", "xla:0"],
)
def test_every_spelling_of_the_device(device, matrix):
    with xla_amp.autocast(device()):
        assert torch.mm(matrix, matrix).dtype == BF16
        assert torch.softmax(matrix, -1).dtype == FP32
    assert torch.mm(matrix, matrix).dtype == FP32


@pytest.mark.parametrize(("hardware", "low"), [("TPU", BF16), ("CUDA", FP16), ("CPU", BF16)])
def test_hardware_chooses_the_policy(matrix, monkeypatch, hardware, low):
    monkeypatch.setenv("PJRT_DEVICE", hardware)  # the runtime has started: only what we ask of it changes
    with xla_amp.autocast("xla"):
        assert torch.mm(matrix, matrix).dtype == low


def test_hardware_without_rules(matrix, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with (
        pytest.raises(EngineError, match=r"PJRT_DEVICE='NEURON', for which there are no rules"),
        xla_amp.autocast("xla"),
    ):
        pass
    with xla_amp.autocast("xla", policy="tpu"):
        assert torch.mm(matrix, matrix).dtype == BF16


def test_torch_xlas_kernels_come_back(matrix):
    def theirs():
        with torch.autocast("xla"):
            return torch.addmv(matrix[0], matrix, matrix[0]).dtype, torch.exp(matrix.half()).dtype

    assert registered() == THEIRS
    assert theirs() == (FP32, FP16)  # neither is in torch_xla's table

    def interrupted():
        with xla_amp.autocast("xla"), xla_amp.autocast("xla", policy="gpu"):
            assert registered() > THEIRS
            assert torch.addmv(matrix[0], matrix, matrix[0]).dtype == FP16
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert registered() == THEIRS
    assert theirs() == (FP32, FP16)


def test_other_threads_have_torch_xlas_meanwhile(matrix):
    seen = []

    def other():
        with torch.autocast("xla"):
            seen.extend([torch.relu(matrix).dtype, torch.addmv(matrix[0], matrix, matrix[0]).dtype])

    with xla_amp.autocast("xla", policy="gpu"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert torch.relu(matrix).dtype == FP32
    assert seen == [BF16, FP32]


def test_users_can_install_our_rules_for_torch_autocast():
    """In a separate process, because the change lasts."""
    script = (
        "import torch, torch_xla\n"
        "from xla_amp.pytorch.autocast import xla_dispatch\n"
        "x = torch.ones(2, 2, device='xla')\n"
        "before, inside = [], []\n"
        "for found in (before, inside):\n"
        "    with torch.autocast('xla'):\n"
        "        found.append(torch.addmv(x[0], x, x[0]).dtype)\n"
        "    if not inside: xla_dispatch.install_defaults()\n"
        "assert (before, inside) == ([torch.float32], [torch.bfloat16]), (before, inside)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: xla_amp.autocast("xla", torch.float64),
            UnsupportedDtypeError,
            "expected torch.bfloat16 or torch.float16",
        ),
        (lambda: xla_amp.autocast("jax"), DeviceError, "the XLA engine in use has the device 'xla'"),
        (lambda: xla_amp.autocast("xla", policy="nonsense"), PolicyError, "nonsense"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the program -----------------------------------------------------------------------------------------------------


def hlo(tensors: list[torch.Tensor]) -> str:
    return torch_xla._XLAC._get_xla_tensors_hlo(tensors)


def lines(text: str, operation: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if f" {operation}(" in line]


@pytest.mark.parametrize(
    ("call", "operation", "dtype"),
    [
        (lambda x: torch.einsum("ij,jk->ik", x, x), "dot", "bf16"),
        (lambda x: functional.linear(x, x), "dot", "bf16"),
        (lambda x: torch.mm(x, x), "dot", "bf16"),
        (lambda x: torch.softmax(x.bfloat16(), -1), "exponential", "f32"),
        (lambda x: functional.cross_entropy(x.bfloat16(), torch.arange(4).to("xla")), "exponential", "f32"),
        (lambda x: torch.pow(x.bfloat16(), 3.0), "power", "f32"),
        (lambda x: functional.mse_loss(x.bfloat16(), x), "multiply", "f32"),
    ],
    ids=["einsum", "linear", "mm", "softmax", "cross_entropy", "pow", "mse_loss"],
)
def test_what_the_program_computes_in(matrix, call, operation, dtype):
    with xla_amp.autocast("xla"):
        text = hlo([call(matrix)])
    found = lines(text, operation)
    assert found, text
    assert all(f"= {dtype}[" in line for line in found), found
    if operation == "dot":
        assert all("f32[" not in line for line in found), found


def test_without_a_region_the_program_is_another(matrix):
    assert "= f32[" in lines(hlo([torch.mm(matrix, matrix)]), "dot")[0]
    assert "= bf16[" in lines(hlo([torch.softmax(matrix.bfloat16() + 1, -1)]), "exponential")[0]


def test_gradients_of_a_linear_layer_are_low_contractions(matrix):
    layer = nn.Linear(4, 4).to("xla")
    with xla_amp.autocast("xla"):
        layer(matrix).sum().backward()
    dots = lines(hlo([layer.weight.grad]), "dot")
    assert dots
    assert all("= bf16[" in line for line in dots)


def test_defaults_are_not_installed_by_starting_the_engine():
    xla_amp.xla_device()
    assert registered() == THEIRS
