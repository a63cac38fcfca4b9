"""Embedding bags against plain embeddings, bag by bag in float64, with autograd for the gradients.

torch's CPU kernels are not the reference: they return other auxiliary tensors than a device's kernels, and with
``scale_grad_by_freq`` they divide by the frequency of the wrong index.
"""

from __future__ import annotations

import pytest
import torch
from harness import compare, run, sample, untested

MODES = ("sum", "mean", "max")
INDICES = torch.tensor([0, 1, 1, 5, 2, 0])
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty
FORWARD = ("_embedding_bag", "_embedding_bag_forward_only")
BACKWARD = ("_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward")


def reference(weight: torch.Tensor, mode: str, padding: int, scales: torch.Tensor | None) -> torch.Tensor:
    bags = []
    for start, stop in zip(OFFSETS.tolist(), [*OFFSETS.tolist()[1:], len(INDICES)], strict=True):
        entries = [i for i in range(start, stop) if INDICES[i] != padding]
        rows = weight[INDICES[entries]]
        if scales is not None:
            rows = rows * scales[entries][:, None]
        if not entries:
            bags.append(weight.new_zeros(weight.shape[1]))
        else:
            bags.append(rows.sum(0) if mode == "sum" else rows.mean(0) if mode == "mean" else rows.amax(0))
    return torch.stack(bags)


CASES = [
    (dtype, mode, padding, weighted)
    for dtype in (torch.float32, torch.bfloat16)
    for mode in MODES
    for padding in (-1, 1, 2)
    for weighted in (False, True)
    if not weighted or mode == "sum"
]


@pytest.mark.parametrize(("dtype", "mode", "padding", "weighted"), CASES)
def test_bags_and_their_gradients(dtype, mode, padding, weighted):
    weight, number = sample(6, 3, dtype=dtype), MODES.index(mode)
    scales = sample(6, dtype=dtype, low=0.5, high=2.0) if weighted else None
    wide = weight.double().requires_grad_()
    wide_scales = None if scales is None else scales.double().requires_grad_()
    expected = reference(wide, mode, padding, wide_scales)
    grad = sample(4, 3, dtype=dtype, seed=5)
    expected.backward(grad.double())

    arguments = (weight, INDICES, OFFSETS, False, number, False, scales, False, padding)
    result, bag, size, places = run("_embedding_bag", *arguments)
    compare(result, expected.detach().to(dtype))
    assert bag.tolist() == [0, 0, 2, 2, 2, 3]
    rest = (6, False, number, scales, padding)
    got = run("_embedding_bag_dense_backward", grad, INDICES, bag, size, places, *rest)[0]
    compare(got, wide.grad.to(dtype))
    if wide_scales is not None:
        operands = (grad, weight, INDICES, OFFSETS, bag)
        got = run("_embedding_bag_per_sample_weights_backward", *operands, number, padding)[0]
        compare(got, wide_scales.grad.to(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_the_last_bag_may_be_among_the_offsets(mode):
    weight, ends = sample(6, 3), torch.cat([OFFSETS, torch.tensor([len(INDICES)])])
    arguments = (weight, INDICES, ends, False, MODES.index(mode), False, None, True)
    result, _, size, _ = run("_embedding_bag_forward_only", *arguments)
    compare(result, reference(weight, mode, -1, None))
    assert size.tolist() == [2, 0, 3, 1, 0]


def test_gradients_scaled_by_frequency():
    grad, weight = sample(4, 3), sample(6, 3)
    _, bag, size, places = run("_embedding_bag", weight, INDICES, OFFSETS)
    got = run("_embedding_bag_dense_backward", grad, INDICES, bag, size, places, 6, True, 0, None)[0]
    expected = torch.zeros(6, 3)
    for index, number in zip(INDICES.tolist(), bag.tolist(), strict=True):
        expected[index] += grad[number] / INDICES.tolist().count(index)
    compare(got, expected)


def test_every_operation_is_tested():
    assert untested(("embedding_bag",), [], elsewhere=[*FORWARD, *BACKWARD]) == []
