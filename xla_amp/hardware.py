"""This machine's processor, and GPUs and TPUs to compile for when they are absent: the rows of ``hardware.toml``."""

from __future__ import annotations

import functools
import importlib.resources
import os
import platform
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from xla_amp.errors import DeviceError

ATTRIBUTES: Final = "mhlo.frontend_attributes"
"""Attribute of a module that carries what its producer says of it; XLA reads nothing there."""
OPTION: Final = "xla_amp.option."
"""A key there, followed by the name of an option of XLA's compiler with which the program is meant to be compiled."""


_VECTORS: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instructions of x86 that decide how fast XLA's programs are, as ``/proc/cpuinfo`` spells them."""


class Processor(NamedTuple):
    """This machine's CPU."""

    name: str
    cores: int
    """That this process may use."""
    flags: frozenset[str]
    """All its instruction sets; empty where ``/proc/cpuinfo`` does not say."""

    @property
    def features(self) -> tuple[str, ...]:
        """Those of `_VECTORS`."""
        return tuple(each for each in _VECTORS if each in self.flags)

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has instructions for products in bfloat16 (AVX512-BF16 or AMX)."""
        return "avx512_bf16" in self.flags or "amx_bf16" in self.flags


def processor() -> Processor:
    """The CPU of this machine."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags.update(value.split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processor(name=name, cores=cores, flags=frozenset(flags))


def names() -> tuple[str, ...]:
    """All known targets, whether or not their compilers are installed."""
    return tuple(_specifications())


def specification(target: str) -> Mapping[str, Any]:
    """The row of ``hardware.toml``.

    Raises:
        DeviceError: unknown target.
    """
    rows = _specifications()
    if target not in rows:
        raise DeviceError(f"target {target!r}: expected one of {', '.join(rows)}")
    return rows[target]


@functools.cache
def _specifications() -> Mapping[str, Mapping[str, Any]]:
    text = importlib.resources.files(__package__).joinpath("hardware.toml").read_text(encoding="utf-8")
    return MappingProxyType({name: MappingProxyType(row) for name, row in tomllib.loads(text).items()})
