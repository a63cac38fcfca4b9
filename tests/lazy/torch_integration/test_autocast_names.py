"""`torch.autocast` with the names "xla" and "jax" around tensors of the lazy device."""

from __future__ import annotations

import functools
import linecache
import warnings

import forked
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import xla_amp
from xla_amp.lazy.torch_integration import autocast_names

LOW, FULL = torch.bfloat16, torch.float32
SPELLINGS = [torch.autocast, torch.amp.autocast]


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.ones(4, 4, device=xla_amp.xla_device())


def states() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in autocast_names.NAMES]


@pytest.fixture(autouse=True)
def _nothing_stays_open(matrix):
    before = states()
    yield
    assert states() == before


@pytest.mark.parametrize("name", ["xla", "jax"])
@pytest.mark.parametrize("autocast", SPELLINGS)
def test_the_rules_of_the_device(autocast, name, matrix, low_of):
    low = low_of(matrix.device)
    with autocast(name):
        assert (matrix @ matrix).dtype is low
        assert matrix.sum().dtype is FULL
        assert states() == [(True, low)] * 2
    assert (matrix @ matrix).dtype is FULL


def test_operations_gradients_and_checkpoints_are_cast_as_inside_our_region(matrix):
    def program(region, run):
        weight = torch.nn.Parameter(matrix.clone())
        with region:
            hidden = run(lambda x: torch.nn.functional.linear(x, weight).sin().relu(), matrix)
            results = hidden, hidden.exp(), hidden.mean(), torch.nn.functional.layer_norm(hidden, [4]), hidden + matrix
            loss = sum(x.sum() for x in results)
        loss.backward()
        return *results, weight.grad

    expected = program(xla_amp.autocast("xla"), lambda function, x: function(x))
    found = program(torch.autocast("xla"), functools.partial(checkpoint, use_reentrant=False))
    for ours, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("outer", "inner"), [("xla", "xla"), ("xla", "jax"), ("jax", "xla")])
def test_nested_and_disabled(outer, inner, matrix):
    with torch.autocast(outer, torch.float16):
        assert (matrix @ matrix).dtype is torch.float16
        with torch.autocast(inner, enabled=False):
            assert (matrix @ matrix).dtype is FULL
            assert not torch.is_autocast_enabled("xla")
            with torch.autocast(outer, dtype=LOW):
                assert (matrix @ matrix).dtype is LOW
            assert (matrix @ matrix).dtype is FULL
        assert states() == [(True, torch.float16)] * 2
        assert (matrix @ matrix).dtype is torch.float16


REGIONS = {
    "torch.autocast": lambda: torch.autocast("cpu"),
    "torch.amp.autocast, float16": lambda: torch.amp.autocast("cpu", dtype=torch.float16),
    "torch.autocast, cuda": lambda: torch.autocast("cuda"),
    "ours": lambda: xla_amp.autocast("cpu", torch.bfloat16),
    "ours, a device": lambda: xla_amp.autocast(torch.device("cpu")),
}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("dtype", [FULL, LOW, torch.float64])
def test_a_region_of_another_device_is_warned_of_once_at_its_line(name, dtype, matrix, monkeypatch):
    if name == "torch.autocast, cuda" and torch.cuda.is_available():
        pytest.skip("CUDA casts here")
    monkeypatch.setattr(autocast_names, "_told", set())
    x = matrix.to(dtype)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", xla_amp.errors.AutocastWarning)
        for _ in range(3):
            with REGIONS[name]():
                result = torch.nn.functional.linear(x, x)
    told = [warning for warning in told if warning.category is xla_amp.errors.AutocastWarning]
    assert result.dtype is dtype
    assert len(told) == (dtype is FULL)  # nothing would be cast of the others
    for warning in told:
        assert "xla_amp.autocast(xla_amp.xla_device())" in str(warning.message)
        assert linecache.getline(warning.filename, warning.lineno).strip() == "with REGIONS[name]():"


@pytest.mark.filterwarnings("error::xla_amp.errors.AutocastWarning")
def test_other_regions_of_the_cpu_are_not_warned_of(matrix):
    on_cpu, plain = torch.ones(4, 4), matrix.sum()
    with torch.autocast("cpu"):
        assert (on_cpu @ on_cpu).dtype is LOW
        assert (on_cpu.to(matrix.device) + plain).dtype is FULL
    with torch.autocast("cpu"), xla_amp.autocast(matrix.device):
        assert (matrix @ matrix).dtype is not FULL
    with xla_amp.autocast(matrix.device), torch.autocast("cpu"):
        assert (matrix @ matrix).dtype is not FULL
    with torch.autocast("cpu", enabled=False):
        assert (matrix @ matrix).dtype is FULL


def test_a_region_around_a_loop_is_warned_of_at_its_first_step(matrix, monkeypatch):
    monkeypatch.setattr(autocast_names, "_told", set())
    weight = torch.nn.Parameter(matrix.clone())
    optimizer = torch.optim.SGD([weight], 0.1)
    with torch.autocast("cpu"):
        (weight @ matrix).sum().backward()
        with pytest.warns(xla_amp.errors.AutocastWarning, match="products inside were float32"):
            optimizer.step()


PROGRAM = """
import torch, xla_amp
region = torch.autocast("xla")  # made before the device exists
device = xla_amp.xla_device()
with region:
    print(torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)).dtype)
print(torch.is_autocast_enabled("xla"), torch.is_autocast_enabled("jax"))
"""


@pytest.mark.parametrize("installed", [False, True])
def test_with_and_without_torch_xla(tmp_path, installed):
    """`installed`: a torch_xla that can be imported, with the lazy device chosen."""
    program = PROGRAM
    if installed:
        (tmp_path / "torch_xla.py").write_text("")
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch_xla\n{PROGRAM}"
    run = forked.run(program=program, JAX_PLATFORMS="cpu", XLA_AMP_ENGINE="jax")
    assert run.stdout.split() == ["torch.bfloat16", "False", "False"]
