"""Packed sequences: the values of torch's CPU, and one program for each padded shape whatever the lengths."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import xla_amp
from xla_amp import lazy as engine
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.ops import packed as ours
from xla_amp.testing import counts

NETWORKS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
LENGTHS = [3, 6, 1, 4]
TOLERANT = {"rtol": 2e-5, "atol": 2e-6}


def padded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def spread(results: Any) -> Tensor:
    """A loss in which each element counts differently."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    return sum((x * torch.linspace(1, 2, x.numel()).view(x.shape).to(x.device)).sum() for x in leaves)


def results(program: Callable[[nn.Module, Tensor], Any], network: nn.Module, x: Tensor, where: str) -> Any:
    """Results and gradients of parameters and input."""
    here, given = copy.deepcopy(network).to(where), x.clone().to(where).requires_grad_()
    found = program(here, given)
    spread(found).backward()
    return found, given.grad, [p.grad for p in here.parameters()]


def through(network: nn.Module, x: Tensor, lengths: Sequence[int] = LENGTHS, start: Any = None) -> Any:
    first = network.batch_first
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=first, enforce_sorted=False)
    outputs, last = network(packed, start)
    return pad_packed_sequence(outputs, batch_first=first), last


class Stack(nn.Module):
    """Two networks of one packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(5, 4), nn.GRU(4, 4, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        outputs, _ = self.first(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))
        return pad_packed_sequence(self.second(outputs)[0])[0]


class Tagger(nn.Module):
    """Computes on the rows: right, but of as many rows as the lengths add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.network, self.after = nn.Linear(5, 4), nn.LSTM(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(x, torch.tensor([6, 4, 3, 1]))
        outputs, _ = self.network(PackedSequence(self.before(packed.data), packed.batch_sizes))
        return self.after(outputs.data)


def call(network: nn.Module, x: Tensor) -> Any:
    return network(x)


def padded_in_several_ways(network: nn.Module, x: Tensor) -> Any:
    """None of the sequences is as long as `x`."""
    outputs, _ = network(pack_padded_sequence(x, [2, 4, 4, 1], enforce_sorted=False))
    ways = ({}, {"total_length": 6}, {"total_length": 8}, {"padding_value": -1.5})
    return [pad_packed_sequence(outputs, **options) for options in ways]


def packed_on_the_cpu(network: nn.Module, x: Tensor) -> Any:
    rows, last = network(pack_padded_sequence(x.detach().cpu(), torch.tensor([6, 4, 3, 1])).to(x.device))
    return rows.data, pad_packed_sequence(rows), last


CASES: list[Callable[[nn.Module, Tensor], Any]] = [
    padded_in_several_ways,
    packed_on_the_cpu,
    lambda network, x: through(network, x, start=torch.linspace(-1, 1, 12, device=x.device).view(1, 4, 3)),
    lambda network, x: network(pack_padded_sequence(x, torch.tensor([6, 6, 2, 1])))[1],
    lambda network, x: network(pack_padded_sequence(x, torch.tensor([6, 4, 4, 1])))[0].data,
    lambda network, x: pad_packed_sequence(pack_padded_sequence(x, torch.tensor([5, 4, 2, 1]))),
    lambda network, x: network(pack_sequence([x[:n, i] for i, n in enumerate((6, 3, 2, 2))]))[1],
]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_networks_and_calls_are_those_of_the_cpu(device):
    torch.manual_seed(0)
    x = padded(6, 4, 5)
    programs = [(case, nn.GRU(5, 3), x) for case in CASES]
    programs += [
        (through, nn.RNN(5, 3, bias=False, batch_first=True), padded(4, 6, 5)),
        (through, nn.RNN(5, 3, nonlinearity="relu"), x),
        (through, nn.LSTM(5, 4, 2, proj_size=2, bidirectional=True, bias=False), x),
        (call, Stack(), x),
        (call, Tagger(), x),
    ]
    assert_same(lambda where: [results(*each, where) for each in programs], **TOLERANT)


def test_padding_is_never_read(device):
    torch.manual_seed(0)
    x = padded(6, 4, 5)
    for index, length in enumerate(LENGTHS):
        x[length:, index] = float("nan")
    network = nn.LSTM(5, 3, 2, bidirectional=True)

    def gradients(where: str) -> list[Tensor]:
        here = copy.deepcopy(network).to(where)
        spread(through(here, x.to(where))).backward()
        return [p.grad for p in here.parameters()]

    assert_same(gradients, **TOLERANT)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "projection"])
def test_second_derivatives(kind, device):
    options = {"projection": {"proj_size": 2}, "GRU": {"bias": False}, "RNN": {"bidirectional": True}}.get(kind, {})

    def program(where: str) -> Any:
        torch.manual_seed(0)
        network = getattr(nn, kind, nn.LSTM)(2, 3, dtype=torch.float64, **options).to(where)
        x = padded(3, 4, 2).double().to(where).requires_grad_()
        (slope,) = torch.autograd.grad(spread(through(network, x, [2, 3, 1, 2])), x, create_graph=True)
        slope.square().sum().backward()
        return x.grad, [p.grad for p in network.parameters() if p.grad is not None]

    assert_same(program, rtol=1e-9, atol=1e-9)


