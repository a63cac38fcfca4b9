"""PyTorch's lists of the operations that autocast must handle, and how it tests them, for our devices and policies.

The test (`TestAutocast._run_autocast_outofplace`) calls each operation as a function and as a method, checks the
dtype and autocast's state around the call, and demands bit for bit what casting by hand outside autocast gives.  It
opens its regions through `torch.amp.autocast`; here that name is ours, so that a policy can be chosen.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing._internal import autocast_test_lists
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists, TestAutocast
from torch.utils._pytree import tree_map_only

import xla_amp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NN, LINALG = torch._C._nn, torch._C._linalg

LISTS: dict[str, list[tuple[str, torch.dtype | None, ModuleType | None]]] = {
    # list, dtype to run as (None: the low dtype), module of the functions
    "cuda": [
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
    ],
    "cpu": [
        ("torch_16", None, torch),
        ("torch_fp32", FP32, torch),
        ("torch_need_autocast_promote", FP32, torch),
        ("torch_expect_builtin_promote", FP32, torch),
        ("methods_expect_builtin_promote", FP32, None),
        ("nn_16", None, NN),
        ("nn_fp32", FP32, NN),
    ],
}
"""Of a policy."""
IN_PAIRS = ("torch_need_autocast_promote", "torch_expect_builtin_promote", "methods_expect_builtin_promote")
"""CPU lists whose rows have one tuple of arguments for bfloat16 and one for float16."""


@functools.cache
def lists(policy: str) -> Any:
    """torch's lists, made on the CPU: drawing hundreds of tensors on a device would be one program, slow to compile."""
    torch.manual_seed(0)
    return AutocastCPUTestLists("cpu") if policy == "cpu" else AutocastTestLists("cpu")


def on(device: str, arguments: Any) -> Any:
    """`arguments` with their tensors on `device`."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)


def calls(policy: str, low: torch.dtype, device: str) -> Iterator[tuple[str, str, Any, torch.dtype, dict[str, Any]]]:
    """(list, operation, arguments, dtype to run as, the procedure's options) of each row."""
    for name, run_as, module in LISTS[policy]:
        for operation, *rest in getattr(lists(policy), name):
            arguments = rest[1] if policy == "cpu" and name in IN_PAIRS and low is FP16 else rest[0]
            options = {
                "out_type": next((item for item in rest if isinstance(item, torch.dtype)), None),
                "add_kwargs": next((item for item in rest if isinstance(item, dict)), {}),
                "module": module,
                "amp_dtype": low,
            }
            yield name, operation, on(device, arguments), run_as or low, options


def procedure(monkeypatch: pytest.MonkeyPatch, policy: str, device: str) -> Callable[..., None]:
    """torch's procedure under a policy, until the end of the test."""
    ours = xla_amp.autocast

    def region(device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> Any:
        return ours(device_type, dtype, enabled, policy=policy)

    monkeypatch.setattr(torch.amp, "autocast", region)
    return functools.partial(TestAutocast()._run_autocast_outofplace, device=device)


class Compared:
    """Instead of the procedure's `torch.equal`: results are compared at the end, with a program for many operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: list[torch.Tensor] = []
        theirs = types.SimpleNamespace(**{**vars(torch), "equal": self.equal})
        monkeypatch.setattr(autocast_test_lists, "torch", theirs)

    def equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        self.flags.append((first == second).all())
        return first.shape == second.shape and first.dtype == second.dtype

    def different(self) -> list[int]:
        """Which comparisons found different values, by number."""
        return [number for number, same in enumerate(torch.stack(self.flags).tolist()) if not same]


def check_banned(device: str) -> None:
    """torch's banned operations are refused."""
    banned = list(lists("cuda").banned)
    assert banned
    for operation, arguments, module in banned:
        with xla_amp.autocast("xla", policy="cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, operation)(*on(device, arguments))


def check_that_it_can_fail(run: Callable[..., None], device: str) -> None:
    """Rules of another device: on CUDA softmax gives float32 and relu is not cast; the `tpu` table casts relu."""
    matrix = torch.rand(8, 8).to(device)
    run("mm", (matrix, matrix), FP16, amp_dtype=FP16)
    with pytest.raises(AssertionError, match=r"produced torch\.float32, should produce torch\.float16"):
        run("relu", (matrix,), FP16, amp_dtype=FP16)
    with pytest.raises(AssertionError, match="did not match control"):
        run("exp", (matrix.half(),), FP16, out_type=FP32, amp_dtype=FP16)
