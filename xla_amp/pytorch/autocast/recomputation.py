"""The rules of what `torch.utils.checkpoint` computes again in the backward pass: those of the forward pass.

torch saves whether autocast is on and its low dtype, and restores both around the second forward pass.  The rules of
our regions and overrides must travel with them, because `backward()` may run outside of the region, inside another one,
or on a thread of autograd.  torch has no place for them, so while a region or an override is open, two functions of
torch are replaced: those that keep, in the forward pass, the function that is run again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils import checkpoint

from xla_amp.policy.resolve import OpenRules, open_rules, reopened
from xla_amp.pytorch.autocast import kernels

_ReentrantForward: TypeAlias = "staticmethod[..., Any]"

_lock = threading.Lock()
_torchs: tuple[Callable[..., None], _ReentrantForward] | None = None
"""torch's own functions while they are replaced."""


def begin() -> None:
    """Replaces torch's functions; `scopes` calls it for the first region or override that opens."""
    global _torchs
    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    _torchs = frame.__init__, function.__dict__["forward"]
    frame.__init__ = _non_reentrant(frame.__init__)  # type: ignore[method-assign]
    function.forward = staticmethod(_reentrant(function.forward))  # type: ignore[method-assign]


def end() -> None:
    """Restores them, when none is open."""
    global _torchs
    if _torchs is not None:
        checkpoint._CheckpointFrame.__init__, checkpoint.CheckpointFunction.forward = _torchs  # type: ignore[method-assign]
        _torchs = None


@functools.lru_cache(maxsize=4)
def _non_reentrant(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(frame, _with_present_rules(recompute_fn), *args, **kwargs)

    return initialize


@functools.lru_cache(maxsize=4)
def _reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any) -> Any:
        outputs = original(ctx, *args)
        ctx.run_function = _with_present_rules(ctx.run_function)
        return outputs

    return forward


def _with_present_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be run under the rules that are in force now."""
    rules = open_rules()
    if rules is None:
        return function

    @functools.wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        with reopened(rules):
            _keep_kernels(rules)
            return function(*args, **kwargs)

    return again


# Installing kernels takes up to 30 ms (rules for modules on a torch device), and a model has many checkpointed parts.
# So kernels stay installed from the first of them to the end of the backward pass.
_kept: dict[int, dict[kernels.Wanted, kernels.Release]] = {}
"""By backward pass."""


def _keep_kernels(rules: OpenRules) -> None:
    of_pass = torch._C._current_graph_task_id()
    wanted = kernels.wanted(rules)
    if of_pass == -1 or not wanted:
        return
    with _lock:
        kept = _kept.get(of_pass)
        if kept is None:
            # A pass that raised has not called back.
            for other in [other for other in _kept if other != of_pass]:
                _release(other)
            kept = _kept[of_pass] = {}
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end_of_pass, of_pass))
        for each in wanted:
            if each not in kept:
                kept[each] = kernels.hold(*each)


def _end_of_pass(of_pass: int) -> None:
    with _lock:
        _release(of_pass)


def _release(of_pass: int) -> None:
    for release in _kept.pop(of_pass, {}).values():
        release()
