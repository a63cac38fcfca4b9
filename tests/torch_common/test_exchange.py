"""Values that processes send each other: a stranger's bytes are an error, and run nothing."""

from __future__ import annotations

import collections
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_amp
from xla_amp.errors import EngineError
from xla_amp.torch_common import exchange


class _Runs:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        lambda: saved(_Runs()),
        lambda: saved([1, {"x": _Runs()}]),
        lambda: pickle.dumps(_Runs()),
        lambda: saved(np.array([_Runs()])),
        lambda: saved(torch.ones(3))[:-40],
        lambda: b"\xff",
        lambda: b"",
    ],
)
def test_bytes_of_a_stranger_are_an_error(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError, match=r"has something that .* does not write"):
        exchange.decode(make())
    assert not Path("ran").exists()


def test_values_travel():
    device = xla_amp.xla_device()
    data = {
        "plain": [None, True, 3, 0.1, float("inf"), "é"],
        1: (1, {2, 3}, frozenset({4}), b"\x00\xff", 1j, Path("a/b"), torch.Size([2])),
        "tensors": [torch.arange(6).reshape(2, 3).T, torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 2)],
        "device": torch.nn.Parameter(torch.ones(2, device=device)),
        "numpy": [np.float64(0.1), np.int8(3), np.arange(4.0).reshape(2, 2)[:, 1], np.array(2), np.float32(2)],
        ("key", 0): torch.float16,
        "float8": torch.float8_e4m3fn,
        "counts": collections.Counter(a=1),
    }
    found = exchange.decode(exchange.encode(data, "test"))
    for name in ("plain", 1, ("key", 0), "float8", "counts"):
        assert found[name] == data[name]
    for one, other in zip(found["tensors"], data["tensors"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert found["device"].device.type == "jax"
    assert found["device"].tolist() == [1, 1]
    for one, other in zip(found["numpy"], data["numpy"], strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


class _Mine(dict):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        ([len], "builtins.len"),
        (_Mine(), f"{__name__}._Mine"),
        (torch.nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear.*"),
        (np.array([None]), "this value .*"),
        ({lambda: 1: 1}, "this value .*(pickle|lambda).*"),
    ],
)
def test_other_values_are_refused(value, named):
    with pytest.raises(TypeError, match=f"x: {named} could not be read again: expected numbers, texts"):
        exchange.encode(value, "x")
