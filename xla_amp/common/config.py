"""Environment variables, which no other file of the package reads, and the installed version.

Each function reads at call time, so a test or a notebook can change a variable, and raises `PolicyError` for a value
that the variable does not have, or that contradicts another one.  Only `place_process` writes variables, in a process
that `launch` has started, `place_in_group` in one that torch.distributed was told the place of, and `place_command` in
a process of the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from xla_amp.common.types import PLATFORMS, Cast, Platform
from xla_amp.errors import PolicyError

EngineName: TypeAlias = Literal["auto", "torch_xla", "jax"]
Fallback: TypeAlias = Literal["error", "cpu"]
Debug: TypeAlias = Literal["recompile", "sync"]

POLICY_FILE: Final = "XLA_AMP_POLICY"
RULES: Final = "XLA_AMP_RULES"
FALLBACK: Final = "XLA_AMP_FALLBACK"
ENGINE: Final = "XLA_AMP_ENGINE"
TAPE_LIMIT: Final = "XLA_AMP_TAPE_LIMIT"
EAGER: Final = "XLA_AMP_EAGER"
PLATFORM: Final = "XLA_AMP_PLATFORM"
CACHE: Final = "XLA_AMP_CACHE"
PROGRESS: Final = "XLA_AMP_PROGRESS"
COMPILER_OPTIONS: Final = "XLA_AMP_COMPILER_OPTIONS"
COORDINATOR: Final = "XLA_AMP_COORDINATOR"
TIMEOUT: Final = "XLA_AMP_TIMEOUT"
ALONE: Final = "XLA_AMP_ALONE"
DEBUG: Final = "XLA_AMP_DEBUG"
PROGRAM_MEMORY: Final = "XLA_AMP_PROGRAM_MEMORY"
HUGGINGFACE: Final = "XLA_AMP_HUGGINGFACE"

TAPE_LIMIT_DEFAULT: Final = 100_000
TIMEOUT_DEFAULT: Final = 300
PROGRAM_MEMORY_DEFAULT: Final = 1 << 30
"""Bytes: some 260 programs of a small MLP on XLA:CPU.  A dropped program that is run again is compiled again."""
TIMEOUT_LEAST: Final = 3
"""JAX's coordinator counts whole seconds, and treats two missing heartbeats as the end of a process."""

HPU_LISTS: Final[Mapping[Cast, str]] = MappingProxyType(
    {"low": "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "fp32": "PT_HPU_AUTOCAST_FP32_OPS_LIST"}
)
"""Cast -> Gaudi's variable, whose file replaces the rows of that cast in the policy ``hpu``."""

_ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)
_FALLBACKS: Final[tuple[Fallback, ...]] = get_args(Fallback)
_DEBUG: Final[tuple[Debug, ...]] = get_args(Debug)
_SWITCH: Final = ("0", "1")
_LEGACY_DTYPE_FLAGS: Final = ("XLA_USE_BF16", "XLA_USE_F16")
_PJRT_PLATFORMS: Final[dict[str, Platform]] = {"CPU": "cpu", "CUDA": "gpu", "GPU": "gpu", "ROCM": "gpu", "TPU": "tpu"}

_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30}
"""Letter of a size -> bits to shift."""

_Choice = TypeVar("_Choice", bound=str)


def policy_file() -> Path | None:
    """Path in ``XLA_AMP_POLICY``: a TOML file of rules layered on every policy."""
    value = os.environ.get(POLICY_FILE)
    return Path(value).expanduser() if value else None


def rules() -> str:
    """Text of ``XLA_AMP_RULES``: rules for every policy, ``"softmax=fp32;mm=low"``; empty when unset."""
    return os.environ.get(RULES, "")


_OF_REGIONS: Final = (ENGINE, RULES, "PJRT_DEVICE", POLICY_FILE, *HPU_LISTS.values())


def engine_text() -> str | None:
    """What ``XLA_AMP_ENGINE`` says, to be compared: `engine` reads it."""
    return os.environ.get(ENGINE)


