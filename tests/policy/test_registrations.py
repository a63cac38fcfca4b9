"""The tables of torch's own devices against the installed torch: names registered, and casts of its header.

What the CPU's kernels do is in tests/pytorch/autocast/test_native_dispatch.py.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from xla_amp.policy import BUILTIN, load, op_catalog  # noqa: E402
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


def test_names_that_only_torch_knows():
    """The PyTorch front adds them: such a name takes a rule, its in-place form does not."""
    importlib.import_module("xla_amp.pytorch.autocast.xla_dispatch")
    assert op_catalog.matching("special_airy_ai") == ("special_airy_ai",)
    assert op_catalog.matching("add_") == ()
    assert op_catalog.matching("topk") == ("topk",), "topk.values is an out= form"
    assert "special_airy_ai" not in op_catalog.matching("special_*"), "a glob depends on the catalogue alone"
    assert not any(name.endswith(("_", ".out", "_backward")) for name in op_catalog.known_operations())
