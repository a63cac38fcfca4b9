"""Operations that torch composes of others on the device: they have no lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, sample

from xla_amp.lowering import find

aten = torch.ops.aten
HALF = torch.bfloat16


def windows(place: str) -> dict[str, Any]:
    made = {}
    for name in ("bartlett", "blackman", "hamming", "hann"):
        window = getattr(torch, f"{name}_window")
        for periodic in (True, False):
            for length, dtype in ((1, torch.float32), (8, torch.float32), (9, torch.float64)):
                made[f"{name} {periodic} {length}"] = window(length, periodic, dtype=dtype, device=place)
    made["alpha"] = torch.hamming_window(9, True, 0.6, device=place)
    made["alpha and beta"] = torch.hamming_window(9, False, 0.6, 0.3, device=place)
    return made


def turns(place: str) -> dict[str, Any]:
    x = sample(3, 4, 5).to(place)
    return {f"rot90 {k}": torch.rot90(x, k, [0, 2]) for k in (0, 1, 2, 3, -1, 5)}


def shuffles(place: str) -> dict[str, Any]:
    def of(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        return sample(*shape, dtype=dtype).to(place)

    return {
        "pixels": aten.pixel_shuffle(of(2, 8, 3, 4), 2),
        "one image": aten.pixel_shuffle(of(8, 3, 4, dtype=torch.float32), 2),
        "back": aten.pixel_unshuffle(of(2, 3, 4, 6), 2),
    }


def functions(place: str) -> dict[str, Any]:
    x, half = sample(4, 5).to(place), sample(4, 5, dtype=HALF).to(place)
    whole, positive = torch.arange(4, device=place), x.abs() + 3
    return {
        "degrees": [aten.deg2rad(x), aten.deg2rad(half), aten.deg2rad(whole)],
        "radians": [aten.rad2deg(x), aten.rad2deg(half), aten.rad2deg(whole)],
        "celu": [aten.celu(x, 1.3), aten.celu(half, 1.3)],
        "gamma functions": [aten.mvlgamma(positive, 2), positive.clone().polygamma_(1)],
    }


@pytest.mark.parametrize("program", [windows, turns, shuffles, functions])
def test_as_torch(program: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    assert_same(program, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["celu", "deg2rad", "hann_window", "mvlgamma", "pixel_shuffle", "rot90"])
def test_none_of_them_has_a_lowering(name: str) -> None:
    assert find(name) is None
