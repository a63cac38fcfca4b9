"""Views, aliases and in-place writes against the CPU, also of two thousand random programs, bit for bit."""

from __future__ import annotations

import random
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


# ---- random programs -------------------------------------------------------------------------------------------------

DTYPES = (torch.int64, torch.int32, torch.float32)


class Pair:
    """The same tensors twice: operation by operation on the CPU and on the device."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        self.cpu: list[torch.Tensor] = []
        self.lazy: list[torch.Tensor] = []
        self.did: list[str] = []

    def add(self, cpu: torch.Tensor, lazy: torch.Tensor) -> None:
        self.cpu.append(cpu)
        self.lazy.append(lazy)

    def new(self) -> None:
        shape = [self.random.choice((1, 2, 3, 4)) for _ in range(self.random.randint(0, 3))]
        dtype = self.random.choice(DTYPES)
        values = torch.tensor([self.random.randint(-9, 9) for _ in range(torch.Size(shape).numel())], dtype=dtype)
        self.add(values.view(shape), values.view(shape).to("jax"))

    def pick(self) -> int:
        return self.random.randrange(len(self.cpu))

    def view(self) -> None:
        i = self.pick()
        x = self.cpu[i]
        choice = self.random.randrange(9)
        dim = self.random.randrange(max(x.dim(), 1))
        extent = x.shape[dim] if x.dim() else 1
        match choice:
            case 0 if x.dim() > 1:
                call = ("transpose", dim, self.random.randrange(x.dim()))
            case 1 if x.dim() and extent:
                call = ("select", dim, self.random.randrange(extent))
            case 2 if x.dim():
                start = self.random.randint(0, extent)
                call = ("narrow", dim, start, self.random.randint(0, extent - start))
            case 3:
                call = ("unsqueeze", self.random.randint(0, x.dim()))
            case 4:
                call = ("expand", self.random.randint(1, 3), *x.shape)
            case 5 if x.dim():
                call = ("unfold", dim, self.random.randint(1, max(extent, 1)), self.random.randint(1, 2))
                if call[2] > extent:
                    return
            case 6 if x.is_contiguous():
                call = ("view", -1) if x.numel() else ("view", *x.shape)
            case 7 if x.dim() > 1:
                call = ("diagonal", self.random.choice((-1, 0, 1)), 0, x.dim() - 1)
            case 8 if x.is_contiguous() and x.dim() and x.dtype is torch.float32:
                call = ("view", torch.int32)
            case _:
                call = ("detach",)
        self.did.append(f"t{len(self.cpu)} = t{i}.{call[0]}{call[1:]}")
        self.add(getattr(x, call[0])(*call[1:]), getattr(self.lazy[i], call[0])(*call[1:]))

    def write(self) -> None:
        i, j = self.pick(), self.pick()
        target, source = self.cpu[i], self.cpu[j]
        if any(s == 0 and e > 1 for e, s in zip(target.shape, target.stride(), strict=True)):
            return
        if _shares_a_place(target) or target.dtype != source.dtype:
            return
        name = self.random.choice(("copy_", "add_", "sub_", "neg_", "fill_", "add_number", "zero_", "setitem"))
        if name in ("copy_", "add_", "sub_") and (
            target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            or not _fits(source.shape, target.shape)
        ):
            name = "neg_"
        self.did.append(f"t{i}.{name}(t{j})")
        for x, y in ((target, source), (self.lazy[i], self.lazy[j])):
            match name:
                case "copy_" | "add_" | "sub_":
                    getattr(x, name)(y)
                case "fill_":
                    x.fill_(3)
                case "add_number":
                    x.add_(2)
                case "setitem":
                    x[(..., slice(1)) if x.dim() else ...] = 5
                case _:
                    getattr(x, name)()

    def compute(self) -> None:
        i, j = self.pick(), self.pick()
        a, b = self.cpu[i], self.cpu[j]
        if not _fits(a.shape, b.shape) or a.dtype != b.dtype:
            self.did.append(f"t{len(self.cpu)} = t{i}.clone()")
            self.add(a.clone(), self.lazy[i].clone())
            return
        self.did.append(f"t{len(self.cpu)} = t{i} - t{j}")
        self.add(a - b, self.lazy[i] - self.lazy[j])

    def forget(self) -> None:
        if len(self.cpu) > 3:
            i = self.pick()
            self.did.append(f"del t{i}")
            del self.cpu[i], self.lazy[i]

    def rebind(self) -> None:
        i, j = self.pick(), self.pick()
        if self.cpu[i].dtype == self.cpu[j].dtype:
            self.did.append(f"t{i}.data = t{j}")
            self.cpu[i].data = self.cpu[j]
            self.lazy[i].data = self.lazy[j]

    def flush(self) -> None:
        self.did.append("sync")
        engine.sync()

    def read(self) -> None:
        i = self.pick()
        self.did.append(f"read t{i}")
        self.same(i)

    def same(self, i: int) -> None:
        got, expected = self.lazy[i].cpu(), self.cpu[i]
        # int32 views of float32 may hold the bits of NaN, so bits are compared
        alike = (got.dtype, got.shape) == (expected.dtype, expected.shape) and torch.equal(_bits(got), _bits(expected))
        if not alike:
            pytest.fail("\n".join([*self.did, f"t{i}: got {got}, expected {expected}"]))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32) if x.dtype is torch.float32 else x


def _shares_a_place(x: torch.Tensor) -> bool:
    if x.numel() == 0:
        return False
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return len(set(torch.arange(last + 1).as_strided(x.shape, x.stride()).flatten().tolist())) != x.numel()


def _fits(source: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(source, target) == target
    except RuntimeError:
        return False


ACTIONS = ("view",) * 6 + ("write",) * 5 + ("compute",) * 2 + ("new", "forget", "rebind")
ROUNDS = 4


def run(seeds: range) -> list[Pair]:
    """One program per seed, about 24 actions each.

    They go side by side in rounds of random length, so that a flush or a read, which comes to each of them after a few
    separate actions, is one executable for all: compiling is what this test costs.
    """
    pairs = [Pair(random.Random(seed)) for seed in seeds]
    for pair in pairs:
        pair.new()
        pair.new()
    for turn in range(ROUNDS):
        for pair in pairs:
            for _ in range(pair.random.randint(3, 9)):
                getattr(pair, pair.random.choice(ACTIONS))()
        for pair in pairs:
            pair.flush() if turn % 2 == 0 else pair.read()
    return pairs


@pytest.mark.parametrize("group", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))])
def test_random_programs(device: torch.device, group: int) -> None:
    """A hundred programs each: two thousand in all."""
    for pair in run(range(100 * group, 100 * group + 100)):
        for i in range(len(pair.cpu)):
            pair.same(i)
