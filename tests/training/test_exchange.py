"""Values that processes send each other as JSON: a stranger's text is an error, and gives nothing but values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_amp
from xla_amp.errors import EngineError
from xla_amp.lazy.distributed import exchange


def tagged(name, value):
    return json.dumps({"xla_amp": name, "value": value}).encode()


@pytest.mark.parametrize(
    "text",
    [
        tagged("dtype", "load"),
        tagged("dtype", "ops"),
        tagged("dtype", 3),
        tagged("tensor", ["hub", [1], False, ""]),
        tagged("tensor", ["float32", [3], False, "AAAA"]),
        tagged("array", ["O", [1], "AAAAAAAAAAA="]),
        tagged("array", ["<f4", [1]]),
        tagged("class", "x"),
        json.dumps({"xla_amp": "dtype"}).encode(),
        b"[" * 10_000 + b"]" * 10_000,
        b"[" * 900 + b'{"xla_amp": "tuple", "value": 3}' + b"]" * 900,
        b"1" * 5_000,
        b"\xff",
        b"",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_a_text_of_a_stranger_is_an_error(text):
    with pytest.raises(EngineError, match="another process sent something"):
        exchange.decode(text)


def test_a_value_without_an_end_is_named():
    endless: list = []
    endless.append(endless)
    for value in (endless, 10**5000):
        with pytest.raises(TypeError, match="test: cannot send this value"):
            exchange.encode(value, "test")


def test_values_travel_as_json():
    device = xla_amp.xla_device()
    data = {
        "plain": [None, True, 3, 0.1, float("inf"), "é"],
        1: (1, {2, 3}, b"\x00\xff", 1j, Path("a/b"), torch.Size([2])),
        "tensors": [torch.arange(6).reshape(2, 3).T, torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 2)],
        "device": torch.nn.Parameter(torch.ones(2, device=device)),
        "numpy": [np.float64(0.1), np.int8(3), np.arange(4.0).reshape(2, 2)[:, 1], np.array(2)],
        ("key", 0): torch.float16,
        "float8": torch.float8_e4m3fn,
    }
    text = exchange.encode(data, "test")
    json.loads(text)
    found = exchange.decode(text)
    assert found["plain"] == data["plain"]
    assert found[1] == data[1]
    assert (found[("key", 0)], found["float8"]) == (torch.float16, torch.float8_e4m3fn)
    for one, other in zip(found["tensors"], data["tensors"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert found["device"].device.type == "jax"
    assert found["device"].tolist() == [1, 1]
    for one, other in zip(found["numpy"], data["numpy"], strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert exchange.decode(exchange.encode({"xla_amp": "tensor", "value": 1}, "test")) == {
        "xla_amp": "tensor",
        "value": 1,
    }


class _Mine(dict):
    pass


@pytest.mark.parametrize("value", [object(), [len], _Mine(), torch.nn.Linear(1, 1), np.array([None]), {object(): 1}])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"x: cannot send a [\w.]+: expected numbers, texts"):
        exchange.encode(value, "x")