def of_regions() -> tuple[object, ...]:
    """What the engine and the rules of a region depend on; equal answers mean that variables and files are the same."""
    texts: tuple[object, ...] = tuple(map(os.environ.get, _OF_REGIONS))
    if any(texts[3:]):
        for path in filter(None, (policy_file(), *hpu_lists().values())):
            status = path.stat() if path.exists() else None
            texts += (status and (status.st_mtime_ns, status.st_size),)
    return texts


def hpu_lists() -> dict[Cast, Path]:
    """Files that Gaudi's variables name, by cast: an operation a line."""
    return {cast: Path(given).expanduser() for cast, name in HPU_LISTS.items() if (given := os.environ.get(name))}


def fallback() -> Fallback:
    """``XLA_AMP_FALLBACK``: what happens to an operation that has no lowering.

    ``error`` (default) raises; ``cpu`` runs it on the CPU, which waits for the device, warns and is counted.
    """
    return _choice(FALLBACK, _FALLBACKS, "error")


def engine() -> EngineName:
    """``XLA_AMP_ENGINE``: ``auto`` (default), ``torch_xla`` or ``jax``."""
    return _choice(ENGINE, _ENGINES, "auto")


def tape_limit() -> int:
    """``XLA_AMP_TAPE_LIMIT``: recorded operations (default 100,000) after which the lazy engine flushes by itself."""
    return _number(TAPE_LIMIT, TAPE_LIMIT_DEFAULT, 1, "operations")


def eager() -> bool:
    """``XLA_AMP_EAGER``: ``1`` runs each operation of the lazy device at once, to debug; ``0`` (default) records them.

    Read when the device starts.
    """
    return _choice(EAGER, _SWITCH, "0") == "1"


def huggingface() -> bool:
    """``XLA_AMP_HUGGINGFACE``: ``1`` enables `xla_amp.integrations.huggingface` at ``import torch``; default ``0``."""
    return _choice(HUGGINGFACE, _SWITCH, "0") == "1"


def cache() -> Path | Literal["off", "default"]:
    """``XLA_AMP_CACHE``: the folder that stores compiled programs, or ``off``; ``"default"`` when unset."""
    value = os.environ.get(CACHE, "").strip()
    if value.lower() == "off":
        return "off"
    return Path(value).expanduser() if value else "default"


def default_cache() -> Path | None:
    """``XDG_CACHE_HOME/xla_amp``, by default ``~/.cache/xla_amp``; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG Base Directory Specification: a relative path is invalid and to be ignored.
        root = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "xla_amp"


def xla_environment() -> dict[str, str]:
    """The variables that XLA and its libraries read, as they shape programs."""
    names = ("LIBTPU_INIT_ARGS", "NPROC", "PJRT_NPROC", "NVIDIA_TF32_OVERRIDE")
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(("XLA_FLAGS", "TF_"))}


def shows_progress() -> bool:
    """``XLA_AMP_PROGRESS``: whether long calls and compilations say what they do: ``on`` (default) or ``off``."""
    return _choice(PROGRESS, ("on", "off"), "on") == "on"


def debug() -> frozenset[Debug]:
    """``XLA_AMP_DEBUG``: what is logged, as words with commas; see `xla_amp.lazy.programs.recompile_reasons`.

    ``recompile``: each program compiled after a line's first, and each new capture, with the reason.  ``sync``: each
    time that Python waits for the device, with the line.
    """
    value = os.environ.get(DEBUG)
    if not value:
        return frozenset()
    words = [word.strip().lower() for word in value.split(",") if word.strip()]
    wrong = next((word for word in words if word not in _DEBUG), None)
    if wrong is not None:
        raise PolicyError(f"{DEBUG}={value!r}: {wrong!r} is unknown; expected words of {', '.join(_DEBUG)}")
    return frozenset(cast(list[Debug], words))


def program_memory() -> int:
    """``XLA_AMP_PROGRAM_MEMORY``: bytes that compiled programs may take together; the newest may exceed it.

    A whole number of bytes, or one with K, M or G (powers of 1024), as ``"2G"``.  Unset: 1 GiB.
    """
    value = os.environ.get(PROGRAM_MEMORY, "").strip()
    if not value:
        return PROGRAM_MEMORY_DEFAULT
    text = value.upper().removesuffix("B").removesuffix("I")
    number = text.rstrip("KMG")
    unit = text[len(number) :]
    if not (number.isascii() and number.isdigit() and int(number) and unit in _UNITS):
        raise PolicyError(f"{PROGRAM_MEMORY}={value!r}: expected a size in bytes that is not zero, as 512M or 2G")
    return int(number) << _UNITS[unit]


def compiler_options() -> dict[str, str]:
    """``XLA_AMP_COMPILER_OPTIONS``: XLA's options for the lazy device's programs, by name.

    Written as in ``XLA_FLAGS`` or as names alone, ``"xla_gpu_autotune_level=0 xla_cpu_enable_fast_math=true"``; they
    replace the package's own (`xla_amp.lazy.programs.pjrt`), and an empty value restores XLA's default.
    """
    found = {}
    for word in os.environ.get(COMPILER_OPTIONS, "").split():
        name, equals, value = word.removeprefix("--").partition("=")
        if not (name and equals):
            raise PolicyError(f"{COMPILER_OPTIONS}={word!r}: expected name=value, as xla_allow_excess_precision=true")
        # XLA reads booleans as Python writes them.
        found[name] = value.capitalize() if value.lower() in ("true", "false") else value
    return found


def xla_flags() -> frozenset[str]:
    """Names of the options that the user sets for the whole process in ``XLA_FLAGS``."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return frozenset(word.removeprefix("--").partition("=")[0] for word in words)


