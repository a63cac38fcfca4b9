"""Two thousand random programs of views, in-place writes, reads and flushes: tensors equal the CPU's, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from xla_amp import lazy as engine

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
