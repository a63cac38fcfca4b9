"""The trace: one executable per flush, a cache that numbers do not miss, only live results, donated dead memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import forked
import pytest
import torch
from harness import array_behind

from xla_amp import lazy as engine
from xla_amp.lazy.programs import execute
from xla_amp.testing import counts as counted


def compilations_of(program: Callable[[Any], Any], inputs: Iterable[Any]) -> list[int]:
    """Executables built in each run of `program`, one flush a run."""
    built = []
    for value in inputs:
        with counted() as counts:
            kept = program(value)
            engine.sync()
        del kept
        assert counts.executions == 1, f"{counts.executions} executables for {value!r}"
        built.append(counts.compilations)
    return built


# ---- one executable --------------------------------------------------------------------------------------------------


def test_only_a_cut_runs_what_was_recorded_once(device: torch.device) -> None:
    x = torch.arange(6.0).view(2, 3).to(device)
    with counted() as counts:
        y = (x + 1) * 2 - x
        y.neg_()
    assert counts.executions == 0
    assert array_behind(y) is None
    for wait in (False, True):
        y = y + 1
        with counted() as counts:
            engine.sync(wait=wait)
        assert (counts.executions, counts.host_syncs, counts.device_to_host) == (1, int(wait), 0)
    with counted() as counts:
        assert y.tolist() == [[0, -1, -2], [-3, -4, -5]]
        assert y.t()[1].tolist() == [-1, -4]
        assert y[1, 2].item() == -5
    assert counts.executions == 0
    assert counts.host_syncs == counts.device_to_host == 3
    y = y + 1
    with counted() as counts:
        assert y.sum().item() == -9
        assert y.cpu()[0, 0] == 1
        str(y)
    assert counts.executions == 1


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_another_shape_dtype_or_order_is_another_program(device: torch.device) -> None:
    tensors = [torch.ones(2, 9), torch.ones(9, 2), torch.ones(2, 9, dtype=torch.float64), torch.ones(2, 9).t()]
    on_device = [tensor.to(device) for tensor in tensors]
    assert compilations_of(lambda x: x * 3 + x, [*on_device, *on_device]) == [1, 1, 1, 0, 0, 0, 0, 0]
    x = on_device[0]
    assert compilations_of(lambda order: x + 1 if order else 1 + x * 2, [0, 1, 0, 1]) == [1, 1, 0, 0]


def test_the_start_of_a_view_is_data_from_the_second_on(device: torch.device) -> None:
    x = torch.arange(24.0).view(4, 6).to(device)
    assert compilations_of(lambda start: x[:, start : start + 2] + 1, [0, 1, 3, 1]) == [1, 1, 0, 0]
    assert (x[:, 3:5] + 1).tolist() == (torch.arange(24.0).view(4, 6)[:, 3:5] + 1).tolist()


FLOATS = (0.37, 0.0, 1.0, 0.5, -1.0, 2.0, 1e-8, float("inf"), 3.25, 1e30)
INTS = (7, 0, 1, 2, -1, 5, 10**6, 3)

LIFTED: dict[str, tuple[Callable[[torch.Tensor, Any], Any], tuple[Any, ...]]] = {
    "x * k": (lambda x, k: x * k, FLOATS),
    "x / k": (lambda x, k: x / k, FLOATS),
    "x + step": (lambda x, k: x + k, INTS),
    "alpha": (lambda x, k: torch.add(x, x, alpha=k), FLOATS[:1] + FLOATS[2:]),
    "addcdiv value": (lambda x, k: torch.addcdiv(x, x, x + 1, value=k), FLOATS[:2] + FLOATS[3:]),
    "addmm beta": (lambda x, k: torch.addmm(x, x, x, beta=k), FLOATS[:1] + FLOATS[3:]),
    "lerp": (lambda x, k: torch.lerp(x, x + 1, k), FLOATS),
    "clamp": (lambda x, k: x.clamp(min=k), FLOATS),
    "fill_": (lambda x, k: x.clone().fill_(k), FLOATS),
    "full": (lambda x, k: torch.full((2, 2), k, device="jax") + x, FLOATS),
    "scalar tensor": (lambda x, k: x * torch.tensor(k), FLOATS),
    "where": (lambda x, k: torch.where(x > 0, x, k), FLOATS),
    "x > k": (lambda x, k: x > k, FLOATS),
    "setitem": (lambda x, k: x.clone().__setitem__(0, k), FLOATS),
    "foreach scalar": (lambda x, k: torch._foreach_mul([x, x], k), FLOATS),
    "foreach scalars": (lambda x, k: torch._foreach_add([x, x], [k, k + 1]), FLOATS[:-1]),
    "masked_fill": (lambda x, k: x.masked_fill(x > 0, k), FLOATS),
}


@pytest.mark.parametrize("name", LIFTED)
def test_numbers_never_build_anew(device: torch.device, name: str) -> None:
    program, values = LIFTED[name]
    host = torch.arange(4.0).view(2, 2) + 0.5
    x = host.to(device)
    first, *others = compilations_of(lambda value: program(x, value), values)
    assert first <= 1  # another test may have built it
    assert others == [0] * len(others)
    for value in values:
        expected, got = program(host, value) if name != "full" else value + host, program(x, value)
        for a, b in zip(_list(expected), _list(got), strict=True):
            torch.testing.assert_close(b.cpu(), a, equal_nan=True)


def _list(value: Any) -> list[torch.Tensor]:
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


def test_numbers_of_another_kind_do_build_anew(device: torch.device) -> None:
    """The twin: the count sees a new executable, and 1, 1.0 and True are not taken for each other."""
    x = torch.arange(4).to(device)
    assert compilations_of(lambda value: x + value, [1, 1.0, True, 2, 2.0]) == [1, 1, 1, 0, 0]
    assert [(x + value).dtype for value in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_default_and_explicit_dtypes_are_part_of_the_key(device: torch.device) -> None:
    low, x = torch.ones(2, 3, dtype=torch.bfloat16, device=device), torch.arange(3).to(device)
    for explicit in (None, torch.float32, None):
        assert torch.sum(low, [1], True, dtype=explicit).dtype is (explicit or torch.bfloat16)
    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            made = x * 0.5, torch.empty(2, device=device), torch.full((2,), 1.5, device=device)
        finally:
            torch.set_default_dtype(torch.float32)
        assert [each.dtype for each in made] == [default] * 3


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_only_live_values_are_outputs(device: torch.device) -> None:
    x, y, gradient = (torch.full((3, 7), value).to(device) for value in (1.0, 0.0, 1.0))
    layer = torch.nn.Linear(7, 2).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def chain() -> list[torch.Tensor]:
        a = x + 1
        b = a * 2
        return [a, b, b.exp().sum(0)]

    def overwritten() -> torch.Tensor:
        nonlocal gradient
        gradient.mul_(2)
        result = x - gradient
        del gradient
        return result

    def trained() -> None:
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    outputs: list[tuple[Callable[[], Any], int]] = [
        (chain, 3),
        (lambda: chain()[-1], 1),
        (lambda: (x + 1)[1:2, ::2], 1),  # a view keeps its base alive and nothing more
        (overwritten, 1),
        (trained, 2),
        (lambda: y.copy_(x), 1),
    ]
    for program, expected in outputs:
        engine.sync()
        execute.clear_programs()
        kept = program()
        engine.sync()
        del kept
        (made,) = execute.programs()
        assert len(set(made.key.wanted)) == expected, program
    assert array_behind(x) is array_behind(y)  # the value is shared, not copied
    assert y.add_(1).sum().item() == 42
    assert x.sum().item() == 21


# ---- memory handed over ----------------------------------------------------------------------------------------------


def computed(size: int, value: float = 1.0) -> torch.Tensor:
    """A tensor whose memory came from XLA (memory that came from the host cannot be given away on every platform)."""
    x = torch.full((size,), value, device="jax")
    engine.sync()
    return x


def address(x: torch.Tensor) -> int:
    return array_behind(x).unsafe_buffer_pointer()


def test_an_array_that_no_tensor_has_is_donated(device: torch.device) -> None:
    x = computed(102)
    before = address(x)
    x.add_(1)
    engine.sync()
    assert address(x) == before
    y = x + 1
    del x
    engine.sync()
    assert address(y) == before
    held = array_behind(y)
    y.add_(1)
    engine.sync()
    assert not held.is_deleted()
    assert float(held.sum()) == 3 * 102
    assert y.sum().item() == 4 * 102


# ---- memory never written --------------------------------------------------------------------------------------------


def test_memory_never_written_reads_as_zeros(device: torch.device) -> None:
    assert torch.empty(3, device=device).tolist() == [0, 0, 0]
    assert torch.empty(2, 2, dtype=torch.bool, device=device).tolist() == [[False] * 2] * 2
    assert torch.empty_strided((2, 3), (1, 2), device=device).sum().item() == 0
    x = torch.empty(4, device=device)
    x[1] = 5
    assert x.tolist() == [0, 5, 0, 0]
    assert torch.empty(0, device=device).tolist() == []


def test_memory_is_not_made_before_it_is_needed(device: torch.device) -> None:
    with counted() as counts:
        x = torch.empty(10**12, device=device)  # 4 TB
        assert x.shape == (10**12,)
        engine.sync()
    assert counts.executions == 0


# ---- the limit -------------------------------------------------------------------------------------------------------


LIMITED = """
import torch, xla_amp
from xla_amp.lazy.graph.trace import trace
from xla_amp.testing import counts

device = xla_amp.xla_device()
for line in (
    "x.add_(1)", "x = x + 1", "x.copy_(y)", "y = x[1:].clone()", "y = x.to(torch.float64)", "x[1:].add_(x[:-1])"
):
    scope = {"torch": torch, "x": torch.zeros(4).to(device), "y": torch.zeros(4).to(device)}
    code, longest = compile(line, line, "exec"), 0
    with counts() as seen:
        for _ in range(200):
            exec(code, scope)
            longest = max(longest, trace.count)
    assert longest < 60, (line, longest)
    assert seen.executions > 2 or "copy_" in line, line
    print(scope["x"].tolist())
"""


def test_a_tape_without_end_is_cut() -> None:
    done = forked.run(program=LIMITED, XLA_AMP_TAPE_LIMIT="50")
    assert done.stdout.splitlines()[:2] == ["[200.0, 200.0, 200.0, 200.0]"] * 2
