"""Calls that torch refuses on the CPU are refused on the lazy device, at the call and with the same class of error.

The calls are the error inputs of torch's operator database, and its samples in dtypes that the CPU does not support.
``XLA_AMP_TEST_ALL=1`` runs every entry; otherwise every tenth runs.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_entries import ENTRIES
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_map

from xla_amp.errors import StepFailedError
from xla_amp.lazy.graph.trace import trace

ALL = bool(os.environ.get("XLA_AMP_TEST_ALL"))
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.complex64)
SAMPLES = 2
"""Samples of each dtype."""

OUT = "the device computes a result before it writes out=, so memory shared with an operand does no harm"
DATA = "the error depends on values, which only the device has"
DIFFERENCES: dict[str, str] = {
    "cat": OUT,
    "gather": OUT,
    "histc": "counts integers, as CUDA does, which models rely on",
    "index_select": OUT,
    "kthvalue": OUT,
    "masked_select": OUT,
    "multinomial": DATA,
    "narrow_copy": "IndexError, as on other devices; an internal assertion of the CPU's kernel fails before",
    "nn.functional.max_pool1d": "max_pool2d, which the CPU computes for integers, computes it",
    "take": OUT,
}
"""Entry -> why a call that the CPU refuses is accepted, or refused with another class of error."""


def chosen(names: list[str]) -> list[str]:
    return names if ALL else names[::10]


def moved(value: Any, device: torch.device) -> Any:
    """`value` on `device`; tensors that share memory share it there."""
    memories: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return device
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf
        storage = leaf.untyped_storage()
        if storage.data_ptr() not in memories or not leaf.numel():
            memories[storage.data_ptr()] = leaf.detach().new_empty(0).set_(storage).to(device)
        whole = memories[storage.data_ptr()]
        if whole.dtype is not leaf.dtype:
            return leaf.detach().to(device)
        return whole.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())

    return tree_map(move, value)


def wrong_dtypes(op: OpInfo) -> Iterator[Any]:
    for dtype in DTYPES:
        try:
            found = list(itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES))
        except Exception:  # no samples of this dtype
            continue
        yield from found


def wrong_arguments(op: OpInfo) -> Iterator[Any]:
    if op.error_inputs_func is not None:
        yield from (error.sample_input for error in op.error_inputs("cpu"))


def outcome(op: OpInfo, arguments: Any) -> Exception | None:
    given, args, kwargs = arguments
    torch.manual_seed(0)
    try:
        op(given, *args, **kwargs)
    except Exception as error:
        return error
    return None


def differences(op: OpInfo, calls: Iterator[Any], device: torch.device) -> tuple[int, list[str]]:
    """(calls that the CPU refuses, those of them that the device does not)."""
    refused, found = 0, []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for sample in calls:
            arguments = (sample.input, sample.args, sample.kwargs)
            try:
                there = moved(arguments, device)
            except Exception:  # a dtype or a number of dimensions that the device does not have
                continue
            wanted = outcome(op, arguments)
            if wanted is None:
                continue
            refused += 1
            got = outcome(op, there)
            if got is None or isinstance(got, StepFailedError) or not isinstance(got, type(wanted)):
                found.append(f"{wanted!r} on the CPU, {got!r} on the device")
            del there
            trace.clear()
    return refused, found


@pytest.mark.parametrize("name", chosen(sorted(ENTRIES)))
def test_a_wrong_call_is_refused_at_once(name, device):
    op = ENTRIES[name]
    _, found = differences(op, itertools.chain(wrong_arguments(op), wrong_dtypes(op)), device)
    if ALL and name in DIFFERENCES:
        assert found, "no difference is left: delete its row"
    assert name in DIFFERENCES or not found, found


def test_every_row_names_an_entry():
    assert not set(DIFFERENCES) - set(ENTRIES)
    assert all(len(reason) > 10 for reason in DIFFERENCES.values())
