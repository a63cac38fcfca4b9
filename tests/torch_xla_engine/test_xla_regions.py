"""xla_amp regions on torch_xla's device: PyTorch/XLA's own AMP tests by behaviour, and what it gets back afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
import torch_xla
from helpers.rule_programs import CASTS, PRODUCTS, expected, run_in_torch, seen

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
    with xla_amp.explain() as report, xla_amp.autocast(device()):
        assert torch.mm(matrix, matrix).dtype == BF16
        assert torch.softmax(matrix, -1).dtype == FP32
    assert [(row["operation"].partition(".")[0], row["result"]) for row in report.rows() if row["rule"]] == [
        ("mm", "bfloat16"),
        ("softmax", "float32"),
    ]
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


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast(cast):
    for program, record in run_in_torch(cast, torch.device("xla"), mixed_products=True):
        used, result = expected(program, cast, asks_result=True)
        assert seen(record)[0] == used, program.rule
        # torch_xla gives a product of two dtypes the first one, where torch's kernels refuse it.
        assert seen(record)[1] == result or (cast == "keep" and program.rule in PRODUCTS), program.rule


def test_the_risk_level_lean():
    x = torch.linspace(-2, 3, 64).reshape(8, 8).to("xla")
    with xla_amp.autocast("xla", policy="lean"):
        h = x @ x
        assert torch.nn.functional.layer_norm(h, (8,)).dtype == torch.bfloat16
        assert torch.softmax(h, -1).dtype == torch.bfloat16
        assert torch.nn.functional.mse_loss(h, x).dtype == torch.float32
    with xla_amp.autocast("xla", policy="default"):
        assert torch.softmax(x @ x, -1).dtype == torch.float32
