"""Every way to save and load weights of the lazy device, for every kind of weights, bit for bit.

Each way receives a module on the device and returns the state that it has after a round trip.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tree import ROOT
from torch import nn

from xla_amp import checkpoint, xla_model
from xla_amp.errors import DeviceError

State = dict[str, torch.Tensor]


class Weights(nn.Module):
    """Weights of one kind on a device, the same values at each call."""

    def __init__(self, kind: str, device: torch.device) -> None:
        super().__init__()
        base = torch.linspace(-3, 5, 12).view(3, 4)
        self.kind = kind
        if kind in ("plain", "tied"):
            self.first, self.second = nn.Parameter(base.clone()), nn.Parameter(base + 1)
            if kind == "tied":
                self.third = self.first
        elif kind == "buffers":
            self.register_buffer("mean", base.clone())
            self.register_buffer("count", torch.tensor([7, -(2**40)]))
            self.register_buffer("mask", base > 0)
            self.register_buffer("step", torch.tensor(3))
            bits = torch.tensor([0x7FC00001, 0x7F800000, -0x800000, 1, -1], dtype=torch.int32)
            self.register_buffer("floats", bits.view(torch.float32))  # a NaN with a payload, infinities, a denormal
        elif kind == "low":
            self.float16, self.brain = nn.Parameter(base.half()), nn.Parameter(base.bfloat16())
            self.register_buffer("eight", base.to(torch.float8_e4m3fn))
            self.register_buffer("complex", torch.complex(base, -base))
        elif kind == "sizes":
            self.empty, self.none = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))
            self.scalar = nn.Parameter(torch.tensor(-0.0))
            self.one = nn.Parameter(torch.tensor([[1.5]], dtype=torch.float64))
        elif kind == "large":
            self.first = self.second = nn.Parameter(torch.rand(250_000))
        self.to(device)
        if kind in ("tied", "large"):
            self.register_buffer("fourth", self.second.detach())
        elif kind == "views":  # whose storages are larger than they are, or in another order
            self.register_buffer("transposed", torch.arange(24.0, device=device).view(4, 6).t())
            self.register_buffer("strided", torch.arange(30.0, device=device)[3::2])
            self.register_buffer("row", torch.arange(12, device=device).view(3, 4)[1])


CPU = torch.device("cpu")
KINDS = ("plain", "tied", "buffers", "low", "sizes", "views")


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    host = tensor.detach().cpu().contiguous()
    return tuple(host.shape), host.dtype, host.reshape(-1).view(torch.uint8).tolist() if host.numel() else []


def blank(module: Weights, device: torch.device) -> Weights:
    """A module of the same kind with other values."""
    other = Weights(module.kind, device)
    for tensor in other.state_dict().values():
        with torch.no_grad():
            tensor.zero_()
    return other


# ---- the ways --------------------------------------------------------------------------------------------------------


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def torch_load(**options: Any) -> Callable[..., State]:
    return lambda module, *_: torch.load(saved(module.state_dict()), **options)


def torch_load_by_file(mmap: bool, location: Any) -> Callable[..., State]:
    def way(module: Weights, folder: Path, device: torch.device) -> State:
        torch.save(module.state_dict(), folder / "file.pt")
        found: State = torch.load(folder / "file.pt", mmap=mmap, map_location=location)
        return found

    return way


def load_state_dict(assign: bool, location: Any = None) -> Callable[..., State]:
    def way(module: Weights, folder: Path, device: torch.device) -> State:
        target = blank(module, device)
        target.load_state_dict(torch.load(saved(module.state_dict()), map_location=location), assign=assign)
        return target.state_dict()

    return way


def safetensors_file(where: str) -> Callable[..., State]:
    def way(module: Weights, folder: Path, device: torch.device) -> State:
        from safetensors.torch import load_file, save_file

        save_file(
            {name: value.contiguous().clone() for name, value in module.state_dict().items()}, folder / "m.safetensors"
        )
        found: State = load_file(folder / "m.safetensors", device=where if device != CPU else "cpu")
        return found

    return way


def safetensors_model(module: Weights, folder: Path, device: torch.device) -> State:
    from safetensors.torch import load_model, save_model

    save_model(module, str(folder / "m.safetensors"))
    target = blank(module, device)
    assert load_model(target, folder / "m.safetensors", device=str(device)) == (set(), [])
    return target.state_dict()


def distributed(asynchronous: bool) -> Callable[..., State]:
    def way(module: Weights, folder: Path, device: torch.device) -> State:
        import torch.distributed.checkpoint as dcp

        if asynchronous:
            dcp.async_save(module.state_dict(), checkpoint_id=folder / "dcp", no_dist=True).result()
        else:
            dcp.save(module.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
        target = blank(module, device)
        state = target.state_dict()
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        target.load_state_dict(state)
        return target.state_dict()

    return way


def orbax(module: Weights, folder: Path, device: torch.device) -> State:
    checkpoint.save({"model": module}, folder / "orbax")
    target = blank(module, device)
    checkpoint.load({"model": target}, folder / "orbax")
    return target.state_dict()


def xla_save(module: Weights, folder: Path, device: torch.device) -> State:
    xla_model.save(module.state_dict(), folder / "xm.pt")
    found: State = torch.load(folder / "xm.pt")
    return found


WAYS: dict[str, Callable[..., State]] = {
    "torch": torch_load(),
    "torch, any object": torch_load(weights_only=False),
    "torch, on the CPU": torch_load(map_location="cpu"),
    "torch, to the device by name": torch_load(map_location="jax"),
    "torch, moved by a function": torch_load(map_location=lambda storage, where: storage.to(device="jax")),
    "torch, by a mapping": torch_load(map_location={"jax:0": "cpu"}),
    "torch, from a file": torch_load_by_file(False, None),
    "torch, mapped": torch_load_by_file(True, None),
    "torch, mapped to the CPU": torch_load_by_file(True, "cpu"),
    "torch, old format": lambda m, *_: torch.load(saved(m.state_dict(), _use_new_zipfile_serialization=False)),
    "torch, whole module": lambda m, *_: torch.load(saved(m), weights_only=False).state_dict(),
    "pickle": lambda m, *_: pickle.loads(pickle.dumps(m)).state_dict(),
    "deepcopy of the module": lambda m, *_: copy.deepcopy(m).state_dict(),
    "deepcopy of the state": lambda m, *_: copy.deepcopy(m.state_dict()),
    "load_state_dict": load_state_dict(False),
    "load_state_dict from the CPU": load_state_dict(False, "cpu"),
    "load_state_dict that assigns": load_state_dict(True),
    "safetensors file": safetensors_file("jax:0"),
    "safetensors file, on the CPU": safetensors_file("cpu"),
    "safetensors model": safetensors_model,
    "torch.distributed.checkpoint": distributed(False),
    "torch.distributed.checkpoint, async": distributed(True),
    "Orbax": orbax,
    "xla_model.save": xla_save,
}
"""(module, folder, its device) -> the state after a round trip."""


NO_REFERENCE = {(way, kind) for way in ("Orbax", "xla_model.save") for kind in KINDS}  # ours, for the device
REFUSED = {
    ("safetensors model", "views"),  # not the whole of a storage
    *((way, "low") for way in ("torch, old format", "pickle")),  # float8
}
"""What libraries refuse on every device."""

ON_CPU = {
    "torch, on the CPU",
    "torch, by a mapping",
    "torch, mapped to the CPU",
    "safetensors file, on the CPU",
    "xla_model.save",
}
"""Ways whose result is on the CPU."""


def ties(state: State) -> list[list[str]]:
    """The names of tensors that begin at the same place of one storage."""
    found: dict[Any, list[str]] = {}
    for name, value in state.items():
        empty = not value.numel()  # torch has address 0 for all of them on the CPU
        found.setdefault(name if empty else (value.device, value.data_ptr()), []).append(name)
    return [names for names in found.values() if len(names) > 1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_round_trip_keeps_every_bit(way: str, kind: str, device: torch.device, tmp_path: Path) -> None:
    on_cpu = Weights(kind, CPU)
    if (way, kind) in REFUSED:
        for where in (CPU, device):
            with pytest.raises((RuntimeError, AttributeError), match=r"covering the entire storage|attribute 'dtype'"):
                WAYS[way](Weights(kind, where), tmp_path / where.type, where)
        return
    (tmp_path / "cpu").mkdir()
    reference = on_cpu.state_dict() if (way, kind) in NO_REFERENCE else WAYS[way](on_cpu, tmp_path / "cpu", CPU)
    expected = ties(reference)
    (tmp_path / "jax").mkdir()
    found = WAYS[way](Weights(kind, device), tmp_path / "jax", device)
    assert {name: bits(value) for name, value in found.items()} == {
        name: bits(value) for name, value in Weights(kind, CPU).state_dict().items()
    }
    assert ties(found) == expected
    assert {value.device.type for value in found.values()} == {"cpu" if way in ON_CPU else "jax"}


def test_a_cpu_checkpoint_loads_onto_the_device(device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4)
    expected = {"float": x, "transposed": x.t(), "row": x[1], "bool": x > 3, "empty": torch.empty(0, 2)}
    for place in ("jax", device, {"cpu": "jax:0"}):
        loaded = torch.load(saved(expected), map_location=place)
        for name, want in expected.items():
            got = loaded[name]
            assert (got.device, got.stride(), got.dtype) == (device, want.stride(), want.dtype), name
            assert torch.equal(got.cpu(), want), name
        loaded["float"][1].add_(100)
        assert loaded["row"].tolist() == [104, 105, 106, 107]  # they shared a storage in the file and do so here
        assert loaded["transposed"][0].tolist() == [0, 104, 8]


# ---- in another process ----------------------------------------------------------------------------------------------


def entry_points(folder: Path) -> Path:
    """A distribution with this package's entry points, to put on the path: an editable installation may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "autoloaded-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoloaded\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["torch.backends"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    return folder


