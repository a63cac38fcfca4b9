"""Everything that turns a tensor into something on the host and back: printing, copying, checkpoints, loaders."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import jax
import numpy as np
import pytest
import torch
from harness import assert_same
from torch import nn

from xla_amp.errors import DeviceError
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.torch_integration import accelerator
from xla_amp.testing import counts as counted

# ---- printing --------------------------------------------------------------------------------------------------------

PRINTED: dict[str, torch.Tensor] = {
    "floats": torch.tensor([[1.0, -2.5], [1e-5, 3e6]]),
    "whole floats": torch.arange(6.0).view(2, 3),
    "integers": torch.tensor([1, -20, 300]),
    "booleans": torch.tensor([True, False]),
    "half": torch.tensor([1.5, 2.25], dtype=torch.bfloat16),
    "double": torch.tensor([0.1], dtype=torch.float64),
    "complex": torch.tensor([1 + 2j, -3.5j]),
    "scalar": torch.tensor(4.5),
    "empty": torch.empty(0),
    "empty with a shape": torch.empty(2, 0, 3),
    "large": torch.arange(2000.0),
    "special": torch.tensor([float("nan"), float("inf"), -0.0]),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_tensor_prints_as_on_the_cpu_with_its_device(device: torch.device, name: str) -> None:
    host = PRINTED[name]
    x = host.to(device)
    with counted() as counts:
        text = repr(x)
    expected = repr(host)
    assert "device='jax:0'" in text
    assert text.replace(", device='jax:0'", "").replace("\n", " ").split() == expected.replace("\n", " ").split()
    assert counts.host_syncs <= 1


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    + [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]
    + [torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)
def test_every_dtype_there_and_back(device: torch.device, dtype: torch.dtype) -> None:
    host = torch.tensor([0.0, 1.0, 1.0, 0.0]).view(2, 2).to(dtype)
    x = host.to(device)
    assert x.dtype is dtype
    assert x.cpu().dtype is dtype
    for got, want in ((x, host), (x.t(), host.t())):
        assert torch.equal(got.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    assert x.element_size() == dtype.itemsize


@pytest.mark.parametrize(
    "target", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float32, torch.uint8], ids=str
)
@pytest.mark.parametrize("source", [torch.float64, torch.float32], ids=str)
def test_casts_round_as_torchs_do(device: torch.device, source: torch.dtype, target: torch.dtype) -> None:
    """Also subnormals of float16, ties, the edge of its range, and negative numbers as bytes."""
    torch.manual_seed(0)
    tiny = [2.0**-24, 2.0**-25, 2.0**-25 * 1.01, 6.1e-5, 6.09e-5, 0.0, -0.0]
    edges = torch.tensor([65504, 65519.99, 65520, -65520, *tiny])
    spread = torch.randn(20_000, dtype=torch.float64) * 10.0 ** torch.randint(-9, 4, (20_000,))
    host = torch.cat([edges.double(), spread, (spread * 4).round() / 8 + 2.0**-11]).to(source)
    if target is torch.uint8:
        host = host.clamp(-1e6, 1e6)
    got, computed = host.to(device).to(target), (host.to(device) * 1).to(target).to(torch.float64).to(target)
    expected = host.to(target).double()
    assert torch.equal(got.cpu().double(), expected)
    assert torch.equal(computed.cpu().double(), expected)


def test_strided_and_conjugated_sources_are_uploaded_as_they_look(device: torch.device) -> None:
    base = torch.arange(12.0).view(3, 4)
    sources = [base.t(), base[:, ::2], base[1].expand(2, 4), torch.complex(base, base).conj(), base.flip(0)]
    sources.append(torch.complex(base, base).conj().imag)  # a negative view
    for source in sources:
        assert torch.equal(source.to(device).cpu(), source.resolve_conj().resolve_neg())


def test_cpu_scalars_take_part(device: torch.device) -> None:
    def program(where: str) -> Any:
        x = torch.arange(3.0).to(where)
        two = torch.tensor(2.0)
        double = torch.tensor(2.0, dtype=torch.float64)
        return x * two, two - x, x + torch.tensor(3), x / double, torch.where(x > 1, x, two), x.clone().mul_(two)

    assert_same(program)


# ---- what cannot be done with a storage that holds no bytes: an error, never a crash or garbage ----------------------


OURS = r"hold no bytes .* Use tensor.cpu\(\)"
TORCHS = "Unknown device type jax for Dlpack"
SENT = r"cannot send .* to another process .*send tensor.cpu\(\)"
EXPORTS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "capsule": (lambda x: x.__dlpack__(), DeviceError, OURS),
    "device": (lambda x: x.__dlpack_device__(), ValueError, TORCHS),
    "to_dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), DeviceError, OURS),
    "torch_to_dlpack": (lambda x: torch.to_dlpack(x), DeviceError, OURS),
    "torch": (torch.from_dlpack, ValueError, TORCHS),
    "numpy": (np.from_dlpack, DeviceError, OURS),
    "jax": (jax.dlpack.from_dlpack, ValueError, TORCHS),
    "another process": (ForkingPickler.dumps, DeviceError, SENT),
    "parameter to another process": (lambda x: ForkingPickler.dumps(nn.Parameter(x)), DeviceError, SENT),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", EXPORTS)
def test_memory_without_bytes_is_not_exported(device: torch.device, name: str) -> None:
    export, error, message = EXPORTS[name]
    with pytest.raises(error, match=message):
        export(torch.ones(4).to(device))
    export(torch.ones(4))


# ---- torch.accelerator -----------------------------------------------------------------------------------------------


def test_memory(device: torch.device) -> None:
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1000).to(device)
    assert torch.accelerator.memory_allocated(device) - before >= 4000
    assert torch.accelerator.memory_stats()["bytes_in_use"] >= 4000
    del x
    torch.accelerator.empty_cache()
    peak = torch.accelerator.max_memory_allocated()
    assert isinstance(peak, int)
    assert peak >= before + 4000
    assert torch.accelerator.max_memory_reserved() == peak
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    if hasattr(torch.accelerator, "get_memory_info"):
        with pytest.raises(DeviceError, match="keeps no statistic bytes_limit"):
            torch.accelerator.get_memory_info()
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() < peak
    x = torch.ones(50_000).to(device) * 2
    torch.accelerator.synchronize()
    del x
    assert torch.jax.max_memory_allocated() >= torch.jax.memory_allocated() + 200_000
    with pytest.raises(ValueError, match="cuda doesn't match the current accelerator jax"):
        torch.accelerator.synchronize("cuda")


def test_statistics_of_a_platform_that_keeps_them(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    counts = {"bytes_in_use": 10, "peak_bytes_in_use": 20, "bytes_limit": 100, "pool_bytes": 30}
    monkeypatch.setattr(accelerator, "memory_stats", lambda: counts)
    assert torch.accelerator.memory_allocated() == 10
    assert torch.accelerator.max_memory_allocated(device) == 20
    assert torch.accelerator.memory_reserved() == 30
    assert torch.accelerator.max_memory_reserved() == 20
    assert torch.accelerator.memory_stats()["bytes_limit"] == 100
    if hasattr(torch.accelerator, "get_memory_info"):
        assert torch.accelerator.get_memory_info() == (90, 100)


@pytest.mark.parametrize("select", ["torch.jax.set_device", "torch.accelerator.set_device_index", "torch.jax.device"])
def test_selecting_a_device(device: torch.device, select: str) -> None:
    function = operator.attrgetter(select.removeprefix("torch."))(torch)
    for good in (0, device, "jax:0"):
        function(good)
    for wrong in (5, "jax:1", torch.device("jax:5")):
        with pytest.raises(RuntimeError, match="does not exist: a process has one lazy device"):
            function(wrong)
    for wrong in (1.5, [0]):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            function(wrong)
    with pytest.raises((RuntimeError, ValueError), match="cpu"):
        function("cpu")
    function(-1)
    assert (torch.jax.current_device(), torch.accelerator.current_device_index()) == (0, 0)
    for context in (torch.jax.device(0), torch.jax.device("jax:0"), torch.accelerator.device_index(0)):
        with context:
            assert torch.ones(2, device="jax").device == device
    with pytest.raises(RuntimeError, match="does not exist"), torch.accelerator.device_index(3):
        pass


def test_streams_and_events_wait_for_the_device(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    streams = [torch.jax.current_stream(), torch.jax.Stream(), torch.accelerator.current_stream()]
    for wait in [stream.synchronize for stream in streams] + [streams[0].query, torch.jax.Event().query]:
        y = x + 1
        assert trace.code
        assert wait() in (None, True)
        assert not trace.code
        assert y.tolist() == [2.0, 2.0, 2.0]
    begin, end = (torch.jax.Event(enable_timing=True) for _ in range(2))
    begin.record()
    time.sleep(0.02)
    y = x + 1
    streams[1].record_event(end)
    assert not trace.code
    assert 20 <= begin.elapsed_time(end) < 20_000
    y = x + 1
    unmeasured = torch.jax.current_stream().record_event()
    streams[0].wait_event(unmeasured)
    unmeasured.wait()
    assert trace.code  # without timing an event ends no program
    torch.accelerator.set_stream(streams[0])
    with torch.jax.stream(streams[0]), pytest.raises(ValueError, match="both recorded"):
        begin.elapsed_time(unmeasured)
    with pytest.raises(TypeError, match="interprocess"):  # another process cannot wait for the device
        torch.jax.Event(interprocess=True)
    with pytest.raises(DeviceError, match="does not exist"):
        torch.jax.Stream("jax:2")


def test_what_the_device_module_has_and_lacks(device: torch.device) -> None:
    torch.jax.init()
    torch.manual_seed(21)
    assert torch.jax.initial_seed() == 21
    first = torch.rand(3, device=device).tolist()
    torch.jax.seed()
    assert torch.jax.initial_seed() != 21
    assert torch.rand(3, device=device).tolist() != first
    torch.jax.seed_all()
    assert torch.jax.is_bf16_supported()
    properties = torch.jax.get_device_properties(0)
    assert properties.name == torch.jax.get_device_name() == torch.jax.get_device_name("jax:0") != ""
    assert not hasattr(properties, "multi_processor_count")
    assert torch.jax.memory_reserved() == torch.jax.memory_allocated() <= torch.jax.max_memory_reserved()
    states = torch.jax.get_rng_state_all()
    first = torch.rand(3, device=device).tolist()
    torch.jax.set_rng_state_all(states)
    assert torch.rand(3, device=device).tolist() == first
    with pytest.raises(DeviceError, match="keeps no statistic bytes_limit"):
        torch.jax.mem_get_info()
    with pytest.raises(DeviceError, match="cannot be reset"):
        torch.jax.reset_accumulated_memory_stats()
    with pytest.raises(AttributeError, match=r"'torch.jax' has no attribute 'cudart'; .* has .*manual_seed"):
        torch.jax.cudart()
    for name in ("synchronize", "current_stream", "get_device_properties", "get_device_name"):
        with pytest.raises(RuntimeError, match="does not exist"):
            getattr(torch.jax, name)(3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_layout_strided_are_refused(device: torch.device) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    lazy = [part.to(device) for part in parts]
    for make in (
        lambda: torch.nested.nested_tensor(parts, device=device) * 2,
        lambda: torch.nested.as_nested_tensor(lazy) * 2,
        lambda: torch.nested.as_nested_tensor(parts, device=device) * 2,
        lambda: torch.nested.nested_tensor(parts).to(device) * 2,
        lambda: torch._nested_tensor_from_tensor_list(parts, device=device) * 2,
    ):
        with pytest.raises(DeviceError, match=r"torch\.strided do not exist .* layout=torch\.jagged"):
            make()
    assert torch.nested.nested_tensor(parts)[1].tolist() == [1.0, 1.0, 1.0]
    jagged = torch.nested.as_nested_tensor(lazy, layout=torch.jagged)
    assert (jagged * 2).values().tolist() == [2.0] * 5
