"""torch_tpu's device: its rules against its wheel, and overrides on its autocast key.

torch_tpu starts only where there is a TPU.  So its table is compared with the symbols of the wheel, where one is
installed, and the dispatcher is tried in a process that registers what torch_tpu does for a few operations.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import forked
import pytest
import torch

from xla_amp.policy import load

TABLE = load("torch_tpu")


def test_the_lists_are_those_of_the_documentation() -> None:
    """Without the wheel: what its 135 registrations are, beside those of PyTorch's CPU and CUDA."""
    casts = TABLE.casts()
    assert {cast: list(casts.values()).count(cast) for cast in set(casts.values())} == {
        "low": 37,
        "fp32": 96,
        "fp32_out": 2,
    }
    cpu, cuda = load("cpu").casts(), load("cuda").casts()
    full = {name for name, cast in casts.items() if cast != "low"}
    assert full <= {name for name, cast in cpu.items() if cast == "fp32"}
    assert set(casts) - set(cpu) <= {name for name, cast in cuda.items() if cast == "low"}
    assert not {"softmax.int", "layer_norm", "exp", "sum", "cat", "stack"} & set(casts)


def libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch_tpu")
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob("csrc/common/glue_*/libpywrap_*_common.so"))


@pytest.mark.skipif(not libraries(), reason="torch_tpu is not installed")
def test_the_table_is_what_the_wheel_registers() -> None:
    """A registration is an instance of at::autocast::WrapFunction_ for PrivateUse1, device type 20."""
    pattern = rb"WrapFunction_ILNS0_10CastPolicyE(\d)ELN3c1010DeviceTypeE20E[^\0]*?_ops\d+(\w+?)4callE"
    kinds = {b"0": "low", b"1": "fp32", b"2": "fp32_out", b"4": "promote"}
    spelled = {name.replace(".", "_"): name for name in TABLE.operations()}
    for library in libraries():
        found = {name.decode(): kinds[kind] for kind, name in re.findall(pattern, library.read_bytes())}
        assert {spelled.get(name, name): cast for name, cast in found.items()} == TABLE.casts(), library


PROGRAM = """
import types
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only
import xla_amp
from xla_amp.errors import DeviceError

module = types.SimpleNamespace(get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32])
module.is_available = module.is_initialized = lambda: True
module.device_count, module.current_device = lambda: 1, lambda: 0
backend_registration._setup_privateuseone_for_python_backend("tpu", backend_module=module)


def on_device(tensor):
    return torch._C._acc.create_empty_tensor(tensor.shape, tensor.dtype)


def compute(operator, *args, **kwargs):  # shapes and dtypes only
    if operator is torch.ops.aten._copy_from.default:
        return args[1]
    if "out" in kwargs:  # of the right dtype already
        return kwargs["out"]
    kwargs.pop("device", None)
    meta = lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return tree_map_only(torch.Tensor, on_device, operator(*tree_map_only(torch.Tensor, meta, args), **kwargs))


KEY = "AutocastPrivateUse1"
rest = torch.library.Library("_", "IMPL")
rest.fallback(compute, "PrivateUse1")
rest.fallback(torch.library.fallthrough_kernel, KEY)
aten = torch.library.Library("aten", "IMPL")


def registers(name, dtype):
    operator = getattr(torch.ops.aten, name).default

    def kernel(*args):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operator(*[x.to(dtype) if isinstance(x, torch.Tensor) else x for x in args])

    aten.impl(name, kernel, KEY)


registers("mm", torch.bfloat16)
registers("trace", torch.float32)
before = sorted(torch._C._dispatch_get_registrations_for_dispatch_key(KEY))
x = on_device(torch.empty(4, 4))
low = x.bfloat16()


def dtypes():
    found = torch.mm(x, x), torch.trace(low), torch.softmax(low, -1), torch.exp(x)
    return " ".join(str(y.dtype).removeprefix("torch.") for y in found)


print(dtypes())
with xla_amp.autocast("tpu", dtype=torch.bfloat16):
    print(dtypes())
    with xla_amp.policy.override(mm="fp32", softmax="fp32"):
        print(dtypes())
with torch.autocast("tpu", dtype=torch.bfloat16), xla_amp.policy.override(trace="low"):
    print(dtypes())
with xla_amp.autocast("tpu", policy="tpu", dtype=torch.bfloat16):  # XLA's rules on torch_tpu
    print(dtypes())
print(sorted(torch._C._dispatch_get_registrations_for_dispatch_key(KEY)) == before)
try:
    xla_amp.xla_device()
except DeviceError as error:
    print(error)
"""


def test_rules_act_on_its_key_and_the_lazy_device_does_not_start_beside_it() -> None:
    done = forked.run(program=PROGRAM)
    assert done.returncode == 0, done.stderr
    *found, refused = done.stdout.splitlines()
    assert found == [
        "float32 bfloat16 bfloat16 float32",
        "bfloat16 float32 bfloat16 float32",
        "float32 float32 float32 float32",
        "bfloat16 bfloat16 bfloat16 float32",
        "bfloat16 float32 float32 float32",
        "True",
    ]
    assert "the backend 'tpu' has taken it" in refused
    assert "autocast('tpu')" in refused


def test_without_torch_tpu_the_device_is_unknown() -> None:
    import xla_amp

    if torch._C._get_privateuse1_backend_name() != "tpu":
        with pytest.raises(xla_amp.errors.DeviceError, match="torch knows no device type 'tpu'"):
            xla_amp.autocast("tpu")
