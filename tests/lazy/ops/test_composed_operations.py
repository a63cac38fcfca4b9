"""Operations that torch composes of others on the device: they have no lowering.

Of those here the operator database (tests/lazy/op_db) has all but windows and forms in place.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import assert_same, sample


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


def test_windows(device: torch.device) -> None:
    assert_same(windows, rtol=1e-6, atol=1e-6)


def test_a_gamma_function_in_place(device: torch.device) -> None:
    assert_same(lambda place: (sample(4, 5).abs() + 3).to(place).polygamma_(1), rtol=1e-6, atol=1e-6)
