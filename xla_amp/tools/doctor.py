"""What this machine and this environment offer, and what does not fit together: ``xla-amp doctor``.

Nothing is started in this process.  JAX's devices are asked for in another one, since a plugin without its hardware can
print, hang or end a process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Final

from xla_amp import hardware
from xla_amp.common import config
from xla_amp.errors import PolicyError
from xla_amp.pages.page import Page, Report, Section
from xla_amp.policy import load
from xla_amp.policy.load import default_name

LIBRARIES: Final = (
    "torch", "torch_xla", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin",
    "jax-rocm60-plugin", "numpy", "flax", "optax", "transformers", "accelerate", "lightning", "timm",
)  # fmt: skip
"""Distributions whose versions matter; those that are not installed are not shown."""
SUPPORTED: Final[Mapping[str, tuple[tuple[int, int], tuple[int, int]]]] = {
    "torch": ((2, 9), (2, 15)),
    "jax": ((0, 10), (0, 12)),
}
"""Library -> oldest and newest version, as in ``pyproject.toml``."""
_PREFIXES: Final = ("XLA_", "JAX_", "PJRT_", "LIBTPU_", "TPU_", "CUDA_VISIBLE", "TORCH_")
"""Beginnings of the environment variables that are shown."""
_LIMIT: Final = 60
"""Seconds that JAX may take to find its devices."""
_DEVICES: Final = """
import importlib.util, json, jax
found = [[d.platform, d.device_kind, str(getattr(d, "compute_capability", ""))] for d in jax.devices()]
shared = False
if found[0][0] in ("gpu", "cuda") and importlib.util.find_spec("torch"):
    import torch
    shared = torch.cuda.is_available()
print(json.dumps([found, shared]))
"""
_ALLOCATOR: Final = ("PREALLOCATE", "MEM_FRACTION", "ALLOCATOR")
"""Ends of JAX's variables, after XLA_PYTHON_CLIENT_, each of which says how much memory it takes at its start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis(Report):
    """The findings of `diagnose`."""

    versions: Mapping[str, str]
    """Of Python and of `LIBRARIES`."""
    processor: str
    """The CPU's name, with its instructions for bfloat16."""
    devices: str
    """JAX's devices, or why it found none."""
    cache: str
    """The folder of compiled programs, with its size."""
    environment: Mapping[str, str]
    """Variables that change what is computed, compiled or found."""
    engine: str = ""
    """What XLA tensors of PyTorch are on; empty without PyTorch."""
    low: str = ""
    """The default low dtypes and policy on the first device; empty where there is none."""
    conflicts: tuple[tuple[str, str], ...] = ()
    """(what does not fit together, what to do)."""

    def page(self) -> Page:
        """The same as a report."""
        variables = ", ".join(f"{name}={value}" for name, value in self.environment.items())
        count = len(self.conflicts)
        return Page(
            "xla-amp doctor",
            {
                "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
                **({} if "torch" in self.versions else {"torch": "not installed"}),
                "system": platform.platform(),
                "processor": self.processor,
                "devices": self.devices,
                **{name: value for name, value in (("engine", self.engine), ("low dtype", self.low)) if value},
                "compiled programs": self.cache,
                "environment": variables or "none of the variables that matter is set",
            },
            [Section("What does not fit together?", f"{count or 'nothing'} found", self.conflicts)],
        )


def diagnose() -> Diagnosis:
    """Looks at versions, processor, devices, cache and environment; takes seconds, since JAX starts in a process."""
    versions = {"Python": platform.python_version(), "xla-amp": config.version(), **dict(_installed())}
    devices, shared = _devices()
    return Diagnosis(
        versions=versions,
        processor=_processor(),
        devices=_shown(devices),
        cache=_cache(),
        environment={name: value for name, value in sorted(os.environ.items()) if value and name.startswith(_PREFIXES)},
        engine=_engine(versions),
        low=low_dtypes(devices),
        conflicts=tuple(conflicts(versions, devices, shared)),
    )


def _installed() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _processor() -> str:
    found = hardware.processor()
    advice = "" if found.multiplies_bfloat16 else "; it has no products in bfloat16, so float32 is faster on it"
    return f"{found.name}, {found.cores} cores, {', '.join(found.features) or 'no vector instructions known'}{advice}"


