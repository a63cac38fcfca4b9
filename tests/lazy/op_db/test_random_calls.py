"""A sample of random calls; `python tests/lazy/op_db/call_samples.py 5000` makes thousands."""

from __future__ import annotations

import call_samples
import torch


def test_random_calls_are_as_on_the_cpu(device: torch.device) -> None:
    found = list(call_samples.compare(seed=0, count=32, device=device, batch=16))
    assert len(found) > 25
    wrong = [f"{call}: {how}" for call, how in found if how and not call_samples.reason(call, how)]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_value_and_a_missing_error_are_found(device: torch.device) -> None:
    """The twin: a function that is wrong on the device."""

    def double(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" and x.dtype is torch.bool:
            raise RuntimeError("no booleans")
        return x * (2 if x.device.type == "cpu" else 3)

    def difference(x: torch.Tensor) -> str:
        got = call_samples._read(double(x.to(device)))
        call = call_samples.Call(name="double", function=double, operands=(x,), options={})
        return call_samples._difference(call_samples._run(call, (x,), {}), got)

    assert difference(torch.ones(2)).startswith("value: 2.0 there, 3.0")
    assert difference(torch.ones(2, dtype=torch.bool)).startswith("accepts: RuntimeError")
    assert not difference(torch.zeros(2))
