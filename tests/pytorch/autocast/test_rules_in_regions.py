"""What regions do to operations under a policy and overrides, on the CPU and on XLA: casts, eligibility, records."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_amp
from xla_amp import autocast, policy
from xla_amp.common import config, events
from xla_amp.errors import PolicyError, RuleWarning

LOW, FULL, HALF, DOUBLE = torch.bfloat16, torch.float32, torch.float16, torch.float64
Call = Callable[[torch.Tensor], Any]


@pytest.fixture
def full(device):
    return torch.ones(2, 2, device=device)


@pytest.fixture
def low(full):
    return full.to(LOW)


def opened(device, **arguments):
    return autocast(device, **arguments) if "policy" in arguments else autocast(device, policy="tpu", **arguments)


def overridden(rules):
    return policy.override(rules) if rules else contextlib.nullcontext()


def promoted(*dtypes: torch.dtype) -> Call:
    return lambda x: torch.cat([x.to(dtype) for dtype in dtypes]) + 0 * torch.stack([x.to(d) for d in dtypes]).sum()


# What each row of the tables does is in test_table_rows.py and, on the CPU, in test_kernels.py.
ROWS: list[tuple[str, dict[str, str], str, Call, torch.dtype]] = [
    # low
    ("tpu", {}, "mm of both", lambda x: torch.mm(x.to(LOW), x), LOW),
    ("tpu", {}, "linear without a bias", lambda x: F.linear(x, x, None), LOW),
    ("tpu", {}, "bmm of float16", lambda x: torch.bmm(x[None], x.to(HALF)[None]), LOW),
    # fp32
    ("cuda", {}, "exp of a 0-d tensor", lambda x: torch.exp(x[0, 0].to(LOW)), FULL),
    ("cuda", {}, "layer_norm, one optional", lambda x: F.layer_norm(x.to(LOW), (2,), x[0].to(HALF), None), FULL),
    # fp32_out and fp32_append
    ("cuda", {}, "softmax with a dtype", lambda x: torch.softmax(x.to(LOW), -1, dtype=LOW), LOW),
    ("cuda", {}, "sum with a dtype", lambda x: x.to(LOW).sum(0, dtype=DOUBLE), DOUBLE),
    ("cuda", {}, "sum of float64", lambda x: x.double().sum(), DOUBLE),
    ("cuda", {}, "sum of integers", lambda x: x.long().sum(), torch.int64),
    ("cuda", {}, "norm of float64", lambda x: torch.ops.aten.norm.Scalar(x.double()), DOUBLE),
    # promote
    ("tpu", {}, "low and low", promoted(LOW, LOW), LOW),
    ("tpu", {}, "low and full", promoted(LOW, FULL), FULL),
    ("tpu", {}, "full and float64", promoted(FULL, DOUBLE), DOUBLE),
    ("tpu", {}, "low and float64", promoted(LOW, DOUBLE), DOUBLE),
    # not listed, not eligible
    ("tpu", {}, "add", lambda x: x + x, FULL),
    ("tpu", {}, "add of low", lambda x: x.to(LOW) + x.to(LOW), LOW),
    ("tpu", {}, "mm of float64", lambda x: torch.mm(x.double(), x.double()), DOUBLE),
    ("tpu", {}, "mm of integers", lambda x: torch.mm(x.long(), x.long()), torch.int64),
    ("tpu", {}, "out=", lambda x: torch.mm(x, x, out=torch.zeros_like(x)), FULL),
    ("tpu", {}, "in place", lambda x: torch.zeros_like(x).addmm_(x, x), FULL),
    # rules of users
    ("tpu", {"add.Tensor": "low"}, "add", lambda x: x + 1, LOW),
    ("tpu", {"add.Tensor": "keep"}, "add", lambda x: x + 1, FULL),
    ("tpu", {"linear": "keep"}, "linear", lambda x: F.linear(x, x), FULL),
    ("tpu", {"linear": "keep"}, "mm beside it", lambda x: torch.mm(x, x), LOW),
    ("tpu", {"einsum": "keep"}, "einsum", lambda x: torch.einsum("ij,jk->ik", x, x), FULL),
    # numbers where tensors are expected: mul is low, add is promoted, div is float32
    ("hpu", {}, "mul of low", lambda x: x.to(LOW) * 0.5, LOW),
    ("hpu", {}, "mul", lambda x: x * 2, LOW),
    ("hpu", {}, "add", lambda x: x.to(LOW) + 1, LOW),
    ("hpu", {}, "div", lambda x: x.to(LOW) / 3, FULL),
]


@pytest.mark.parametrize(
    ("name", "rules", "call", "dtype"),
    [pytest.param(name, rules, call, d, id=f"{name} {rules or ''} {text}") for name, rules, text, call, d in ROWS],
)
def test_dtype_of_a_result(device, full, name, rules, call, dtype):
    with overridden(rules), autocast(device, policy=name):
        assert call(full).dtype is dtype


def test_promotion_of_float16():
    """torch's kernels of the CPU refuse it."""
    x = torch.ones(2, 2, device=xla_amp.xla_device())
    with autocast("xla", policy="tpu"):
        assert promoted(LOW, HALF)(x).dtype is FULL
        assert promoted(HALF, HALF)(x).dtype is HALF


