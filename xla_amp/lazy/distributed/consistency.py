"""Cross-process consistency checks that turn deadlocks into errors.

At start, processes compare their settings through torch's store at ``MASTER_ADDR``.  Later they compare each program
that holds a collective before its first run, through JAX's coordinator.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import torch

from xla_amp import config
from xla_amp.config import Process
from xla_amp.errors import EngineError
from xla_amp.lazy import private_api
from xla_amp.lazy.distributed import cluster
from xla_amp.lazy.runtime import mesh
from xla_amp.lazy.runtime.compile import Program, steps
from xla_amp.policy import regions, resolve
from xla_amp.policy.policy import Policy

_met: list[dict[str, str]] = []
"""Settings of each process, by rank."""
_store: list[Any] = []
"""Keeps torch's store alive, which process 0 serves."""
_programs = itertools.count(1)
_compared: set[str] = set()
"""Digests of the programs that all processes had."""
_regions: dict[str, regions.Region] = {}
"""The newest autocast region by device type."""

# ---- at start --------------------------------------------------------------------------------------------------------


def settings(process: Process) -> dict[str, str]:
    """Settings that must be equal in all processes; names with an underscore tell where this one runs."""
    return {
        "WORLD_SIZE": str(process.world_size),
        "XLA_AMP_PLATFORM": str(config.platform()),
        "autocast rules": _rules(resolve("tpu"), without_builtin=True),
        "version of xla_amp": _version(),
        "version of torch": torch.__version__,
        "version of jax": jax.__version__,
        "_host": socket.gethostname(),
        "_pid": str(os.getpid()),
        "_space": _pid_space(),
    }


def _version() -> str:
    try:
        return version("xla_amp")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


def _pid_space() -> str:
    """The PID namespace: a host may run several containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _rules(policy: Policy, *, without_builtin: bool = False) -> str:
    """A policy's rules as text, layer by layer; `without_builtin` leaves out the built-in table."""
    layers = [layer for layer in policy.layers if not (without_builtin and layer.layer == "builtin")]
    rules = (f"{'+'.join(rule.operations)}={rule.cast}" for layer in layers for rule in layer.rules)
    return "; ".join(rules) or "no added rules"


def meet(process: Process) -> None:
    """Waits for all processes and compares their settings.

    Without a store this is left to `meet_at_coordinator`; JAX's coordinator ends a process whose peer does not come.

    Raises:
        EngineError: a process did not come within the timeout, or has other settings.
    """
    if process.store is None or not torch.distributed.is_available():
        return
    mine = settings(process)
    room = f"xla_amp/{process.store.prefix}"
    serves = process.rank == 0 and not process.store.served
    try:
        # As torch's "env://" does, so that a process group made later shares this store.
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            process.store.host,
            process.store.port,
            is_master=serves,
            timeout=datetime.timedelta(seconds=process.timeout),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_loopback_socket(process.store) if serves and is_loopback(process.store.host) else None,
        )
        store.set(f"{room}/{process.rank}", json.dumps(mine))
    except RuntimeError as error:
        raise _absent(process, 0, error) from error
    _store.append(store)

    def read(rank: int) -> str | bytes:
        try:
            text: bytes = store.get(f"{room}/{rank}")
        except RuntimeError as error:
            raise _absent(process, rank, error) from error
        return text

    _compare_settings(process, mine, read)


def meet_at_coordinator(process: Process, client: Any) -> None:
    """`meet` where there is no store, after the processes have connected to JAX's coordinator.

    Raises:
        EngineError: as `meet`.
    """
    if process.store is not None:
        return
    mine = settings(process)
    client.key_value_set(f"xla_amp/settings/{process.rank}", json.dumps(mine))

    def read(rank: int) -> str | bytes:
        text: str = wait_for(client, process, f"xla_amp/settings/{rank}", rank, "the start of the device")
        return text

    _compare_settings(process, mine, read)


def _compare_settings(process: Process, mine: dict[str, str], read: Callable[[int], str | bytes]) -> None:
    found = []
    for rank in range(process.world_size):
        theirs = json.loads(read(rank))
        problems = [
            f"{name} is {theirs.get(name)!r} there and {value!r} here"
            for name, value in mine.items()
            if not name.startswith("_") and theirs.get(name) != value
        ]
        if problems:
            raise EngineError(
                f"process {process.rank} ({_where(mine)}) cannot train with process {rank} ({_where(theirs)}): "
                f"{'; '.join(problems)}. Start all processes with the same settings"
            )
        found.append(theirs)
    _met[:] = found


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which no other machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _loopback_socket(store: config.Store) -> int:
    """Descriptor of a socket that listens on loopback only; without one torch's store listens on all interfaces."""
    family = socket.AF_INET6 if ":" in store.host else socket.AF_INET
    with socket.create_server((store.host, store.port), family=family, backlog=128) as server:
        return server.detach()


def rank_on_host(rank: int) -> int | None:
    """How many processes of smaller rank are on the host of process `rank`; None before they have met."""
    if rank >= len(_met):
        return None
    return sum(facts["_host"] == _met[rank]["_host"] for facts in _met[:rank])