def run(program: str, folder: Path, autoload: str = "1") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (entry_points(folder), ROOT)))
    variables = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    environment = os.environ | variables
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)


FRESH = """
import contextlib, io, sys
with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(errors):
    import torch
assert not errors.getvalue()
assert not {"jax", "xla_amp.lazy"} & set(sys.modules), "import torch started something"
assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not hasattr(torch, "jax")
x = torch.ones(2, requires_grad=True); (x * 2).sum().backward()
on_cpu = torch.load("state.pt", map_location="cpu")
assert on_cpu["first"].device.type == "cpu" and "jax" not in sys.modules
state = torch.load("state.pt")
assert str(state["first"].device) == "jax:0", state
assert state["first"].data_ptr() == state["third"].data_ptr() != state["second"].data_ptr()
assert all(torch.equal(state[name].cpu(), on_cpu[name]) for name in state)
assert torch.load("state.pt", map_location="jax")["first"].device == state["first"].device
"""


@pytest.mark.full
def test_another_process_loads_without_importing_the_package(device: torch.device, tmp_path: Path) -> None:
    torch.save(Weights("tied", device).state_dict(), tmp_path / "state.pt")
    done = run(FRESH, tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_autoload_torch_names_the_place(device: torch.device, tmp_path: Path) -> None:
    torch.save(Weights("tied", device).state_dict(), tmp_path / "state.pt")
    done = run("import torch; torch.load('state.pt')", tmp_path, autoload="0")
    assert "(tagged with jax:0)" in done.stderr


# ---- what is in the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["torch, from a file", "xla_model.save", "Orbax", "safetensors model"])
def test_tied_weights_are_written_once(way: str, device: torch.device, tmp_path: Path) -> None:
    WAYS[way](Weights("large", device), tmp_path, device)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 800_000 < written < 1_200_000


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_file_without_weights_is_refused(device: torch.device, tmp_path: Path) -> None:
    module = torch.jit.script(nn.Linear(2, 3)).to(device)
    for save in (lambda: torch.jit.save(module, tmp_path / "m.pt"), module.save_to_buffer):
        with pytest.raises(DeviceError, match=r"Save module\.cpu\(\)"):
            save()
    torch.jit.save(module.cpu(), tmp_path / "m.pt")
    assert torch.equal(torch.jit.load(tmp_path / "m.pt").weight, module.weight.cpu())
