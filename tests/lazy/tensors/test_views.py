"""Views, aliases and in-place writes against the CPU.  Values are small whole numbers, so equality is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same

from xla_amp import lazy as engine
from xla_amp.lazy.graph.trace import trace


def numbers(*shape: int, where: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape).to(where)


# ---- reading through views -------------------------------------------------------------------------------------------


def another_dtype(where: str) -> Any:
    x = numbers(2, 4, where=where)
    x.view(torch.int32)[0, 1] = 0x40490FDB  # pi
    x[1].view(torch.int16)[3] = 0x4040  # upper half of 3
    y = torch.ones(3, dtype=torch.bool).to(where)
    y.view(torch.uint8)[1] = 0
    z = numbers(4, where=where, dtype=torch.int64)
    z.view(torch.int32)[::2] += 1
    read = [x.view(t) for t in (torch.int32, torch.uint8, torch.float64, torch.bfloat16)]
    return x, y, z, read, x[1].view(torch.int16)


def parts_of_complex_numbers(where: str) -> Any:
    x = torch.complex(torch.arange(4.0), torch.arange(4.0) + 10).to(where)
    pairs = torch.arange(6.0).view(3, 2).to(where)
    c = torch.view_as_complex(pairs)
    torch.view_as_real(x)[1, 1] = 7
    x.real[3] = -1
    pairs[0, 0] = 5
    return x, x.real, x.imag, torch.view_as_real(x), c, x.conj(), x.conj().imag, x.real.neg()


# ---- writing through views -------------------------------------------------------------------------------------------


def setitem_forms(where: str) -> Any:
    x = numbers(4, 5, where=where)
    x[0] = 1
    x[1, 2] = torch.tensor(50.0)
    x[2:, 1:3] = x[:2, 3:]
    x[..., 4] = x[:, 0] * 2
    x[3][0] = 77
    x[:] = x + 1
    return x


def copy_converts_and_broadcasts(where: str) -> Any:
    x = torch.zeros(3, 4, dtype=torch.int32).to(where)
    x.copy_(torch.tensor([1.9, -2.9, 3.0, 0.5]).to(where))
    y = torch.zeros(2, 2).to(where)
    y[0].copy_(torch.tensor(3).to(where))
    y[1].copy_(torch.tensor([5, 6]))  # from the CPU
    return x, y


# ---- who shares with whom --------------------------------------------------------------------------------------------


def results_that_share_and_copies(where: str) -> Any:
    x, leaf = numbers(2, 3, where=where), numbers(3, where=where).requires_grad_()
    shared = x.reshape(6), x.to(torch.float32)
    copied = x.t().reshape(6), x.to(torch.float32, copy=True)
    x.add_(1)
    leaf.data.add_(1)
    leaf.detach()[0] = 9
    return shared, copied, shared[1] is x, leaf


def swapped_tensors(where: str) -> Any:
    a, b = torch.zeros(2).to(where), numbers(3, where=where)
    held = b[1:]
    held.add_(1)
    del held
    torch.utils.swap_tensors(a, b)
    a.add_(1)
    return a, b


def set_forms(where: str) -> Any:
    a, b = torch.zeros(2, 3).to(where), numbers(6, where=where)
    a.set_(b)
    c = torch.empty(0, device=where).set_(b.untyped_storage(), 1, (2, 2), (2, 1))
    d = torch.empty(0, device=where).set_(b.untyped_storage())
    e = torch.ones(3, device=where).set_()
    b[1] = 100
    return a, b, c, d, tuple(e.shape)


def resize_keeps_what_was_there(where: str) -> Any:
    a = numbers(6, where=where)
    view = a[2:]
    a.resize_(2, 2)
    a[0, 0] = -1
    first = a.clone()
    a.resize_(3, 3)
    a.view(-1)[6:] = 0  # what the new memory holds is undefined
    return first, a, tuple(a.shape), view.clone()[:1]


def out_variants(where: str) -> Any:
    x, y = numbers(4, where=where), numbers(4, where=where) + 1
    whole, part, empty = torch.zeros(4).to(where), torch.zeros(2, 8).to(where), torch.empty(0, device=where)
    narrow = torch.zeros(4, dtype=torch.float64).to(where)
    returned = torch.add(x, y, out=whole)
    torch.mul(x, y, out=part[1, ::2])
    torch.sub(x, y, out=empty)
    torch.add(x, y, alpha=2, out=narrow)
    torch.add(x, x, out=x)
    return whole, returned is whole, part, empty, narrow, x


def autograd_through_writes(where: str) -> Any:
    w = torch.ones(4, 4).to(where).requires_grad_()
    y = w * 2
    y[1:3].mul_(3)
    y.view(16)[0] = 7
    y.t()[2].add_(w[0])
    y[:, 3] = w[:, 0] * w[:, 1]
    (y * y).sum().backward()
    return w.grad, y


@pytest.mark.parametrize(
    "program",
    [
        another_dtype,
        parts_of_complex_numbers,
        setitem_forms,
        copy_converts_and_broadcasts,
        results_that_share_and_copies,
        swapped_tensors,
        set_forms,
        resize_keeps_what_was_there,
        out_variants,
        autograd_through_writes,
    ],
)
def test_same_as_the_cpu(device: torch.device, program: Callable[[str], Any]) -> None:
    assert_same(program)


# ---- what must not cost anything -------------------------------------------------------------------------------------


def test_a_view_records_nothing_until_it_is_read(device: torch.device) -> None:
    x = numbers(4, 6, where="jax")
    engine.sync()
    view = x[1:3].t()[::2].unsqueeze(0)
    assert not trace.code
    view + 1
    assert trace.count == 3  # the buffer, one strided read however long the chain, the addition


def test_uploaded_and_downloaded_tensors_do_not_follow_their_sources(device: torch.device) -> None:
    source = torch.zeros(1000)
    x = source.to(device)
    source.fill_(1)
    assert x.sum().item() == 0
    host = x.cpu()
    host.fill_(1)
    assert x.sum().item() == 0
    x.fill_(2)
    engine.sync()
    assert host.sum().item() == 1000


# ---- mistakes --------------------------------------------------------------------------------------------------------


TWICE = "more than one element of the written-to tensor refers to a single memory"
MISTAKES: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda x: x.view(-1).as_strided((4,), (5,), 0) + 1, "out of bounds for storage of size 6"),
    (lambda x: x.view(-1).as_strided((4,), (5,), 0).zero_(), "out of bounds for storage of size 6"),
    (lambda x: x.view(4, 2), "invalid for input of size 6"),
    (lambda x: x.t().view(6), "view size is not compatible"),
    (lambda x: x[2], "out of bounds"),
    (lambda x: x.unfold(1, 4, 1), "maximum size for tensor at dimension 1 is 3 but size is 4"),
    (lambda x: x[:1].expand(4, 3).copy_(torch.arange(3.0, device=x.device)), TWICE),
    (lambda x: x[:1].expand(4, 3).add_(torch.arange(3.0, device=x.device)), TWICE),
    (lambda x: x[:1].expand(4, 3).copy_(1.0), TWICE),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes_are_refused(device: torch.device, mistake: Callable[[torch.Tensor], Any], message: str) -> None:
    x = torch.ones(2, 3, device=device)
    with pytest.raises((RuntimeError, IndexError), match=message):
        mistake(x)
    assert x.view(-1).as_strided((2,), (5,), 0).sum().item() == 2  # the twin: the last element is inside


COPIED = (1, True, 2.5, -3, 300, 2**40, float("inf"), float("nan"), 2 + 1j)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_a_number_is_copied(dtype: torch.dtype) -> None:
    where_undefined = dtype in (torch.int64, torch.uint8)  # C++ converts what an integer cannot hold as it likes

    def copied(where: str) -> list[torch.Tensor]:
        made = []
        for number in COPIED:
            if where_undefined and isinstance(number, float) and number != 2.5:
                continue
            x = torch.zeros(3, 4, dtype=dtype, device=where)
            x[1:, ::2].copy_(number)
            x[0].data.copy_(number)
            made += [x, torch.zeros((), dtype=dtype, device=where).copy_(number), x.t()[:0].copy_(number)]
        return made

    assert_same(copied)