def _devices() -> tuple[list[list[str]] | str, bool]:
    """(platform, kind, compute capability) of each device of JAX or why it has none; whether torch has its GPU, too."""
    command = [sys.executable, "-c", _DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"JAX did not find its devices within {_LIMIT} s", False
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return f"JAX does not start: {last[0]}", False
    found: tuple[list[list[str]], bool] = json.loads(lines[-1])
    return found


def _shown(devices: list[list[str]] | str) -> str:
    if isinstance(devices, str):
        return devices
    kinds = {f"{place} ({kind}{f', {capability}' if capability else ''})" for place, kind, capability in devices}
    return f"{len(devices)}: {', '.join(sorted(kinds))}"


def _engine(versions: Mapping[str, str]) -> str:
    if "torch" not in versions:
        return ""
    try:
        wanted = config.engine()
    except PolicyError as error:
        return str(error)
    fits = "torch_xla" in versions and _pair(versions["torch_xla"]) == _pair(versions["torch"])
    chosen = ("torch_xla" if fits else "jax") if wanted == "auto" else wanted
    return {"jax": "jax, the lazy device on JAX", "torch_xla": "torch_xla"}[chosen]


def low_dtypes(devices: list[list[str]] | str) -> str:
    """The default low dtypes and policy of the fronts on the first of the devices; empty where there is none."""
    if isinstance(devices, str) or not devices:
        return ""
    platform, _, capability = devices[0]
    try:
        policy = load(default_name(platform))
    except PolicyError:  # a plugin's platform, for which a policy is named
        return ""
    if policy.jax_low == policy.low or hardware.gpu_multiplies_bfloat16(capability):
        return f"{policy.named_low} by the policy {policy.name}"
    return f"{policy.low} by the policy {policy.name}; bfloat16 needs a GPU of compute capability 8.0"


def _cache() -> str:
    named = config.cache()
    folder = config.default_cache() if named == "default" else named
    if folder is None or folder == "off":
        return "not kept"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return f"{folder}, {size / 2**20:.0f} MiB"


def conflicts(
    versions: Mapping[str, str], devices: list[list[str]] | str, shared: bool = False
) -> Iterator[tuple[str, str]]:
    """(what does not fit together, what to do); `devices` and `shared` are what `_devices` gives."""
    for name, (oldest, newest) in SUPPORTED.items():
        if name in versions and not oldest <= _pair(versions[name]) <= newest:
            wanted = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
            yield (
                f"{name} {versions[name]}",
                f"versions {wanted} are supported: pip install '{name}<={newest[0]}.{newest[1]}.*'",
            )
    for name, base, advice in (
        ("jaxlib", "jax", f"install one version of both: pip install jaxlib=={versions.get('jax')}"),
        ("torch_xla", "torch", "they work together in one version; XLA_AMP_ENGINE=jax uses the other engine"),
    ):
        if name in versions and base in versions and _pair(versions[name]) != _pair(versions[base]):
            yield f"{name} {versions[name]} beside {base} {versions[base]}", advice
    if isinstance(devices, str):
        yield devices, "run python -c 'import jax; print(jax.devices())' for the whole message"
        return
    if shared and not any(os.environ.get(f"XLA_PYTHON_CLIENT_{name}") for name in _ALLOCATOR):
        yield (
            f"torch's CUDA and JAX have the same GPU ({devices[0][1]}); JAX takes 75 % of its memory when it starts",
            "XLA_PYTHON_CLIENT_PREALLOCATE=false in processes where torch computes on CUDA, too",
        )
    plugins = [name for name in versions if name.startswith("jax-")]
    has_gpu = any(place in ("gpu", "cuda", "rocm") for place, *_ in devices)
    if plugins and not has_gpu and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        yield (
            f"{', '.join(plugins)} without a GPU that JAX can use",
            "JAX_PLATFORMS=cpu keeps it from being loaded; on a machine with a GPU look at the driver (nvidia-smi)",
        )


def _pair(version: str) -> tuple[int, int]:
    parts = version.split(".")
    digits = ["".join(filter(str.isdigit, part)) or "0" for part in (*parts, "0", "0")[:2]]
    return int(digits[0]), int(digits[1])