def test_ban(device, low):
    with opened(device, policy="cuda"), pytest.raises(RuntimeError) as caught:
        F.binary_cross_entropy(low, low)
    assert "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast." in str(caught.value)
    assert "torch.nn.BCEWithLogitsLoss" in str(caught.value)
    with opened(device):
        assert F.binary_cross_entropy(low, low).dtype is FULL


def test_errors_leave_the_key_as_it_was(device, full):
    for rules, error, words in [
        ({"exp": "ban"}, RuntimeError, "exp is banned under autocast"),
        ({"exp": "fp32_out"}, PolicyError, "no argument `dtype`"),
        ({"exp": "fp32_append"}, PolicyError, "no overload takes"),
    ]:
        with policy.override(rules), opened(device), pytest.raises(error, match=words):
            torch.exp(full)
    override = policy.override(softmax="low")
    with pytest.raises(RuntimeError, match=r"shape|size|reduction dim"), override, opened(device), override:
        torch.mm(torch.softmax(full, -1), full[:1])
    with opened(device):
        assert torch.mm(full, full).dtype is LOW
        assert torch.softmax(full.to(LOW), -1).dtype is FULL


@pytest.mark.filterwarnings("ignore::xla_amp.errors.AutocastWarning")
def test_tensors_of_another_device_are_left_alone():
    host, here = torch.ones(2, 2), torch.ones(2, 2, device=xla_amp.xla_device())
    with autocast("xla"):
        assert torch.mm(host, host).dtype is FULL
    with autocast("cpu", dtype=LOW):
        assert torch.mm(here, here).dtype is FULL
        assert torch.mm(host, host).dtype is LOW


def test_gradients_have_the_dtype_of_their_parameter(device):
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    with policy.override(softmax="low"), opened(device):
        result = (weight @ weight).float().sum() + torch.softmax(weight, -1)[0].sum()
    result.backward()
    assert weight.grad.dtype is FULL
    assert weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_a_cast_is_never_stale():
    device = xla_amp.xla_device()
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    with autocast("xla"):
        before = (weight @ weight).sum().item()
        with torch.no_grad():
            weight.mul_(2)
        assert (weight @ weight).sum().item() == 4 * before  # torch's own cache of casts would give `before`


# ---- where rules come from -------------------------------------------------------------------------------------------


def test_overrides_around_and_inside_a_region(device, full, low):
    def dtypes():
        return torch.softmax(full, -1).dtype, torch.mm(low, low).dtype

    with policy.override(softmax="low", mm="fp32"), opened(device):
        assert dtypes() == (LOW, FULL)
    with opened(device):
        with policy.override(softmax="low"):
            assert dtypes() == (LOW, LOW)
            with policy.override(softmax="fp32"):
                assert dtypes() == (FULL, LOW)
            assert dtypes() == (LOW, LOW)
        assert dtypes() == (FULL, LOW)
    with opened(device, enabled=False), policy.override(softmax="low"):
        assert dtypes() == (FULL, LOW)  # of the operands


def test_torchs_regions_follow_overrides_and_ours_around_them(device, full, low):
    name = device.type
    with policy.override(softmax="low"):
        assert torch.softmax(full, -1).dtype is FULL
        with torch.autocast(name, dtype=HALF):
            assert torch.softmax(full, -1).dtype is HALF
    with torch.autocast(name, dtype=LOW), policy.override(softmax="low"):
        assert torch.softmax(full, -1).dtype is LOW
    with torch.autocast(name, dtype=LOW):
        assert torch.softmax(full, -1).dtype is FULL
        assert F.mse_loss(low, low).dtype is FULL
    with opened(device, policy="cuda"), torch.autocast(name, dtype=LOW):
        assert torch.mm(full, full).dtype is LOW
        assert torch.exp(low).dtype is FULL  # a rule of `cuda` alone


