"""Values that processes send each other as JSON: a stranger's text is an error, and gives nothing but values."""

from __future__ import annotations

import json

import pytest
import torch

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


def test_what_is_sent_comes_back():
    sent = {"a": (1, {2.5}), 3: torch.float8_e4m3fn, "t": torch.ones(2, dtype=torch.bfloat16), "c": 1j}
    found = exchange.decode(exchange.encode(sent, "test"))
    assert found.pop("t").equal(sent.pop("t"))
    assert found == sent


def test_a_value_without_an_end_is_named():
    endless: list = []
    endless.append(endless)
    for value in (endless, 10**5000):
        with pytest.raises(TypeError, match="test: cannot send this value"):
            exchange.encode(value, "test")
