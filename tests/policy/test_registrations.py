"""The tables of torch's own devices against the installed torch: names registered, and what its kernels do."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from xla_amp.policy import BUILTIN, extend_known_operations, load, op_catalog  # noqa: E402
from xla_amp.policy.op_catalog import catalogue  # noqa: E402

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def changed(name):
    """The tables are those of torch 2.13: whether another version is known to register `name` differently."""
    named = re.search(r"[dD]imname|\.names_", name)  # gone from 2.12 on
    return TORCH != (2, 13) and (name == "rms_norm" or named)


def registered(key):
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in listed if name.startswith("aten::")}


def differences(table, torch_says):
    """Readable lines, one per operation that the two do not agree on."""
    missing, extra = sorted(torch_says - table), sorted(table - torch_says)
    return [f"torch registers {name}, the table has no row" for name in missing if not changed(name)] + [
        f"the table has {name}, torch does not register it" for name in extra if not changed(name)
    ]


@pytest.mark.parametrize(
    ("policy", "key", "not_in_this_build"),
    [
        ("cpu", "AutocastCPU", set()),
        ("cuda", "AutocastCUDA", set() if torch.version.cuda else {"_cudnn_rnn"}),
        ("xpu", "AutocastXPU", set()),
        ("xpu", "AutocastMTIA", set()),
        ("mps", "AutocastMPS", set()),
    ],
)
def test_tables_name_what_torch_registers(policy, key, not_in_this_build):
    assert differences(set(load(policy).operations()) - not_in_this_build, registered(key)) == []


def test_a_difference_would_be_readable():
    table = set(load("cpu").operations())
    assert differences(table - {"mm"}, registered("AutocastCPU")) == ["torch registers mm, the table has no row"]
    assert differences(table | {"relu"}, registered("AutocastCPU")) == [
        "the table has relu, torch does not register it"
    ]


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": "low",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32_out",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "fp32_append",
    "AT_FORALL_PROMOTE": "promote",
}


def header_casts():
    """Operation -> cast, from the macros that the C++ registrations for CUDA and XPU are generated from."""
    text = HEADER.read_text().replace("\\\n", " ")
    casts = {}
    for macro, cast in MACROS.items():
        (body,) = re.findall(rf"#define {macro}\(_\)(.*)", text)
        if cast == "fp32_append":
            found = re.findall(r'"([\w.]+)"', body)
        else:
            found = [".".join(filter(None, pair)) for pair in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)]
        casts.update(dict.fromkeys(found, cast))
    return casts


@pytest.mark.parametrize("policy", ["cuda", "xpu"])
def test_casts_are_those_of_the_header(policy):
    if not HEADER.exists():
        pytest.skip("this torch ships no headers")
    expected = header_casts()
    assert len(expected) > 110
    found = dict(load(policy).casts())
    not_in_macros = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"}
    wrong = {
        name: f"torch {expected.get(name)}, table {found.get(name)}"
        for name in (expected.keys() | found.keys()) - not_in_macros
        if expected.get(name) != found.get(name) and not changed(name)
    }
    assert wrong == {}


def test_the_gpu_and_cuda_tables_have_no_name_that_torch_lacks():
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    for policy in BUILTIN:
        assert load(policy).operations() <= known
    if TORCH == (2, 13):
        assert set(catalogue().classes) <= known


# CPU kernels can be asked: call each one and watch what it casts before anything else happens.


class Stop(Exception):
    pass


class Watch(TorchDispatchMode):
    """Notes the dtypes that operands are converted to, until the first other operation."""

    def __init__(self):
        super().__init__()
        self.to = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten._to_copy.default or not kwargs["dtype"].is_floating_point:
            raise Stop
        self.to.append(kwargs["dtype"])
        return function(*args, **kwargs)


def first_conversion(operation, *dtypes):
    """dtype that autocast converts the first operand to whose dtype it changes; they have `dtypes` in turn."""
    packet, _, overload = operation.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    turn = 0

    def tensor():
        nonlocal turn
        turn += 1
        return torch.ones(2, 2, dtype=dtypes[(turn - 1) % len(dtypes)])

    simple = {"int": 1, "float": 1.0, "bool": False, "number": 1, "str": "a", "SymInt": 1}
    args, kwargs = [], {}
    for parameter in function._schema.arguments:
        kind = str(parameter.type)
        value: object
        if "List[Tensor]" in kind or kind == "List[Optional[Tensor]]":
            value = [tensor(), tensor()]
        elif "Tensor" in kind:
            value = tensor()
        elif parameter.has_default_value():
            value = parameter.default_value
        elif kind.startswith("List["):
            value = [simple[kind[5:-1]]] * 2
        else:
            value = simple.get(kind.removeprefix("Optional[").removesuffix("]"))
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    # The operands are made up from the schema: what the operation says about them comes after the cast.
    complaints = contextlib.suppress(Stop, RuntimeError, ValueError, IndexError)
    watch = Watch()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), complaints, watch:
        function(*args, **kwargs)
    return watch.to[0] if watch.to else None


def observed(operation):
    """The cast that torch's CPU kernel for `operation` turns out to make."""
    f32, low = torch.float32, torch.bfloat16
    if first_conversion(operation, f32) is low:
        return "low"
    if first_conversion(operation, low) is f32:
        return "fp32"
    return "promote" if first_conversion(operation, f32, low) is f32 else "keep"


def test_cpu_kernels_do_what_the_table_says():
    found = {operation: observed(operation) for operation in load("cpu").operations()}
    table = load("cpu").casts()
    wrong = {name: f"table {table[name]}, kernel {cast}" for name, cast in found.items() if cast != table[name]}
    assert wrong == {}


def test_the_observation_tells_casts_apart():
    assert observed("mm") == "low"
    assert observed("mse_loss") == "fp32"
    assert observed("cat") == "promote"
    assert observed("add.Tensor") == "keep"


def test_torch_can_add_its_own_names(monkeypatch):
    """What the PyTorch front does: a name that only torch knows becomes legal, its in-place form does not."""
    monkeypatch.setattr(op_catalog, "_providers", [])
    monkeypatch.setattr(op_catalog, "_provided", frozenset())
    assert op_catalog.matching("special_airy_ai") == ()
    asked = []

    def torch_operations():
        asked.append(1)
        return torch._C._dispatch_get_all_op_names()

    extend_known_operations(torch_operations)
    assert op_catalog.matching("softmax") == ("softmax.int",)
    assert asked == [], "names that are known do not ask"
    assert op_catalog.matching("special_airy_ai") == ("special_airy_ai",)
    assert op_catalog.matching("nonzero_static") == ("nonzero_static",)
    assert asked == [1]
    assert op_catalog.matching("add_") == ()
    assert op_catalog.matching("topk") == ("topk",), "topk.values is an out= form"
    assert "special_airy_ai" not in op_catalog.matching("special_*"), (
        "what a glob reaches depends on the catalogue alone"
    )
    assert not any(name.endswith(("_", ".out", "_backward")) for name in op_catalog.known_operations())
