"""This machine's processor, and which products a chip has."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Final, NamedTuple

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


def gpu_multiplies_bfloat16(compute_capability: str) -> bool:
    """Whether a GPU has products in bfloat16: NVIDIA's from 8.0 on, all of AMD's (``gfx90a``) that JAX supports."""
    major = compute_capability.partition(".")[0]
    return not major.isdigit() or int(major) >= 8


@functools.cache
def processor() -> Processor:
    """The CPU of this machine, read once."""
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