def _absent(process: Process, rank: int, error: Exception) -> EngineError:
    return EngineError(
        f"process {process.rank} of {process.world_size} ({socket.gethostname()}, pid {os.getpid()}) waited in vain "
        f"for process {rank}, which did not start within {process.timeout} s or ended at once "
        f"({type(error).__name__}). "
        f"WORLD_SIZE={process.world_size} processes must be started, and reach each other; XLA_AMP_TIMEOUT sets "
        "the seconds"
    )


def _where(facts: Mapping[str, str]) -> str:
    return f"{facts['_host']}, pid {facts['_pid']}"


def ended() -> list[str]:
    """The processes of this host that have ended, as text: ``"process 1 (node-3, pid 4711)"``."""
    here = _pid_space()
    return [
        f"process {rank} ({_where(facts)})"
        for rank, facts in enumerate(_met)
        if facts["_host"] == socket.gethostname() and facts["_space"] == here and not _is_running(int(facts["_pid"]))
    ]


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie: ended, and not waited for


# ---- programs --------------------------------------------------------------------------------------------------------


def watch_regions() -> None:
    """Records the policies of autocast regions, to name them when programs differ."""
    regions.on_push(_regions.__setitem__)


def compare(program: Program, code: Sequence[int], arguments: Sequence[Any]) -> None:
    """Compares a new program that holds a collective, or may get some, with the other processes' of the same number.

    Raises:
        EngineError: another process has another program, or none within the timeout.
    """
    process, client = cluster.place(), private_api.coordinator()
    if process is None or client is None:
        return
    if not mesh.spans_processes() and not any(instruction.collective for instruction, _, _ in steps(code)):
        return
    listing = [
        f"{instruction.name}({', '.join(map(str, inputs))}) -> {', '.join(map(str, instruction.outs))}"
        for instruction, _, inputs in steps(code)
    ]
    digest = hashlib.sha256(program.call.lower(*arguments).as_text().encode()).hexdigest()
    if digest in _compared:  # compiled before and dropped since (`program_cache`), perhaps only in this process
        return
    number = next(_programs)
    room = f"xla_amp/program/{number}"
    mine = {"operations": listing, "results": len(program.outputs), "autocast": _autocast()}
    client.key_value_set_bytes(f"{room}/{process.rank}/text", zlib.compress(json.dumps(mine).encode()))
    client.key_value_set(f"{room}/{process.rank}", digest)
    for rank in range(process.world_size):
        if wait_for(client, process, f"{room}/{rank}", rank, f"program {number} with a collective") != digest:
            text = wait_for(client, process, f"{room}/{rank}/text", rank, "the text of a program", binary=True)
            theirs = json.loads(zlib.decompress(text))
            _wait_until_seen(client, process, room)
            raise EngineError(
                f"process {process.rank} cannot run program {number} with process {rank}, whose program is another: "
                f"{_difference(mine, theirs)}. All processes must record the same operations between two steps"
            )
    _compared.add(digest)


def _wait_until_seen(client: Any, process: Process, room: str) -> None:
    """Gives all processes time to find the difference before this one ends, perhaps with the coordinator."""
    client.key_value_set(f"{room}/{process.rank}/seen", "")
    try:
        for rank in range(process.world_size):
            client.blocking_key_value_get(f"{room}/{rank}/seen", 1000 * min(5, process.timeout))
    except Exception:  # a peer found no difference or has ended; the caller's error is more useful
        return


def _autocast() -> str:
    found = []
    for device, region in sorted(_regions.items()):
        digest = hashlib.sha256(_rules(region.policy).encode()).hexdigest()[:8]
        found.append(f"{device}: policy {region.policy.name!r} in {region.low} (rules {digest})")
    return ", ".join(found) or "none"


def _difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    found = []
    if mine["autocast"] != theirs["autocast"]:
        found.append(f"its autocast is {theirs['autocast']}, here {mine['autocast']}")
    pairs = zip(mine["operations"], theirs["operations"], strict=False)
    first = next((index for index, (here, there) in enumerate(pairs) if here != there), None)
    lengths = len(mine["operations"]), len(theirs["operations"])
    if first is not None:
        there, here = theirs["operations"][first], mine["operations"][first]
        found.append(f"operation {first} is {there} there and {here} here")
    elif lengths[0] != lengths[1]:
        longer, where = (mine, "only here") if lengths[0] > lengths[1] else (theirs, "only there")
        found.append(f"operation {min(lengths)} is {longer['operations'][min(lengths)]} {where}")
    elif mine["results"] != theirs["results"]:
        found.append(f"it keeps {theirs['results']} values, here {mine['results']} are kept")
    return "; ".join(found) or "the operations are the same and something in them differs, such as a constant"


def wait_for(client: Any, process: Process, key: str, rank: int, what: str, *, binary: bool = False) -> Any:
    """The value that process `rank` stores under `key` at the coordinator.

    Raises:
        EngineError: nothing within the timeout.
    """
    get = client.blocking_key_value_get_bytes if binary else client.blocking_key_value_get
    try:
        return get(key, 1000 * process.timeout)
    except Exception as error:
        gone = ended()
        reason = f"{' and '.join(gone)} has ended" if gone else "it has ended, or it went another way"
        raise EngineError(
            f"process {process.rank} waited in vain for process {rank} at {what}: {reason} (XLA_AMP_TIMEOUT is "
            f"{process.timeout} s; {type(error).__name__})"
        ) from error
