"""What a test leaves open: regions of xla_amp and of torch, and overrides."""

from __future__ import annotations

import sys
from collections.abc import Iterator

DEVICES = ("cpu", "cuda", "xla")


def close_regions() -> list[str]:
    """Closes the regions and overrides that are open on this thread; says which.

    Weights that a region of torch has cast stay cast in every later one of the process, so the cache is cleared, too.
    """
    return list(dict.fromkeys(_closed()))


def _closed() -> Iterator[str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    of_pytorch = sys.modules.get("xla_amp.pytorch.autocast.autocast")
    while of_pytorch is not None and of_pytorch._open.stack:
        owner = of_pytorch._open.stack[-1].owner
        owner.__exit__(None, None, None)
        yield f"{owner!r}"
    rules = sys.modules.get("xla_amp.policy.resolve")
    saved = None if rules is None else rules.open_rules()
    for override in reversed(() if saved is None else saved.overrides):
        override.__exit__(SystemExit, None, None)  # as an error leaves it, which does not look at what it matched
        yield f"{override!r}"
    for device in (*DEVICES, *(("jax",) if hasattr(torch, "jax") else ())):
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            yield f"torch.autocast({device!r})"
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        yield "a region of torch"
    torch.clear_autocast_cache()
