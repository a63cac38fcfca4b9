"""PyTorch's own lists of operations that autocast must handle, run on the lazy device under the policies made for them.

As in torch's procedure each call must give the listed dtype, and bit for bit what casting by hand and calling outside
autocast gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import xla_amp
from xla_amp import autocast
from xla_amp.errors import MissingLoweringError

NOT_HERE = {
    "cudnn_convolution": "an operation of CUDA builds",
    "cudnn_convolution_transpose": "an operation of CUDA builds",
    "einsum": "the row's equation does not fit its operands",
    "_convolution": "torch has no kernel for out-of-tree devices; conv2d and convolution reach theirs without it",
}
"""Listed operation -> why it cannot be called on this device, autocast or not."""

MAY_LACK_A_LOWERING = ("_native_multi_head_attention", "cdist", "gru_cell", "lstm_cell", "pdist")
"""Listed operations that the engine may refuse by name; every other one must run."""

NOTHING = contextlib.nullcontext()

LISTS = [
    # list, policy, low dtype, class, expected dtype (None: as listed), module
    ("torch_fp16", "cuda", torch.float16, AutocastTestLists, torch.float16, torch),
    ("torch_fp32", "cuda", torch.float16, AutocastTestLists, torch.float32, torch),
    ("torch_need_autocast_promote", "cuda", torch.float16, AutocastTestLists, torch.float32, torch),
    ("torch_expect_builtin_promote", "cuda", torch.float16, AutocastTestLists, None, torch),
    ("methods_expect_builtin_promote", "cuda", torch.float16, AutocastTestLists, None, None),
    ("methods_fp16", "cuda", torch.float16, AutocastTestLists, torch.float16, None),
    ("methods_fp32", "cuda", torch.float16, AutocastTestLists, torch.float32, None),
    ("nn_fp16", "cuda", torch.float16, AutocastTestLists, torch.float16, torch._C._nn),
    ("nn_fp32", "cuda", torch.float16, AutocastTestLists, torch.float32, torch._C._nn),
    ("linalg_fp16", "cuda", torch.float16, AutocastTestLists, torch.float16, torch._C._linalg),
    ("torch_16", "cpu", torch.bfloat16, AutocastCPUTestLists, torch.bfloat16, torch),
    ("torch_fp32", "cpu", torch.bfloat16, AutocastCPUTestLists, torch.float32, torch),
    ("torch_need_autocast_promote", "cpu", torch.bfloat16, AutocastCPUTestLists, torch.float32, torch),
    ("torch_expect_builtin_promote", "cpu", torch.bfloat16, AutocastCPUTestLists, None, torch),
    ("nn_16", "cpu", torch.bfloat16, AutocastCPUTestLists, torch.bfloat16, torch._C._nn),
    ("nn_fp32", "cpu", torch.bfloat16, AutocastCPUTestLists, torch.float32, torch._C._nn),
]


def rows(lists: Any, name: str) -> Iterable[tuple[str, tuple[Any, ...], dict[str, Any], torch.dtype | None]]:
    """(operation, arguments, keyword arguments, listed result dtype) of each row that can run here."""
    for row in getattr(lists, name):
        operation, arguments, *rest = row
        if operation in NOT_HERE:
            continue
        keywords = next((item for item in rest if isinstance(item, dict)), {})
        listed = next((item for item in rest if isinstance(item, torch.dtype)), None)
        yield operation, tuple(to_device(arguments)), keywords, listed


def to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("jax")
    return type(value)(map(to_device, value)) if isinstance(value, list | tuple) else value


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype) for item in value)
    return value


def call(module: ModuleType | None, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if module is not None and hasattr(module, operation):
        return getattr(module, operation)(*arguments, **keywords)
    return getattr(arguments[0], operation)(*arguments[1:], **keywords)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, up to which NaN it is."""
    return one.dtype is other.dtype and bool(torch.isclose(one.cpu(), other.cpu(), 0, 0, equal_nan=True).all())


@pytest.fixture(scope="module")
def lists():
    xla_amp.xla_device()
    torch.manual_seed(0)
    return {cls: cls("cpu") for cls in (AutocastTestLists, AutocastCPUTestLists)}


@pytest.mark.filterwarnings("ignore")  # deprecated spellings among the listed operations
@pytest.mark.parametrize(
    ("name", "policy", "low", "cls", "expected", "module"), LISTS, ids=[f"{row[1]}-{row[0]}" for row in LISTS]
)
def test_torchs_list(lists, name, policy, low, cls, expected, module):
    wrong = []
    for number, (operation, arguments, keywords, listed) in enumerate(rows(lists[cls], name)):
        row = f"{operation}, row {number}"
        may_lack = contextlib.suppress(MissingLoweringError) if operation in MAY_LACK_A_LOWERING else NOTHING
        results = []
        with may_lack, autocast("xla", dtype=low, policy=policy):
            results.append(call(module, operation, arguments, keywords))
            if module is not None and hasattr(torch.Tensor, operation) and isinstance(arguments[0], torch.Tensor):
                results.append(getattr(arguments[0], operation)(*arguments[1:], **keywords))
        found = tensors(results)
        if wanted := listed or expected:
            wrong += [f"{row}: {tensor.dtype}, listed {wanted}" for tensor in found if tensor.dtype != wanted]
        if expected is not None and results:
            control = tensors([call(module, operation, cast(arguments, expected), keywords)] * len(results))
            if not all(same(*pair) for pair in zip(found, control, strict=True)):
                wrong.append(f"{row}: not what casting by hand gives")
    assert wrong == []


def test_torchs_banned_operations(lists):
    banned = list(lists[AutocastTestLists].banned)
    assert banned
    for operation, arguments, module in banned:
        with autocast("xla", policy="cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, operation)(*to_device(arguments))


def test_the_comparison_can_fail(lists):
    matrix = torch.linspace(1, 2, 64, device="jax")
    with autocast("xla", dtype=torch.float16, policy="cuda"):
        result = torch.exp(matrix.half())
    assert not same(result, torch.exp(matrix))