def test_rows_are_a_tensor_of_their_own(device):
    """What is packed keeps its values, its gradient, and what is written to it."""

    def program(where: str) -> Any:
        x = padded(6, 4, 5).to(where).requires_grad_()
        packed = pack_padded_sequence(x * 1, torch.tensor([6, 4, 3, 1]))
        packed.data.retain_grad()
        outputs = pad_packed_sequence(packed)[0]
        outputs.square().sum().backward()
        other = x.detach().clone()
        kept = pack_padded_sequence(other, torch.tensor([6, 4, 3, 1]))
        other.zero_()
        shapes = [str(tuple(packed.data.shape)), str(packed.data.grad.shape)]
        written = pack_padded_sequence(x.detach(), torch.tensor([6, 4, 3, 1]))
        written.data[2:4] = 7.0
        detached = PackedSequence(packed.data.detach(), packed.batch_sizes)
        return (
            [packed.data, packed.data.grad, x.grad, kept.data, *shapes, written.data, pad_packed_sequence(written)[0]],
            pad_packed_sequence(detached)[0].requires_grad,
            pack_padded_sequence(x.detach().long(), torch.tensor([6, 4, 3, 1])).data.tolist(),
        )

    assert_same(program)


# -- programs ---------------------------------------------------------------------------------------------------------


OTHERS = [("tanh", True), ("relu", False), ("LSTM", True), ("GRU", False)]


def sets_of_lengths(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [[12, *torch.randint(1, 13, (3,), generator=generator).tolist()] for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "keeps"), [("LSTM", False), ("GRU", True), *(pytest.param(*row, marks=pytest.mark.full) for row in OTHERS)]
)
def test_one_program_for_each_padded_shape(name, keeps, device):
    torch.manual_seed(0)
    network = NETWORKS[name](5, 4, 2, dropout=0.1, batch_first=True, bidirectional=name == "LSTM").to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    x = padded(4, 12, 5).to(device).requires_grad_()  # as that of an embedding
    kept: list[Any] = []

    def step(lengths: list[int]) -> None:
        with xla_amp.autocast(device, torch.bfloat16):
            packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
            rows, last = network(packed)
            outputs, found = pad_packed_sequence(rows, batch_first=True)
        assert rows.data.shape == (sum(lengths), outputs.shape[-1])
        assert found.tolist() == lengths
        outputs.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if keeps:
            kept[:] = packed, rows, last, outputs
        engine.sync()

    first, *others = sets_of_lengths(6)
    step(first)
    step(first)
    with counts() as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        for lengths in others:
            step(lengths)
    assert (seen.compilations, seen.executions, seen.host_syncs) == (0, 5, 0)


def test_rows_that_programs_read_are_warned_of_once(device, monkeypatch):
    monkeypatch.setattr(ours, "_counts", set())
    x = padded(6, 4, 5).to(device)

    def read(lengths: list[int]) -> None:
        pack_padded_sequence(x, torch.tensor(lengths)).data.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read([6, 4, 3, 1])
        read([5, 5, 3, 1])  # of the same sum
    with pytest.warns(RecompileWarning, match="Pad instead"):
        read([6, 6, 6, 6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read([2, 1, 1, 1])


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_dtypes_under_autocast_are_those_of_a_padded_network(name, device):
    network = NETWORKS[name](5, 4, num_layers=2).to(device)
    x = padded(6, 4, 5).to(device)
    results = []
    for lengths in (None, [6, 4, 3, 1]):
        with xla_amp.autocast(device, torch.bfloat16):
            if lengths is None:
                outputs, last = network(x)
            else:
                rows, last = network(pack_padded_sequence(x, torch.tensor(lengths)))
                outputs = rows.data
        outputs.float().sum().backward()
        leaves = torch.utils._pytree.tree_leaves((outputs, last))
        results.append([leaf.dtype for leaf in leaves] + [p.grad.dtype for p in network.parameters()])
        network.zero_grad()
    assert results[0] == results[1]
    assert results[0][:2] == [torch.bfloat16] * 2


# -- errors -----------------------------------------------------------------------------------------------------------

BAD = {
    "not sorted": lambda x: pack_padded_sequence(x, [1, 2, 3, 4]),
    "no length": lambda x: pack_padded_sequence(x, [4, 2, 1, 0]),
    "too few": lambda x: pack_padded_sequence(x, [4, 2]),
    "total length": lambda x: pad_packed_sequence(pack_padded_sequence(x, [4, 2, 1, 1]), total_length=3),
    "other rows": lambda x: nn.GRU(5, 2).to(x.device)(PackedSequence(x[:, 0], torch.tensor([4, 3]))),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_torch(name, device):
    with pytest.raises((RuntimeError, ValueError)) as expected:
        BAD[name](padded(6, 4, 5))
    with pytest.raises(type(expected.value)) as found:
        BAD[name](padded(6, 4, 5).to(device))
    assert str(found.value).partition("\n")[0] == str(expected.value).partition("\n")[0]
