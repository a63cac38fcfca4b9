"""The autocast kernels on the lazy device: each cast, eligibility, overrides, custom operators, records."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import xla_amp
from xla_amp import autocast, policy
from xla_amp.common import events
from xla_amp.errors import PolicyError, RuleWarning

LOW, FULL, HALF = torch.bfloat16, torch.float32, torch.float16


@pytest.fixture
def device():
    return xla_amp.xla_device()


@pytest.fixture
def full(device):
    return torch.ones(2, 2, device=device)


@pytest.fixture
def low(full):
    return full.to(LOW)


# ---- casts -----------------------------------------------------------------------------------------------------------


def test_low(full, low):
    with autocast("xla"):
        assert torch.mm(full, full).dtype is LOW
        assert torch.mm(low, full).dtype is LOW
        assert (full @ full).dtype is LOW
        assert F.linear(full, full, full[0]).dtype is LOW
        assert F.linear(full, full, None).dtype is LOW
        assert torch.addmm(full, full, full).dtype is LOW
        assert torch.einsum("ij,jk->ik", full, low).dtype is LOW
        assert torch.bmm(full[None], full.to(HALF)[None]).dtype is LOW


def test_fp32(full, low):
    with autocast("xla"):
        assert F.mse_loss(low, low).dtype is FULL
        assert F.mse_loss(low, full).dtype is FULL
        assert torch.prod(low).dtype is FULL
    with autocast("xla", policy="cuda"):
        assert torch.exp(low).dtype is FULL
        assert torch.pow(low, 2).dtype is FULL
        assert F.layer_norm(low, (2,)).dtype is FULL


def test_fp32_rounds_nothing_away(device):
    exact = 1 + 2.0**-20
    with autocast("xla", policy="cuda"):
        assert torch.exp(torch.full((), exact, device=device)).item() == pytest.approx(2.718284420, rel=1e-7)


def test_fp32_out(full, low):
    with autocast("xla", policy="cuda"):
        assert torch.softmax(low, -1).dtype is FULL
        assert torch.softmax(low, -1, dtype=LOW).dtype is LOW
        assert low.sum().dtype is FULL
        assert low.sum(0, keepdim=True).dtype is FULL
        assert low.sum(0, dtype=torch.float64).dtype is torch.float64
        assert low.cumsum(0).dtype is FULL
        assert full.double().sum().dtype is torch.float64
        assert torch.ones(2, dtype=torch.int64, device=full.device).sum().dtype is torch.int64


def test_fp32_append(full, low):
    with autocast("xla", policy="cuda"):
        assert torch.ops.aten.norm.Scalar(low).dtype is FULL
        assert torch.ops.aten.norm.Scalar(low, 1).item() == 4.0
        assert torch.ops.aten.norm.ScalarOpt_dim(low, None, [0]).dtype is FULL
        assert torch.ops.aten.norm.ScalarOpt_dim(low, 2, [0], True).shape == (1, 2)
        assert torch.ops.aten.norm.Scalar(full.double()).dtype is torch.float64


PROMOTED = [
    ((LOW, LOW), LOW),
    ((LOW, FULL), FULL),
    ((HALF, FULL), FULL),
    ((LOW, HALF), FULL),
    ((HALF, HALF), HALF),
    ((FULL, torch.float64), torch.float64),
    ((LOW, torch.float64), torch.float64),
]


@pytest.mark.parametrize(("given", "expected"), PROMOTED, ids=str)
def test_promote(full, given, expected):
    tensors = [full.to(dtype) for dtype in given]
    with autocast("xla"):
        assert torch.cat(tensors).dtype is expected
        assert torch.stack(tensors).dtype is expected


def test_promote_casts_every_operand(full, low):
    index = torch.zeros(2, 2, dtype=torch.int64, device=full.device)
    with autocast("xla", policy="cuda"):
        assert torch.scatter_add(full, 0, index, low).dtype is FULL
        assert torch.tensordot(low, full, dims=1).dtype is FULL
        assert torch.addcmul(low, full, low).dtype is FULL


def test_ban(low):
    with autocast("xla", policy="cuda"), pytest.raises(RuntimeError) as caught:
        F.binary_cross_entropy(low, low)
    assert "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast." in str(caught.value)
    assert "torch.nn.BCEWithLogitsLoss" in str(caught.value)
    with autocast("xla", policy="tpu"):
        assert F.binary_cross_entropy(low, low).dtype is FULL


def test_ban_by_a_user(full):
    with policy.override(exp="ban"), autocast("xla"), pytest.raises(RuntimeError, match="exp is banned under autocast"):
        torch.exp(full)


def test_unlisted_operations_follow_their_inputs(full, low):
    with autocast("xla"):
        assert (full + full).dtype is FULL
        assert (low + low).dtype is LOW
        assert (low + full).dtype is FULL


# ---- eligibility -----------------------------------------------------------------------------------------------------


def test_float64_and_integers_stay(full):
    whole = full.to(torch.int64)
    with autocast("xla"):
        assert torch.mm(full.double(), full.double()).dtype is torch.float64
        assert torch.mm(whole, whole).dtype is torch.int64


def test_in_place_and_out_are_left_alone(full, low):
    with autocast("xla"):
        result = torch.zeros_like(full)
        torch.mm(full, full, out=result)
        assert result.dtype is FULL
        assert result.addmm_(full, full).dtype is FULL


@pytest.mark.filterwarnings("ignore::xla_amp.errors.AutocastWarning")
def test_tensors_of_the_cpu_are_left_alone(full):
    host = torch.ones(2, 2)
    with autocast("xla"):
        assert torch.mm(host, host).dtype is FULL
    with autocast("cpu", dtype=LOW):
        assert torch.mm(full, full).dtype is FULL
        assert torch.mm(host, host).dtype is LOW


def test_zero_dimensional_tensors_are_cast(device):
    scalar = torch.ones((), dtype=LOW, device=device)
    with autocast("xla", policy="cuda"):
        assert torch.exp(scalar).dtype is FULL


def test_optional_tensors(full):
    with autocast("xla", policy="cuda"):
        assert F.layer_norm(full.to(LOW), (2,), None, None).dtype is FULL
        assert F.layer_norm(full.to(LOW), (2,), full[0].to(HALF), None).dtype is FULL


def test_attention(device):
    query = torch.randn(1, 2, 4, 8, device=device)
    mask = torch.zeros(4, 4, device=device)
    with autocast("xla"):
        assert F.scaled_dot_product_attention(query, query, query, attn_mask=mask).dtype is LOW
        assert F.scaled_dot_product_attention(query, query, query.to(LOW), is_causal=True).dtype is LOW


def test_the_parts_of_an_operation_are_not_cast_again(full):
    # norm is fp32 under `cuda`; what it is made of (pow, sum, ...) must not decide for itself.
    with events.capture() as records, autocast("xla", policy="cuda"):
        F.cosine_similarity(full, full)
    assert [entry.operation for entry in records] == ["cosine_similarity"]


def test_gradients_have_the_dtype_of_their_parameter(device):
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    with autocast("xla"):
        result = (weight @ weight).float().sum()
    result.backward()
    assert weight.grad.dtype is FULL
    assert weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_a_cast_is_never_stale(device):
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    with autocast("xla"):
        before = (weight @ weight).sum().item()
        with torch.no_grad():
            weight.mul_(2)
        assert (weight @ weight).sum().item() == 4 * before  # torch's own cache of casts would give `before`


# ---- torch.autocast on the device ------------------------------------------------------------------------------------


def test_torchs_region_follows_the_devices_policy(full, low):
    with torch.autocast("jax"):
        assert torch.mm(full, full).dtype is LOW
        assert F.mse_loss(low, low).dtype is FULL
    with torch.autocast("jax", dtype=HALF):
        assert torch.mm(full, full).dtype is HALF


def test_torchs_region_in_another_thread(full):
    seen = []

    def work():
        with torch.autocast("jax", dtype=HALF):
            seen.append(torch.mm(full, full).dtype)

    with autocast("xla", policy="gpu"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [HALF]


def test_torchs_region_inside_ours_keeps_the_policy(full, low):
    with autocast("xla", policy="cuda"), torch.autocast("jax", dtype=LOW):
        assert torch.mm(full, full).dtype is LOW
        assert torch.exp(low).dtype is FULL  # a rule of `cuda` alone


def test_torchs_region_with_overrides(full):
    with policy.override(mm="fp32"), torch.autocast("jax"):
        assert torch.mm(full, full).dtype is FULL


# ---- overrides -------------------------------------------------------------------------------------------------------


def test_override_around_and_inside_a_region(full, low):
    with policy.override(mm="fp32"), autocast("xla"):
        assert torch.mm(full, full).dtype is FULL
    with autocast("xla"):
        with policy.override({"add.Tensor": "low", "tanh": "fp32"}):
            assert (full + full).dtype is LOW
            assert torch.tanh(low).dtype is FULL
        assert (full + full).dtype is FULL
        assert torch.tanh(low).dtype is LOW


def test_keep_means_all_of_the_operation(full, low):
    with policy.override(linear="keep"), autocast("xla"):
        assert F.linear(full, full).dtype is FULL
        assert F.linear(low, low).dtype is LOW
        assert torch.mm(full, full).dtype is LOW


def test_casts_that_an_operation_cannot_have(full):
    with policy.override(exp="fp32_out"), autocast("xla"), pytest.raises(PolicyError, match="no argument `dtype`"):
        torch.exp(full)
    with policy.override(exp="fp32_append"), autocast("xla"), pytest.raises(PolicyError, match="no overload takes"):
        torch.exp(full)
    with autocast("xla"):
        assert torch.mm(full, full).dtype is LOW  # the errors left the autocast key as it was


def test_environment_rules(monkeypatch, full):
    monkeypatch.setenv("XLA_AMP_RULES", "mm=fp32; sub.Tensor=low")
    with autocast("xla"):
        assert torch.mm(full, full).dtype is FULL
        assert (full - full).dtype is LOW


def test_a_policy_file(tmp_path, full):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "tpu"\nlow = "float16"\n[[rule]]\ncast = "keep"\noperations = ["mm"]\n')
    with autocast("xla", policy=file):
        assert torch.mm(full, full).dtype is FULL
        assert torch.bmm(full[None], full[None]).dtype is HALF


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


def test_a_custom_operator(full, low, operator):
    given = [full, low]
    with autocast("xla"), policy.override({"xla_amp_tests::scaled": "low"}):
        assert operator(given, full, power=2.0).dtype is LOW
    with autocast("xla"), policy.override({"xla_amp_tests::scaled": "promote"}):
        assert operator([low, low], None).dtype is LOW
        assert operator(given, None).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with autocast("xla"):
        assert operator([low], None).dtype is LOW


def test_an_operator_that_is_defined_later(full):
    rules = {"xla_amp_tests::late": "low"}
    with pytest.warns(RuleWarning, match="late = low .*matched no operation"), policy.override(rules), autocast("xla"):
        torch.mm(full, full)

    @torch.library.custom_op("xla_amp_tests::late", mutates_args=())
    def late(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    with policy.override(rules), autocast("xla"):
        assert late(full).dtype is LOW


# ---- records ---------------------------------------------------------------------------------------------------------


def test_decisions_are_recorded(full, low):
    with events.capture() as records, autocast("xla"):
        torch.mm(full, low)
        torch.cat([low, full])
        full + full
        with policy.override(mm="keep"):
            torch.mm(full, full)
    product, joined, kept = records
    assert (product.operation, product.cast, product.layer, product.policy) == ("mm", "low", "builtin", "tpu")
    assert (product.given, product.used) == (("float32", "bfloat16"), ("bfloat16", "bfloat16"))
    assert product.result == ("bfloat16",)
    assert product.front == "pytorch"
    assert product.why
    assert product.location.startswith(__file__)
    assert (joined.operation, joined.given, joined.used) == ("cat", ("bfloat16", "float32"), ("float32", "float32"))
    assert (kept.cast, kept.layer, kept.result) == ("keep", "override", ("float32",))


def test_nothing_is_recorded_outside(full):
    with events.capture() as records:
        torch.mm(full, full)
        with autocast("xla", enabled=False):
            torch.mm(full, full)
    assert records == []
