"""PyTorch's own lists of operations that autocast must handle, through its own procedure, on torch_xla's device."""

from __future__ import annotations

import pytest
import torch_lists
from not_lowered import NOT_LOWERED
from torch_lists import BF16, FP16

PASSED = {"cpu": 55, "cuda": 116}
"""Rows that pass, by policy; those that do not are in `NOT_LOWERED`."""


@pytest.mark.filterwarnings("ignore")  # deprecated spellings among the listed operations
@pytest.mark.parametrize(("policy", "low"), [("cpu", BF16), ("cpu", FP16), ("cuda", FP16)], ids=str)
def test_torchs_lists(monkeypatch, policy, low):
    run = torch_lists.procedure(monkeypatch, policy, "xla")
    wrong, right = {}, 0
    for name, operation, arguments, run_as, options in torch_lists.calls(policy, low, "xla"):
        try:
            run(operation, arguments, run_as, **options)
        except Exception as error:
            wrong[operation] = f"{name}: {type(error).__name__}: {error}"
        else:
            right += 1
    assert {operation: text for operation, text in wrong.items() if operation not in NOT_LOWERED} == {}
    assert right == PASSED[policy]


def test_torchs_banned_operations():
    torch_lists.check_banned("xla")


def test_the_procedure_can_fail(monkeypatch):
    torch_lists.check_that_it_can_fail(torch_lists.procedure(monkeypatch, "cuda", "xla"), "xla")
