"""Regions that are opened inside a function that `torch.compile` traces.

Dynamo reads Python instead of running it.  It knows `torch.autocast`, not ours, so it gets a `torch.autocast` with the
low dtype of our rules.  The device's autocast kernels follow the same rules under both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def region(find: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """The region for the arguments of `autocast`.

    `find` returns the arguments of the `torch.autocast` with the same casts, or None if there is none; then Dynamo
    leaves the function that opens the region to Python, and compiles the functions that it calls.
    """
    found = find(*arguments)
    if found is None:
        torch._dynamo.graph_break(
            msg="xla_amp.autocast with its own policy, or inside a region that has one: open the region outside of the "
            "function that torch.compile gets"
        )
    device_type, low, enabled, cache_enabled = found
    with torch.autocast(device_type, low, enabled, cache_enabled):
        yield
