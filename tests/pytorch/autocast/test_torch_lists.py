"""PyTorch's own lists of operations that autocast must handle, through PyTorch's own procedure, on the XLA device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch_lists
from torch_lists import BF16, FP16

import xla_amp

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "cudnn_convolution": "an operation of CUDA builds",
        "cudnn_convolution_transpose": "an operation of CUDA builds",
        "einsum": "malformed in torch: its operands stand where the procedure reads whether to skip the row",
    }
)
"""Listed operation -> why this device, or torch itself, does not run it."""

COUNTED = 37
"""Operations of torch's CPU lists that need autocast; torch's own CPU kernels pass all of them."""


CPU = [pytest.param("cpu", low, marks=pytest.mark.full) for low in (BF16, FP16)]


@pytest.fixture(autouse=True, scope="module")
def name() -> str:
    """Of the device of the engine in use."""
    return xla_amp.xla_device().type


@pytest.mark.filterwarnings("ignore")  # deprecated spellings among the listed operations
@pytest.mark.parametrize(("policy", "low"), [("cuda", FP16), *CPU], ids=str)
def test_torchs_lists(monkeypatch, name, policy, low):
    run = torch_lists.procedure(monkeypatch, policy, name)
    compared = torch_lists.Compared(monkeypatch)
    needed, wrong, rows_of = 0, {}, []
    for rows, operation, arguments, run_as, options in torch_lists.calls(policy, low, name):
        if operation in NOT_HERE:
            continue
        needed += "builtin" not in rows
        try:
            run(operation, arguments, run_as, **options)
        except Exception as error:
            wrong[rows, operation] = f"{type(error).__name__}: {error}"
        rows_of += [(rows, operation)] * (len(compared.flags) - len(rows_of))
    wrong |= dict.fromkeys((rows_of[number] for number in compared.different()), "other values than casting by hand")
    assert wrong == {}
    if policy == "cpu":
        assert needed >= COUNTED


def test_torchs_banned_operations(name):
    torch_lists.check_banned(name)


def test_the_procedure_can_fail(monkeypatch, name):
    torch_lists.check_that_it_can_fail(torch_lists.procedure(monkeypatch, "cuda", name), name)
