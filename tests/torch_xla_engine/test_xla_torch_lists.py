"""PyTorch's own lists of operations that autocast must handle, through PyTorch's own procedure, on torch_xla's device.

The procedure (`TestAutocast._run_autocast_outofplace`) calls each operation as a function and as a method, checks the
dtype and autocast's state around the call, and demands bit for bit what casting by hand outside autocast gives.  It
opens its regions through `torch.amp.autocast`; here that name is ours, so that a policy can be chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from not_lowered import NOT_LOWERED
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists, TestAutocast
from torch.utils._pytree import tree_map_only

import xla_amp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NN, LINALG = torch._C._nn, torch._C._linalg

CUDA_LISTS: list[tuple[str, torch.dtype | None, ModuleType | None]] = [
    # list, dtype to run as (None: the low dtype), module of the functions
    ("torch_fp16", None, torch),
    ("torch_fp32", FP32, torch),
    ("torch_need_autocast_promote", FP32, torch),
    ("torch_expect_builtin_promote", FP32, torch),
    ("methods_fp16", None, None),
    ("methods_fp32", FP32, None),
    ("methods_expect_builtin_promote", FP32, None),
    ("nn_fp16", None, NN),
    ("nn_fp32", FP32, NN),
    ("linalg_fp16", None, LINALG),
]
CPU_LISTS: list[tuple[str, torch.dtype | None, ModuleType | None]] = [
    ("torch_16", None, torch),
    ("torch_fp32", FP32, torch),
    ("torch_need_autocast_promote", FP32, torch),
    ("torch_expect_builtin_promote", FP32, torch),
    ("methods_expect_builtin_promote", FP32, None),
    ("nn_16", None, NN),
    ("nn_fp32", FP32, NN),
]
IN_PAIRS = ("torch_need_autocast_promote", "torch_expect_builtin_promote", "methods_expect_builtin_promote")
"""CPU lists whose rows have one tuple of arguments for bfloat16 and one for float16."""

PASSED = {"cpu": 55, "cuda": 116}
"""Rows that pass, by policy; those that do not are in `NOT_LOWERED`."""


@functools.cache
def lists(policy: str) -> Any:
    torch.manual_seed(0)
    return AutocastCPUTestLists("cpu") if policy == "cpu" else AutocastTestLists("cpu")


def calls(policy: str, name: str, low: torch.dtype) -> Iterator[tuple[str, Any, dict[str, Any], torch.dtype | None]]:
    """(operation, arguments, keywords, listed result dtype) of each row, as torch's own tests read them."""
    for operation, *rest in getattr(lists(policy), name):
        arguments = rest[1] if policy == "cpu" and name in IN_PAIRS and low is FP16 else rest[0]
        listed = next((item for item in rest if isinstance(item, torch.dtype)), None)
        keywords = next((item for item in rest if isinstance(item, dict)), {})
        yield operation, tree_map_only(torch.Tensor, lambda tensor: tensor.to("xla"), arguments), keywords, listed


@pytest.fixture
def procedure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's procedure under a policy."""
    ours = xla_amp.autocast

    def under(policy: str) -> Any:
        def region(device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> Any:
            return ours(device_type, dtype, enabled, policy=policy)

        monkeypatch.setattr(torch.amp, "autocast", region)
        return functools.partial(TestAutocast()._run_autocast_outofplace, device="xla")

    return under


@pytest.mark.filterwarnings("ignore")  # deprecated spellings among the listed operations
@pytest.mark.parametrize(("policy", "low"), [("cpu", BF16), ("cpu", FP16), ("cuda", FP16)], ids=str)
def test_torchs_lists(procedure, policy, low):
    run = procedure(policy)
    wrong, right = {}, 0
    for name, run_as, module in CPU_LISTS if policy == "cpu" else CUDA_LISTS:
        for operation, arguments, keywords, listed in calls(policy, name, low):
            options = {"out_type": listed, "module": module, "add_kwargs": keywords, "amp_dtype": low}
            try:
                run(operation, arguments, run_as or low, **options)
            except Exception as error:
                wrong[operation] = f"{name}: {type(error).__name__}: {error}"
            else:
                right += 1
    assert {operation: text for operation, text in wrong.items() if operation not in NOT_LOWERED} == {}
    assert right == PASSED[policy]


def test_torchs_banned_operations():
    banned = list(lists("cuda").banned)
    assert banned
    for operation, arguments, module in banned:
        arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to("xla"), arguments)
        with xla_amp.autocast("xla", policy="cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, operation)(*arguments)


def test_the_procedure_can_fail(procedure):
    """Rules of another device: on CUDA softmax gives float32 and relu is not cast; the `tpu` table casts relu."""
    matrix = torch.rand(8, 8).to("xla")
    procedure("cuda")("mm", (matrix, matrix), FP16, amp_dtype=FP16)
    with pytest.raises(AssertionError, match=r"produced torch\.float32, should produce torch\.float16"):
        procedure("cuda")("relu", (matrix,), FP16, amp_dtype=FP16)
