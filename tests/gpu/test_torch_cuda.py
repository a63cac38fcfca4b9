"""`xla_amp.autocast` and the scaler on torch's own CUDA device, beside torch's; on its CPU where there is no CUDA.

In a process that has not started the lazy device: torch takes that for its accelerator, and CUDA's autograd fails.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch_lists
from torch.utils._pytree import tree_leaves

import xla_amp

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_ROW = ("einsum",)
"""Malformed in torch: its operands stand where others have options."""


@pytest.fixture(autouse=True)
def _alone() -> None:
    if DEVICE == "cuda" and torch._C._get_privateuse1_backend_name() == "jax":
        pytest.skip("the lazy device has started in this process: run this file alone")


def results(operation: str, module: object, arguments: tuple, options: dict) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    if module is None:
        made = getattr(arguments[0], operation)(*arguments[1:], **options)
    else:
        made = getattr(module, operation)(*arguments, **options)
    return (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_every_entry_of_torchs_lists_gives_what_torch_gives(low):
    """Some of CUDA's kernels add in an order that changes."""
    compared, different = 0, []
    for name, operation, arguments, _, options in torch_lists.calls(DEVICE, low, DEVICE):
        call = (operation, options["module"], arguments, options["add_kwargs"])
        if operation in NO_ROW:
            continue
        with warnings.catch_warnings(), contextlib.ExitStack() as region:
            warnings.simplefilter("ignore")  # deprecated spellings among the listed operations
            region.enter_context(torch.autocast(DEVICE, dtype=low))
            try:
                wanted = list(results(*call))
            except (RuntimeError, TypeError):  # not on this device
                continue
        with warnings.catch_warnings(), xla_amp.autocast(DEVICE, dtype=low):
            warnings.simplefilter("ignore")
            got = list(results(*call))
        compared += 1
        for a, b in zip(got, wanted, strict=True):
            if a.dtype is not b.dtype or not torch.allclose(a.float(), b.float(), 1e-2, 1e-2, equal_nan=True):
                different.append((name, operation))
    assert different == []
    assert compared > 50


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_training_run_has_torchs_bits(low):
    """The first steps overflow in float16: both scalers skip them."""
    losses = []
    for library in (torch.amp, xla_amp):
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)
        model = torch.nn.Sequential(*layers).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = library.GradScaler(DEVICE, init_scale=2.0**20)
        x, y = torch.randn(512, 64, device=DEVICE), torch.randint(10, (512,), device=DEVICE)
        seen = []
        for _ in range(30):
            optimizer.zero_grad()
            with library.autocast(DEVICE, dtype=low):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.item())
        losses.append([*seen, scaler.get_scale()])
    assert losses[0] == losses[1]
    assert losses[0][-2] < losses[0][0]