def test_environment_and_files(device, low_of, full, tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "tpu"\nlow = "float16"\n[[rule]]\ncast = "keep"\noperations = ["mm"]\n')
    with opened(device, policy=file):
        assert torch.mm(full, full).dtype is FULL
        assert torch.bmm(full[None], full[None]).dtype is HALF
    file.write_text('[[rule]]\noperations = ["class:normalization"]\ncast = "low"\n')
    monkeypatch.setenv("XLA_AMP_POLICY", str(file))
    monkeypatch.setenv("XLA_AMP_RULES", "exp=low; sub.Tensor=low")
    with autocast(device):
        assert [torch.softmax(full, -1).dtype, torch.exp(full).dtype, (full - full).dtype] == [low_of(device)] * 3
    monkeypatch.delenv("XLA_AMP_RULES")
    monkeypatch.delenv("XLA_AMP_POLICY")
    with autocast(device):
        assert (full - full).dtype is FULL


def test_gaudis_example_with_lists_of_its_own(device, tmp_path, monkeypatch):
    """The documentation of Gaudi: files of operations, a linear model, ``mse_loss`` in the region."""
    for variable, operations in zip(config.HPU_LISTS.values(), ("mse_loss\nmm\n", "linear\nlog\n"), strict=True):
        (tmp_path / variable).write_text(operations)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    x, y = torch.randn(64, 16, device=device), torch.randn(64, 8, device=device)
    model = torch.nn.Linear(16, 8).to(device)
    with autocast(device, policy="hpu"):
        predicted = model(x.to(LOW))
        loss = F.mse_loss(predicted, y)
        assert (predicted.dtype, torch.mm(x, x.T).dtype, loss.dtype) == (FULL, LOW, LOW)
        assert torch.softmax(x, -1).dtype is FULL, "in the built-in low list alone"


def test_each_thread_has_its_own_rules(device, full):
    barrier, seen = threading.Barrier(4, timeout=20), {}

    def work(name, cast):
        region = torch.autocast(device.type, dtype=LOW) if cast is None else opened(device)
        with overridden({} if cast is None else {"softmax": cast}), region:
            barrier.wait()
            seen[name] = torch.softmax(full, -1).dtype, torch.mm(full, full).dtype
            barrier.wait()

    jobs = {"low": "low", "full": "fp32", "torch": None, "low too": "low"}
    with opened(device, policy="cuda"):
        threads = [threading.Thread(target=work, args=job) for job in jobs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"low": (LOW, LOW), "full": (FULL, LOW), "torch": (FULL, LOW), "low too": (LOW, LOW)}


# ---- custom operators ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def operator():
    @torch.library.custom_op("xla_amp_tests::scaled", mutates_args=())
    def scaled(tensors: list[torch.Tensor], factor: torch.Tensor | None, *, power: float = 1.0) -> torch.Tensor:
        result = sum(tensor * power for tensor in tensors)
        return result if factor is None else result * factor

    @scaled.register_fake
    def _(tensors, factor, *, power=1.0):
        return torch.empty_like(tensors[0])

    return scaled


def test_a_custom_operator(device, full, low, operator):
    given = [full, low]
    with opened(device), policy.override({"xla_amp_tests::scaled": "low"}):
        assert operator(given, full, power=2.0).dtype is LOW
    with opened(device), policy.override({"xla_amp_tests::scaled": "promote"}):
        assert operator([low, low], None).dtype is LOW
        assert operator(given, None).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with opened(device):
        assert operator([low], None).dtype is LOW


def test_an_operator_that_is_defined_later(device, full):
    name = f"xla_amp_tests::late_{device.type}"
    warned = pytest.warns(RuleWarning, match="late_.* = low .*matched no operation")
    with warned, policy.override({name: "low"}), opened(device):
        torch.mm(full, full)

    @torch.library.custom_op(name, mutates_args=())
    def late(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    with policy.override({name: "low"}), opened(device):
        assert late(full).dtype is LOW


# ---- records ---------------------------------------------------------------------------------------------------------


def test_the_parts_of_an_operation_are_not_cast_again(device, full):
    # norm is fp32 under `cuda`; what it is made of (pow, sum, ...) must not decide for itself.
    with events.capture() as records, opened(device, policy="cuda"):
        F.cosine_similarity(full, full)
    assert [entry.operation for entry in records] == ["cosine_similarity"]