def platform() -> Platform | None:
    """XLA platform from ``XLA_AMP_PLATFORM``, or else from ``PJRT_DEVICE``; None when neither names one.

    ``PJRT_DEVICE`` is torch_xla's variable; values that name no XLA platform are ignored.
    """
    if os.environ.get(PLATFORM, "").strip():
        return _choice(PLATFORM, PLATFORMS, "cpu")
    return _PJRT_PLATFORMS.get(os.environ.get("PJRT_DEVICE", "").strip().upper())


TASKS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("Slurm", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
"""Launcher -> its variables: number of tasks, of this task, and of this task on its host."""


def alone() -> bool:
    """``XLA_AMP_ALONE``: ``1`` makes a task of a job of several (Slurm, MPI, a TPU pod, torchrun) train alone.

    ``0`` (default) joins the others.
    """
    return _choice(ALONE, _SWITCH, "0") == "1"


def task() -> tuple[str, int, int] | None:
    """(launcher, number, count) by ``SLURM_NTASKS``, ``OMPI_COMM_WORLD_SIZE`` or ``PMI_SIZE``, if more than one."""
    for name, size, rank, _ in TASKS:
        count, number = os.environ.get(size, ""), os.environ.get(rank, "")
        if count.isdigit() and number.isdigit() and int(count) > 1:
            return name, int(number), int(count)
    return None


def coordinator_port() -> str | None:
    """``JAX_COORDINATOR_PORT``: the coordinator's port in a job whose cluster JAX detects; None lets JAX choose."""
    return os.environ.get("JAX_COORDINATOR_PORT", "").strip() or None


def timeout() -> int:
    """``XLA_AMP_TIMEOUT``: seconds that processes wait for each other (default 300)."""
    return _number(TIMEOUT, TIMEOUT_DEFAULT, TIMEOUT_LEAST, "seconds")


class Store(NamedTuple):
    """Address of torch's store (`torch.distributed.TCPStore`), through which processes meet first."""

    host: str
    port: int
    served: bool
    """Whether torchrun serves it; otherwise process 0 does."""
    prefix: str
    """Prefix of the keys: torchrun's store outlives the processes, which torchrun may restart."""


class Process(NamedTuple):
    """Rank of this process and how to reach the others."""

    rank: int
    world_size: int
    local_rank: int
    coordinator: str
    """Address of the coordinator, which runs in process 0."""
    timeout: int
    """Seconds that processes wait for each other, and after which the end of one process ends the others."""
    store: Store | None
    """The store at ``MASTER_ADDR`` and ``MASTER_PORT``."""

    @property
    def host(self) -> str:
        """The coordinator's, without its port and the brackets of an IPv6 address."""
        return self.coordinator.rpartition(":")[0].strip("[]")


def process() -> Process | None:
    """Settings in ``WORLD_SIZE``, ``RANK``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

    None for a single process.  The coordinator listens on the port after ``MASTER_PORT``, which torchrun's store uses;
    ``XLA_AMP_COORDINATOR`` (host:port) sets another address.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")
    values = {name: os.environ.get(name, "").strip() for name in names}
    wrong = next((name for name, value in values.items() if value and not value.isdigit()), None)
    if wrong is not None:
        raise PolicyError(f"{wrong}={values[wrong]!r}: expected a whole number")
    numbers = {name: int(value) for name, value in values.items() if value}
    world_size = numbers.get("WORLD_SIZE", 1)
    if world_size <= 1 or alone():
        return None
    rank = numbers.get("RANK", -1)
    if not 0 <= rank < world_size:
        raise PolicyError(f"RANK={values['RANK']!r}: expected a number from 0 to {world_size - 1}, below WORLD_SIZE")
    coordinator, address = os.environ.get(COORDINATOR, ""), os.environ.get("MASTER_ADDR", "")
    store = None
    if address and "MASTER_PORT" in numbers:
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = Store(address, numbers["MASTER_PORT"], served, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not coordinator:
        if store is None:
            raise PolicyError(
                f"WORLD_SIZE={world_size}: MASTER_ADDR and MASTER_PORT must say where process 0 is; start the program "
                "with torchrun or xla_amp.launch"
            )
        coordinator = f"{address}:{numbers['MASTER_PORT'] + 1}"
    return Process(rank, world_size, numbers.get("LOCAL_RANK", rank), coordinator, timeout(), store)


def local_rank() -> int | None:
    """Number of this process on its host, as ``LOCAL_RANK`` or its launcher says."""
    values = (os.environ.get(name, "") for name in ("LOCAL_RANK", *(row[3] for row in TASKS)))
    return next((int(value) for value in values if value.isdigit()), None)


def is_placed() -> bool:
    """Whether ``WORLD_SIZE`` says how many processes there are, be it one."""
    return bool(os.environ.get("WORLD_SIZE", "").strip())


def place_process(*, rank: int, world_size: int, port: int, timeout: int | None = None) -> None:
    """Sets the variables of `process` in a process that `launch` has started."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if timeout is not None:
        os.environ[TIMEOUT] = str(timeout)


def place_in_group(rank: int, world_size: int) -> None:
    """Sets the variables of `process` to what a script told `torch.distributed.init_process_group`, if none is set."""
    if world_size > 1 and not is_placed() and task() is None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}


def place_command() -> None:
    """Keeps JAX to the CPU in a process of ``xla-amp`` that runs programs; a variable that is set stays."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def legacy_dtype_flags() -> tuple[str, ...]:
    """Names of torch_xla's process-wide dtype switches that are on; they override casts per operation."""
    off = ("", "0", "false")
    return tuple(name for name in _LEGACY_DTYPE_FLAGS if os.environ.get(name, "").strip().lower() not in off)


def _choice(variable: str, legal: Sequence[_Choice], default: _Choice) -> _Choice:
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return default
    if value not in legal:
        raise PolicyError(f"{variable}={os.environ[variable]!r}: expected one of {', '.join(legal)}")
    return cast(_Choice, value)


def _number(variable: str, default: int, least: int, of: str) -> int:
    value = os.environ.get(variable, "").strip()
    if not value:
        return default
    if not (value.isascii() and value.isdigit() and int(value) >= least):
        raise PolicyError(f"{variable}={value!r}: expected a whole number of {of}, at least {least}")
    return int(value)


def version() -> str:
    """The version of xla_amp: that of the code, since what pip says of an editable install may be older."""
    found: str = sys.modules[__name__.partition(".")[0]].__version__
    return found
