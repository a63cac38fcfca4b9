"""What torch has of ours while a region or an override is open: kernels, paths of modules, rules of recomputation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TypeAlias

from xla_amp.policy import regions
from xla_amp.policy.policy import RuleLayer
from xla_amp.policy.resolve import overriding
from xla_amp.pytorch.autocast import kernels, recomputation
from xla_amp.torch_common import module_paths

_Identity: TypeAlias = tuple[str | int, int]
_lock = threading.Lock()
_open: dict[_Identity, list[contextlib.ExitStack | None]] = {}
"""What is held for each region and override.  They open and close on many threads, not always in order, so the key is
an identity: the device type or the thread, and the ``id`` of the region or of the override's layer (which equal
overrides share)."""


def _region_opens(device_type: str, region: regions.Region) -> None:
    operations = kernels.of_region(device_type, region.policy)
    _opens(device_type, region, [(device_type, operations)] if operations else (), region.policy.by_module)


def _override(layer: RuleLayer, opens: bool) -> None:
    if opens:
        _opens(threading.get_ident(), layer, kernels.of_override(layer), bool(layer.reach_in_modules()))
    else:
        _closes(threading.get_ident(), layer)


def _opens(where: str | int, scope: object, wanted: Sequence[kernels.Wanted], by_module: bool) -> None:
    held = None
    if wanted or by_module:
        with contextlib.ExitStack() as stack:
            for each in wanted:
                stack.callback(kernels.hold(*each))
            if by_module:
                stack.callback(module_paths.acquire())
            held = stack.pop_all()
    with _lock:
        if not _open:
            recomputation.begin()
        _open.setdefault((where, id(scope)), []).append(held)


def _closes(where: str | int, scope: object) -> None:
    identity = where, id(scope)
    with _lock:
        entries = _open.get(identity)
        if not entries:  # an override that was opened before this module was imported
            return
        held = entries.pop()
        if not entries:
            del _open[identity]
            if not _open:
                recomputation.end()
    if held is not None:
        held.close()


regions.opening.subscribe(_region_opens)
regions.closed.subscribe(_closes)
overriding.subscribe(_override)
