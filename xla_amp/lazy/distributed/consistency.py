"""What processes that train together must have in common, compared before it can make them wait for each other forever.

At start each tells the others, through torch's store at ``MASTER_ADDR``, what it was started with.  Later each
program that holds a collective is compared before it first runs, through JAX's coordinator.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import torch

from xla_amp import config
from xla_amp.config import Process
from xla_amp.errors import EngineError
from xla_amp.lazy import private_api
from xla_amp.lazy.runtime.compile import Program, steps
from xla_amp.policy import regions, resolve
from xla_amp.policy.policy import Policy

_met: list[dict[str, str]] = []
"""What each process was started with, by rank."""
_store: list[Any] = []
"""torch's store, which process 0 serves as long as it lives."""
_programs = itertools.count(1)
_regions: dict[str, regions.Region] = {}
"""The newest autocast region by device type."""

# ---- at start --------------------------------------------------------------------------------------------------------


def started_with(place: Process) -> dict[str, str]:
    """Name -> value of what all processes must agree on, and after the names with an underscore where this one is."""
    return {
        "WORLD_SIZE": str(place.world_size),
        "XLA_AMP_PLATFORM": str(config.platform()),
        "autocast rules": _rules(resolve("tpu"), beside_the_table=True),
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
    except PackageNotFoundError:  # a source tree that nobody has installed
        return "unknown"


def _pid_space() -> str:
    """Which processes can see each other's numbers: a host may run several containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _rules(policy: Policy, *, beside_the_table: bool = False) -> str:
    """The rules of a policy as text, each layer's in order; without those of its built-in table if asked."""
    layers = [layer for layer in policy.layers if not (beside_the_table and layer.layer == "builtin")]
    rules = (f"{'+'.join(rule.operations)}={rule.cast}" for layer in layers for rule in layer.rules)
    return "; ".join(rules) or "none of its own"


def meet(place: Process) -> None:
    """Waits for all processes and compares what they were started with.

    Where only ``XLA_AMP_COORDINATOR`` is known there is no store to do so through, and JAX's coordinator ends a
    process that waits for another in vain.

    Raises:
        EngineError: one did not come within the timeout, or was started with something else; names both.
    """
    if place.store is None or not torch.distributed.is_available():
        return
    mine = started_with(place)
    room = f"xla_amp/{place.store.prefix}"
    try:
        # As torch's own "env://" does it, so that a process group made later shares this store.
        store = torch.distributed.TCPStore(
            place.store.host,
            place.store.port,
            is_master=place.rank == 0 and not place.store.served,
            timeout=datetime.timedelta(seconds=place.timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        store.set(f"{room}/{place.rank}", json.dumps(mine))
    except RuntimeError as error:
        raise _absent(place, 0, error) from error
    _store.append(store)
    found = []
    for rank in range(place.world_size):
        try:
            theirs = json.loads(store.get(f"{room}/{rank}"))
        except RuntimeError as error:
            raise _absent(place, rank, error) from error
        problems = [
            f"{name} is {theirs.get(name)!r} there and {value!r} here"
            for name, value in mine.items()
            if not name.startswith("_") and theirs.get(name) != value
        ]
        if problems:
            raise EngineError(
                f"process {place.rank} ({_where(mine)}) cannot train with process {rank} ({_where(theirs)}): "
                f"{'; '.join(problems)}. Start all processes with the same settings"
            )
        found.append(theirs)
    _met[:] = found


def _absent(place: Process, rank: int, error: Exception) -> EngineError:
    return EngineError(
        f"process {place.rank} of {place.world_size} ({socket.gethostname()}, pid {os.getpid()}) waited in vain for "
        f"process {rank}, which did not start within {place.timeout} s or ended at once ({type(error).__name__}). "
        f"WORLD_SIZE={place.world_size} of them must be started, and reach each other; XLA_AMP_TIMEOUT sets the seconds"
    )


def _where(facts: Mapping[str, str]) -> str:
    return f"{facts['_host']}, pid {facts['_pid']}"


def ended() -> list[str]:
    """The processes of this host that are no more, as text: ``"process 1 (node-3, pid 4711)"``."""
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
    return state not in "ZX"  # ended, though nobody has asked how


# ---- programs --------------------------------------------------------------------------------------------------------


def watch_regions() -> None:
    """Remembers which policy the autocast regions use, so that a difference of programs can be explained by it."""
    regions.on_push(_regions.__setitem__)


def compare(program: Program, code: Sequence[int], arguments: Sequence[Any]) -> None:
    """Compares a new program that holds a collective with the others' programs of the same number.

    Raises:
        EngineError: another process has another program, or none within the timeout.
    """
    place, client = config.process(), private_api.coordinator()
    if place is None or client is None or not any(instruction.collective for instruction, _, _ in steps(code)):
        return
    listing = [
        f"{instruction.name}({', '.join(map(str, inputs))}) -> {', '.join(map(str, instruction.outs))}"
        for instruction, _, inputs in steps(code)
    ]
    number = next(_programs)
    digest = hashlib.sha256(program.call.lower(*arguments).as_text().encode()).hexdigest()
    room = f"xla_amp/program/{number}"
    mine = {"operations": listing, "results": len(program.outputs), "autocast": _autocast()}
    client.key_value_set_bytes(f"{room}/{place.rank}/text", zlib.compress(json.dumps(mine).encode()))
    client.key_value_set(f"{room}/{place.rank}", digest)
    for rank in range(place.world_size):
        if wait_for(client, place, f"{room}/{rank}", rank, f"program {number} with a collective") != digest:
            text = wait_for(client, place, f"{room}/{rank}/text", rank, "the text of a program", binary=True)
            theirs = json.loads(zlib.decompress(text))
            _let_others_see(client, place, room)
            raise EngineError(
                f"process {place.rank} cannot run program {number} with process {rank}, whose program is another: "
                f"{_difference(mine, theirs)}. All processes must record the same operations between two steps"
            )


def _let_others_see(client: Any, place: Process, room: str) -> None:
    """Before this process ends, and the coordinator with it if it is the first: time for all to find the difference."""
    client.key_value_set(f"{room}/{place.rank}/seen", "")
    try:
        for rank in range(place.world_size):
            client.blocking_key_value_get(f"{room}/{rank}/seen", 1000 * min(5, place.timeout))
    except Exception:  # it saw none, or has ended: this process's own error says more
        return


def _autocast() -> str:
    told = []
    for device, region in sorted(_regions.items()):
        digest = hashlib.sha256(_rules(region.policy).encode()).hexdigest()[:8]
        told.append(f"{device}: policy {region.policy.name!r} in {region.low} (rules {digest})")
    return ", ".join(told) or "none"


def _difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    found = []
    if mine["autocast"] != theirs["autocast"]:
        found.append(f"its autocast is {theirs['autocast']}, here {mine['autocast']}")
    pairs = zip(mine["operations"], theirs["operations"], strict=False)
    first = next((place for place, (here, there) in enumerate(pairs) if here != there), None)
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


def wait_for(client: Any, place: Process, key: str, rank: int, what: str, *, binary: bool = False) -> Any:
    """What process `rank` puts under `key` in the coordinator's store.

    Raises:
        EngineError: nothing within the timeout.
    """
    get = client.blocking_key_value_get_bytes if binary else client.blocking_key_value_get
    try:
        return get(key, 1000 * place.timeout)
    except Exception as error:
        gone = ended()
        reason = f"{' and '.join(gone)} has ended" if gone else "it has ended, or it went another way"
        raise EngineError(
            f"process {place.rank} waited in vain for process {rank} at {what}: {reason} (XLA_AMP_TIMEOUT is "
            f"{place.timeout} s; {type(error).__name__})"
        ) from error
