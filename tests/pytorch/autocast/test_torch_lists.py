"""PyTorch's own lists of operations that autocast must handle, through PyTorch's own procedure, on the lazy device.

The procedure (`TestAutocast._run_autocast_outofplace`) calls each operation as a function and as a method, checks the
dtype and autocast's state around the call, and demands bit for bit what casting by hand outside autocast gives.  It
opens its regions through `torch.amp.autocast`; here that name is ours, so that a policy can be chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists, TestAutocast
from torch.utils._pytree import tree_map_only

import xla_amp

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "cudnn_convolution": "an operation of CUDA builds",
        "cudnn_convolution_transpose": "an operation of CUDA builds",
        "einsum": "malformed in torch: its operands stand where the procedure reads whether to skip the row",
    }
)
"""Listed operation -> why this device, or torch itself, does not run it."""

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

COUNTED = 37
"""Operations of torch's CPU lists that need autocast; torch's own CPU kernels pass all of them."""


def calls(lists: Any, name: str, low: torch.dtype) -> Iterator[tuple[str, Any, dict[str, Any], torch.dtype | None]]:
    """(operation, arguments, keywords, listed result dtype) of each row, as torch's own tests read them."""
    pairs = name in IN_PAIRS and isinstance(lists, AutocastCPUTestLists)
    for operation, *rest in getattr(lists, name):
        if operation in NOT_HERE:
            continue
        arguments = rest[1] if pairs and low is FP16 else rest[0]
        listed = next((item for item in rest if isinstance(item, torch.dtype)), None)
        keywords = next((item for item in rest if isinstance(item, dict)), {})
        yield operation, on_device(arguments), keywords, listed


def on_device(arguments: Any) -> Any:
    # The lists are made on the CPU: drawing hundreds of tensors on the device would be one program, slow to compile.
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("jax"), arguments)


@pytest.fixture(scope="module")
def lists():
    xla_amp.xla_device()
    torch.manual_seed(0)
    return {"cpu": AutocastCPUTestLists("cpu"), "cuda": AutocastTestLists("cpu")}


@pytest.fixture
def procedure(monkeypatch) -> Callable[..., Callable[..., None]]:
    """Torch's procedure under a policy."""
    ours = xla_amp.autocast

    def under(policy: str) -> Callable[..., None]:
        def region(device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> Any:
            return ours(device_type, dtype, enabled, policy=policy)

        monkeypatch.setattr(torch.amp, "autocast", region)
        return functools.partial(TestAutocast()._run_autocast_outofplace, device="jax")

    return under


def run(
    procedure: Callable[..., None], lists: Any, name: str, run_as: torch.dtype, low: torch.dtype, module: Any
) -> tuple[int, list[str]]:
    """How many rows there are, and what went wrong in which."""
    rows, wrong = 0, []
    for operation, arguments, keywords, listed in calls(lists, name, low):
        rows += 1
        try:
            procedure(operation, arguments, run_as, out_type=listed, module=module, add_kwargs=keywords, amp_dtype=low)
        except Exception as error:
            wrong.append(f"{operation}: {type(error).__name__}: {error}")
    return rows, wrong


@pytest.mark.filterwarnings("ignore")  # deprecated spellings among the listed operations
@pytest.mark.parametrize(("policy", "low"), [("cpu", BF16), ("cpu", FP16), ("cuda", FP16)], ids=str)
def test_torchs_lists(lists, procedure, policy, low):
    needed = 0
    wrong: dict[str, list[str]] = {}
    for name, run_as, module in CPU_LISTS if policy == "cpu" else CUDA_LISTS:
        rows, problems = run(procedure(policy), lists[policy], name, run_as or low, low, module)
        needed += 0 if "builtin" in name else rows
        if problems:
            wrong[name] = problems
    assert wrong == {}
    if policy == "cpu":
        assert needed == COUNTED


def test_torchs_banned_operations(lists):
    banned = list(lists["cuda"].banned)
    assert banned
    for operation, arguments, module in banned:
        arguments = on_device(arguments)
        with xla_amp.autocast("xla", policy="cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, operation)(*arguments)


def test_the_procedure_can_fail(lists, procedure):
    """Rules of another device: on CUDA softmax gives float32 and relu is not cast; the `tpu` table casts relu."""
    matrix = torch.rand(8, 8, device="jax")
    procedure("cuda")("mm", (matrix, matrix), FP16, amp_dtype=FP16)
    with pytest.raises(AssertionError, match=r"produced torch\.float32, should produce torch\.float16"):
        procedure("cuda")("relu", (matrix,), FP16, amp_dtype=FP16)
    with pytest.raises(AssertionError, match="did not match control"):
        procedure("cuda")("exp", (matrix.half(),), FP16, out_type=FP32, amp_dtype=FP16)
