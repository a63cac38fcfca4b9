"""Arguments that torch's kernels refuse and its meta kernels accept, and indices: refused on the lazy device, too."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same
from torch import nn

import xla_amp
from xla_amp.testing import counts as counted

LOW = torch.bfloat16


def region():
    return xla_amp.autocast(xla_amp.xla_device(), dtype=LOW, policy="tpu")


@pytest.mark.parametrize("requires_grad", [True, False])
def test_convolution_refuses_two_dtypes_outside_a_region(requires_grad):
    device = xla_amp.xla_device()
    x = torch.randn(2, 4, 7, 7, device=device, requires_grad=requires_grad).relu()
    weight = torch.randn(6, 4, 3, 3, device=device)
    with region():
        torch.conv2d(x, weight)  # the same two dtypes, where the region casts them
    with pytest.raises(RuntimeError, match=r"expected input and weight .*of one dtype, but got input=torch\.float32"):
        torch.conv2d(x, weight.to(LOW))
    with region(), pytest.raises(RuntimeError, match="of one dtype"):
        torch.conv2d(x.double(), weight)  # float64 is never cast


def test_batch_norm_of_a_low_dtype_outside_a_region_keeps_it():
    """In a region the same two dtypes, a low input and float32 weights, give float32."""
    torch.manual_seed(2)
    given = torch.randn(5, 6, 7, 7, dtype=LOW)
    found = []
    for norm in (nn.BatchNorm2d(6).to(xla_amp.xla_device()), nn.BatchNorm2d(6)):
        x = given.to(norm.weight.device, copy=True).requires_grad_()
        if not found:
            with region():
                assert norm(x).dtype is torch.float32
            norm.reset_running_stats()
        y = norm(x)
        assert y.dtype is LOW
        (gradient,) = torch.autograd.grad((y.float() ** 3).sum(), x)
        found.append([y.cpu(), gradient.cpu(), norm.running_var.cpu()])
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-8 * other.abs().max().item())


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_batch_norm_names_the_argument_of_the_wrong_size(name):
    device = xla_amp.xla_device()
    norm, x = nn.BatchNorm2d(6).to(device), torch.randn(5, 6, 7, 7, device=device)
    with torch.no_grad():
        setattr(norm, name, None)
        wrong = torch.ones(4, device=device)
        setattr(norm, name, nn.Parameter(wrong) if name in ("weight", "bias") else wrong)
    for context in (region(), torch.no_grad()):
        with context, pytest.raises(RuntimeError, match=f"{name} should contain 6 elements not 4"):
            norm(x)


ONE = torch.ones(1, 1, 4, 4)
INTEGERS, FLAGS = torch.arange(3), torch.tensor([True, False, True])
REFUSED: dict[str, Callable[[Any], Any]] = {
    "arange_bool": lambda move: torch.arange(3, dtype=torch.bool, device=move(ONE).device),
    "bool_minus": lambda move: move(FLAGS) - move(torch.ones(3)),
    "bucketize": lambda move: torch.bucketize(move(ONE), move(ONE)),
    "cat_zero_dim": lambda move: torch.cat([move(torch.tensor(1.0)), move(torch.ones(2))]),
    "clamp_bool": lambda move: move(FLAGS).clamp(max=False),
    "complex_dtypes": lambda move: torch.complex(move(torch.ones(3)), move(torch.ones(3, dtype=torch.float64))),
    "conv_dilation": lambda move: F.conv2d(move(ONE), move(ONE[..., :2, :2]), dilation=0),
    "conv_kernel": lambda move: F.conv2d(move(ONE), move(ONE[..., :0, :2])),
    "conv_output_padding": lambda move: F.conv_transpose2d(move(ONE), move(ONE), output_padding=1),
    "conv_padding": lambda move: F.conv2d(move(ONE), move(ONE), padding=-1),
    "conv_stride": lambda move: F.conv2d(move(ONE), move(ONE), stride=0),
    "conv_transposed_integers": lambda move: F.conv_transpose2d(move(ONE.int()), move(ONE.int())),
    "embedding_rank": lambda move: F.embedding(move(INTEGERS), move(torch.ones(4))),
    "exponential": lambda move: move(torch.ones(3)).exponential_(-1.0),
    "index_add_rows": lambda move: move(torch.ones(3, 2)).index_add(0, move(INTEGERS), move(torch.ones(3, 3))),
    "index_fill_matrix": lambda move: move(torch.ones(3, 3)).index_fill(0, move(INTEGERS[None]), 1.0),
    "index_reduce_bool": lambda move: move(FLAGS).index_reduce(0, move(INTEGERS), move(FLAGS), "amax"),
    "lu_pivot": lambda move: torch.linalg.lu_factor(move(ONE), pivot=False),
    "inplace_scalar": lambda move: move(torch.ones(3, dtype=torch.int64)).mul_(0.5),
    "inplace_tensor": lambda move: move(torch.ones(3, dtype=torch.bool)).mul_(move(torch.ones(3))),
    "inplace_unary": lambda move: move(torch.ones(3, dtype=torch.int64)).sqrt_(),
    "masked_select_out": lambda move: torch.masked_select(move(INTEGERS), move(FLAGS), out=move(torch.ones(0))),
    "minus_bool": lambda move: 1 - move(FLAGS),
    "multinomial_none": lambda move: torch.multinomial(move(torch.ones(3)), 0),
    "multinomial_rank": lambda move: torch.multinomial(move(ONE), 1),
    "max_of_nothing": lambda move: move(ONE[:, :0]).max(),
    "multinomial_too_many": lambda move: torch.multinomial(move(torch.ones(3)), 4),
    "nonzero_out": lambda move: torch.nonzero(move(INTEGERS), out=move(torch.ones(0))),
    "normal_integers": lambda move: torch.normal(0.0, 1.0, (2,), dtype=torch.int32, device=move(ONE).device),
    "out_exact": lambda move: torch.amax(move(torch.ones(3)), 0, out=move(torch.ones((), dtype=torch.float64))),
    "out_integer": lambda move: torch.add(move(torch.ones(3)), 1, out=move(torch.ones(3, dtype=torch.int64))),
    "out_second": lambda move: torch.sort(move(torch.ones(3)), out=(move(torch.ones(3)), move(torch.ones(3)))),
    "pow_negative": lambda move: move(INTEGERS) ** -1,
    "pow_overflow": lambda move: move(INTEGERS.to(torch.int8)) ** 200,
    "random_backwards": lambda move: move(torch.ones(3)).random_(4, 3),
    "randint_uint8": lambda move: torch.randint(0, 300, (3,), dtype=torch.uint8, device=move(ONE).device),
    "slice_step": lambda move: move(torch.ones(3)).slice_scatter(move(torch.ones(2)), 0, 0, 2, 0),
    "tril_indices_float": lambda move: torch.tril_indices(2, 2, dtype=torch.float32, device=move(ONE).device),
    "unfold_step": lambda move: move(torch.ones(())).unfold(0, 1, 0),
    "uniform": lambda move: move(torch.ones(3)).uniform_(2.0, 1.0),
    **{
        f"{name}_of_nothing": lambda move, name=name: getattr(move(ONE[:, :0]), name)(dim=1)  # type: ignore[misc]
        for name in ("amax", "aminmax", "argmax", "argmin", "median", "mode", "nanmedian")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_on_the_cpu(device: torch.device, name: str) -> None:
    with pytest.raises((IndexError, RuntimeError)) as expected:
        REFUSED[name](lambda tensor: tensor)
    with pytest.raises(expected.type):
        REFUSED[name](lambda tensor: tensor.to(device))


ROW, FIRST = torch.tensor([True, False, True]), torch.tensor([0])
TOO_LARGE = {torch.float16: 1e10, torch.bfloat16: 1e300, torch.int8: 300, torch.uint8: -300}
"""dtype -> a number that it does not hold."""
FILLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "fill_": lambda x, n, move: x.clone().fill_(n),
    "full": lambda x, n, move: torch.full((2,), n, dtype=x.dtype, device=x.device),
    "full_like": lambda x, n, move: torch.full_like(x, n),
    "new_full": lambda x, n, move: x.new_full((2,), n),
    "masked_fill": lambda x, n, move: x.masked_fill(move(ROW), n),
    "masked_fill_": lambda x, n, move: x.clone().masked_fill_(move(ROW), n),
    "masked_fill, tensor": lambda x, n, move: x.masked_fill(move(ROW), torch.tensor(n)),
    "index_fill": lambda x, n, move: x.index_fill(0, move(FIRST), n),
    "index_fill_, tensor": lambda x, n, move: x.clone().index_fill_(0, move(FIRST), torch.tensor(n)),
    "scatter": lambda x, n, move: x.scatter(0, move(FIRST), n),
    "pad": lambda x, n, move: F.pad(x, (1, 1), value=n),
    "clamp": lambda x, n, move: x.clamp(-1, n),
    "clamp, min=": lambda x, n, move: x.clamp(min=n),
    "clamp_max_": lambda x, n, move: x.clone().clamp_max_(n),
    "add, alpha": lambda x, n, move: torch.add(x, x, alpha=n),
    "sub_, alpha": lambda x, n, move: x.clone().sub_(x, alpha=n),
    "hardtanh": lambda x, n, move: F.hardtanh(x, -1, n),
    "threshold": lambda x, n, move: F.threshold(x, 1, n),
    "fill_diagonal_": lambda x, n, move: x.expand(3, 3).clone().fill_diagonal_(n),
    "foreach": lambda x, n, move: torch._foreach_clamp_max([x, x], n)[1],
    # Without a check of torch's: they round or promote.
    "x[0] =": lambda x, n, move: operator.setitem(x.clone(), 0, n),
    "fill_, tensor": lambda x, n, move: x.clone().fill_(torch.tensor(float(n))) if x.is_floating_point() else x,
    "where": lambda x, n, move: torch.where(move(ROW), x, n) if x.is_floating_point() else x,
    "==": lambda x, n, move: x == n,
}


@pytest.mark.parametrize("name", FILLS)
def test_numbers_that_do_not_fit_are_refused_in_the_words_of_the_cpu(device: torch.device, name: str) -> None:
    def outcome(dtype: torch.dtype, number: Any, where: Any) -> Any:
        try:
            result = FILLS[name](torch.ones(3, dtype=dtype, device=where), number, lambda tensor: tensor.to(where))
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0].lower()
        return None if result is None else str(result.tolist())  # NaN equals NaN

    refused = 0
    for dtype, number in TOO_LARGE.items():
        more = ((1j,) if name == "fill_" else ()) + ((math.inf, -math.inf, 1.5e4) if dtype.is_floating_point else ())
        for value in (number, -1, 5, *more):
            expected, actual = outcome(dtype, value, "cpu"), outcome(dtype, value, device)
            if "not implemented" not in str(expected):
                assert actual == expected, (dtype, value)
            refused += "without overflow" in str(actual)
    assert refused >= 3 or name in ("x[0] =", "fill_, tensor", "where", "==")


ACCEPTED: dict[str, Callable[[Any], Any]] = {
    "amax_of_nothing": lambda move: move(ONE[:, :0]).amax(0),
    "arange_out": lambda move: torch.arange(4, out=move(torch.empty(2, 2))),
    "as_strided_scatter": lambda move: move(torch.zeros(4)).as_strided_scatter(move(torch.ones(2)), (2,), (2,), 1),
    "bool_clamped": lambda move: move(FLAGS).clamp(0, 1),
    "cumsum_bool": lambda move: move(FLAGS).cumsum(0),
    "eye_out": lambda move: torch.eye(2, out=move(torch.empty(0))),
    "linspace_out": lambda move: torch.linspace(0, 1, 3, out=move(torch.empty(0, dtype=torch.float64))),
    "masked_select_out": lambda move: torch.masked_select(move(INTEGERS), move(FLAGS), out=move(INTEGERS[:0])),
    "multinomial_replacement": lambda move: torch.multinomial(move(torch.tensor([0.0, 1.0])), 4, replacement=True),
    "nonzero_out": lambda move: torch.nonzero(move(FLAGS), out=move(INTEGERS[:0])),
    "randint_uint8": lambda move: torch.randint(255, 256, (3,), dtype=torch.uint8, device=move(ONE).device),
    "random_int8": lambda move: move(torch.zeros(3, dtype=torch.int8)).random_(127, 128),
    "smooth_l1_loss_promoted": lambda move: F.smooth_l1_loss(move(INTEGERS), move(torch.ones(3))),
    "uniform_point": lambda move: move(torch.ones(3)).uniform_(2.0, 2.0),
}


def test_accepted_as_on_the_cpu(device: torch.device) -> None:
    assert_same(lambda where: {name: call(lambda x: x.to(where)) for name, call in ACCEPTED.items()}, rtol=1e-6)


def test_numbers_are_checked_in_every_call(device: torch.device) -> None:
    x = torch.ones(3, device=device).uniform_(0.0, 1.0)
    with pytest.raises(RuntimeError, match=r"expected from <= to, but got from=3\.0, to=1\.0"):
        x.uniform_(3.0, 1.0)
    assert 0 <= x.min().item() <= x.max().item() < 1


def test_booleans_divide_by_numbers_rounding_down(device: torch.device) -> None:
    assert torch.floor_divide(torch.ones(2, dtype=torch.bool).to(device), 0.5).tolist() == [2, 2]
    assert torch.ones(2, dtype=torch.int64).to(device).eq_(1.5).tolist() == [0, 0]


def test_a_result_is_converted_to_the_dtype_of_out(device: torch.device) -> None:
    out = torch.empty(3, dtype=torch.float64, device=device)
    torch.add(torch.arange(3).to(device), 1, out=out)
    assert out.tolist() == [1, 2, 3]


# -- indices out of range: those that were uploaded are refused, those that the device computed are not looked at ------

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "cross_entropy": lambda x, i: F.cross_entropy(x.T, i),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x, i.new_zeros(1)),
    "gather": lambda x, i: x.gather(0, i[None]),
    "index_add": lambda x, i: x.index_add(0, i, x[:3]),
    "index_copy": lambda x, i: x.clone().index_copy_(0, i, x[:3]),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:3], "amax"),
    "index_select": lambda x, i: x.index_select(0, i),
    "multi_margin": lambda x, i: F.multi_margin_loss(x.T, i),
    "nll_loss2d": lambda x, i: F.nll_loss(x[None, :, None], i[None, None]),
    "one_hot": lambda x, i: F.one_hot(i, 4),
    "scatter": lambda x, i: x.scatter(0, i[None], 2.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[None], x),
    "scatter_multiply": lambda x, i: x.scatter(0, i[None], x, reduce="multiply"),
    "scatter_reduce": lambda x, i: x.clone().scatter_reduce_(0, i[None], x, "amax"),
    "scatter_src": lambda x, i: x.scatter(0, i[None], x),
}
FROM_THE_END: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[i],
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_put": lambda x, i: x.index_put((i,), x[0]),
    "put": lambda x, i: x[:, 0].clone().put_(i, x[0]),
    "set": lambda x, i: x.clone().__setitem__(i, 1.0),
    "take": lambda x, i: x[:, 0].take(i),
}
"""Operations whose negative indices count from the end."""


def on_both(call: Callable[[Any, Any], Any], x: torch.Tensor, wrong: torch.Tensor, device: torch.device) -> str:
    """The message of the error that both devices raise, of one class."""
    with pytest.raises((IndexError, RuntimeError)) as of_cpu:
        call(x, wrong)
    with counted() as counts, pytest.raises(of_cpu.type) as caught:
        call(x.to(device), wrong.to(device))
    assert counts.host_syncs == 0
    return str(caught.value)


@pytest.mark.parametrize("end", ["last", "first"])
@pytest.mark.parametrize("name", [*CASES, *FROM_THE_END])
def test_uploaded_indices_are_refused(device: torch.device, name: str, end: str) -> None:
    call, least = (CASES[name], 0) if name in CASES else (FROM_THE_END[name], -4)
    x, bad = torch.arange(12.0).reshape(4, 3), 4 if end == "last" else least - 1
    good, wrong = torch.tensor([3, least, 1]), torch.tensor([3, least, bad])
    assert f"from {least} to 3, but got {bad}" in on_both(call, x, wrong, device)
    if name != "set":
        torch.testing.assert_close(call(x.to(device), good.to(device)).cpu(), call(x, good))


def test_an_index_that_was_used_before_is_checked_again(device: torch.device) -> None:
    """In one step: the trace has read the index already."""
    x, index = torch.arange(12.0).reshape(4, 3).to(device), torch.tensor([3, 0]).to(device)
    kept = x[index]
    with pytest.raises(IndexError, match="from -3 to 2, but got 3"):
        x[:, index]
    with pytest.raises(IndexError, match="from -3 to 2, but got 3"):
        x[:, torch.tensor([3])]  # an index on the CPU
    assert kept.tolist() == [[9, 10, 11], [0, 1, 2]]


def test_only_the_part_that_is_used_counts(device: torch.device) -> None:
    x, index = torch.arange(12.0).reshape(4, 3), torch.tensor([9, 3, 0, 1, -7])
    got = x.to(device).index_select(0, index.to(device)[1:4])
    assert torch.equal(got.cpu(), x.index_select(0, index[1:4]))


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignored_targets_pass(device: torch.device, ignored: int) -> None:
    x, target = torch.arange(12.0).reshape(3, 4).sin(), torch.tensor([3, ignored, 1])
    got = F.cross_entropy(x.to(device), target.to(device), ignore_index=ignored)
    torch.testing.assert_close(got.cpu(), F.cross_entropy(x, target, ignore_index=ignored))
    with pytest.raises(IndexError, match="it is not ignore_index, which is -5"):
        F.cross_entropy(x.to(device), target.to(device), ignore_index=-5)


def test_indices_from_the_device_are_not_looked_at(device: torch.device) -> None:
    """The twin, and what the page on support says of these: no wait, and no memory of anything else."""
    x = torch.arange(12.0).reshape(4, 3)
    index = torch.tensor([3, 0, 4]).to(device) + torch.zeros(3, dtype=torch.int64, device=device)
    with counted() as counts:
        read = x.to(device).index_select(0, index)
        written = torch.zeros(4, 3, device=device).index_add(0, index, torch.ones(3, 3, device=device))
    assert counts.host_syncs == 0
    assert torch.equal(read.cpu()[:2], x[[3, 0]])
    assert written.cpu().sum(1).tolist() == [3, 0, 0, 3]
