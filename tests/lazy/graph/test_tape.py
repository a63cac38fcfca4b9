"""The decoded view of a trace."""

from __future__ import annotations

import pytest
import torch

import xla_amp
from xla_amp.lazy.graph.tape import Position, Tape
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.tensors import tensor_io


@pytest.fixture
def device():
    device = xla_amp.xla_device()
    xla_amp.sync()
    yield device
    xla_amp.sync()


def number(tensor):
    return tensor_io.read(tensor)[0]


def test_nodes_know_their_numbers_and_places(device):
    x = torch.ones(3, device=device)
    xla_amp.sync()
    y = torch.rand(3, device=device) + x * 2.5
    tape = Tape(trace.code)
    read = next(node for node in tape if node.is_parameter)
    random = next(node for node in tape if node.draw)
    product, total = (next(node for node in tape if node.instruction.name.startswith(name)) for name in ("mul", "add"))
    assert trace.parameters[read.at.parameters] is tensor_io.buffer_of(x)
    assert list(random.draw) == [0, 0]
    assert trace.floats[product.floats] == [2.5]
    assert list(total.inputs) == [random.first, product.first]
    assert list(total.results) == [number(y)]
    assert trace.code[total.at.code] == total.instruction.id
    assert [spec.shape for spec in tape.specs()] == [(3,)] * trace.count


def test_a_part_begins_where_the_other_ends(device):
    x = torch.ones(3, device=device)
    xla_amp.sync()
    y = x + 1
    at = Position.now()
    z = (y * 3).exp() + x
    whole = Tape(trace.code)
    before, after = whole.split(at)
    assert [*before, *after] == whole.nodes
    assert Tape.since(at).nodes == after.nodes
    assert after.earlier() == [number(y), number(x)]
    assert after.nodes[-1].first == number(z)


def test_without_keeps_all_numbers(device):
    x = torch.ones(3, device=device)
    xla_amp.sync()
    y = torch.rand(3, device=device) * x
    z = y.exp() + 1
    tape = Tape(trace.code)
    lost = Tape(tape.without({number(y)}))
    assert [node.results for node in lost] == [node.results for node in tape]
    assert [node.draw for node in lost] == [node.draw for node in tape]
    changed = [new for old, new in zip(tape, lost, strict=True) if old.instruction is not new.instruction]
    assert [(node.first, list(node.inputs)) for node in changed] == [(number(y), [])]
    assert number(z) == lost.nodes[-1].first


def test_renumbered_keeps_what_is_left_out(device):
    weight, bias = torch.ones(2, 2, device=device), torch.ones(2, device=device)
    torch.nn.functional.layer_norm(weight, (2,), None, bias)
    tape = Tape(trace.code)
    assert any(-1 in node.inputs for node in tape)
    assert tape.renumbered(lambda number: number) == trace.code
    shifted = Tape(tape.renumbered(lambda number: number + 5))
    for old, new in zip(tape, shifted, strict=True):
        assert [n if n < 0 else n + 5 for n in old.inputs] == list(new.inputs)
