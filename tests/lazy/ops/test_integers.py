"""Integer powers, conversions to integers, and reductions of nothing: as torch on the CPU where C++ defines them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BASES = (0, 1, -1, 2, -2, 3, 7, -7, 100, 127, -128)
EXPONENTS = (0, 1, 2, 5, 8, 31, 32, 63, 64, 65, 100, 127, -1, -2, -64)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_powers_wrap_around(device: torch.device, dtype: torch.dtype) -> None:
    base = torch.tensor(BASES).to(dtype)[:, None].repeat(1, len(EXPONENTS))
    exponent = torch.tensor(EXPONENTS).to(dtype).repeat(len(BASES), 1)
    there = base.to(device), exponent.to(device)
    got = [there[0] ** there[1], 3 ** there[1], *(there[0] ** n for n in (0, 3, 17, 64, 127))]
    want = [base**exponent, 3**exponent, *(base**n for n in (0, 3, 17, 64, 127))]
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x.cpu(), y)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_small_integers_wrap_around(device: torch.device, source: torch.dtype) -> None:
    """Values that int32 holds; torch converts to int8 and int16 by way of it on every device."""
    x = torch.tensor(
        [0, -1.5, 2.7, 127.9, 128, 129.5, -128.9, -129, 200, 255.5, 257.5, -300, 32768, -32769, 65535, 1e6]
    )
    x = x[x.abs() < 60000].to(source) if source is torch.float16 else x.to(source)
    for dtype in INTEGERS:
        assert torch.equal(x.to(device).to(dtype).cpu(), x.to(dtype)), dtype


def test_large_integers_saturate(device: torch.device) -> None:
    """Undefined in C++: x86 gives the least integer; CUDA, ARM and XLA saturate, and NaN is 0."""
    x = torch.tensor([3e9, -3e9, float("inf"), -float("inf"), float("nan")]).to(device)
    limits = torch.iinfo(torch.int32)
    assert x.to(torch.int32).tolist() == [limits.max, limits.min, limits.max, limits.min, 0]
    limits = torch.iinfo(torch.int64)
    assert x.long().tolist() == [3_000_000_000, -3_000_000_000, limits.max, limits.min, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_the_median_of_nothing_is_nan(device: torch.device, name: str, dtype: torch.dtype) -> None:
    assert getattr(torch.empty(0, 3, dtype=dtype, device=device), name)().isnan()


def test_denormals_are_zero(device: torch.device) -> None:
    """XLA:CPU flushes denormals of float32, as README says; copies keep their bits."""
    tiny = torch.tensor([1e-40, -1e-40])
    there = tiny.to(device)
    assert torch.equal(there.clone().cpu(), tiny)
    assert (there == 0).tolist() == [True, True]
    assert (there * 2**20).tolist() == [0, 0]


ACCEPTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.clamp(0, 3),
    "clamp of numbers with a fraction": lambda x: x.clamp(0.5, 3),
    "clamp in place": lambda x: x.clone().clamp_(min=2),
    "clamp by tensors": lambda x: x.clamp(x.new_ones(()), x.new_full((), 3)),
    "linspace": lambda x: torch.linspace(x[0], x[4], 5, device=x.device),
    "linspace of floats": lambda x: torch.linspace(x[0].float(), x[4].float(), 5, device=x.device),
    "soft_margin_loss": lambda x: torch.nn.functional.soft_margin_loss(x.float(), x),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_cpu_accepts_is_accepted(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.arange(5).to(dtype)
    try:
        expected = ACCEPTED[name](x)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            ACCEPTED[name](x.to(device))
        return
    found = ACCEPTED[name](x.to(device))
    assert found.dtype == expected.dtype
    assert torch.allclose(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_bernoulli_fills_integers(dtype: torch.dtype, device: torch.device) -> None:
    assert 300 < int(torch.zeros(1000, dtype=dtype, device=device).bernoulli_(0.5).sum()) < 700
