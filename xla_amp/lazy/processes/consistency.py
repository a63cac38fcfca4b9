"""Start and end of several processes: they meet and compare their settings, and tell each other that they end.

They meet through torch's store at ``MASTER_ADDR``; from then on the key-value store of JAX's coordinator connects them.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import torch

from xla_amp.common import config
from xla_amp.common.config import Process
from xla_amp.errors import EngineError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.processes import cluster
from xla_amp.policy import resolve
from xla_amp.policy.policy import Policy

_met: list[dict[str, str]] = []
"""Settings of each process, by rank."""
_store: list[Any] = []
"""Keeps torch's store alive, which process 0 serves."""

# ---- at start --------------------------------------------------------------------------------------------------------


def settings(process: Process) -> dict[str, str]:
    """Settings that must be equal in all processes; names with an underscore tell where this one runs."""
    return {
        "WORLD_SIZE": str(process.world_size),
        "XLA_AMP_PLATFORM": str(config.platform()),
        "autocast rules": _rules(resolve("tpu"), without_builtin=True),
        "version of xla_amp": config.version(),
        "version of torch": torch.__version__,
        "version of jax": jax.__version__,
        "_host": socket.gethostname(),
        "_pid": str(os.getpid()),
    }


def _rules(policy: Policy, *, without_builtin: bool = False) -> str:
    """A policy's rules as text, layer by layer; `without_builtin` leaves out the built-in table."""
    layers = [layer for layer in policy.layers if not (without_builtin and layer.layer == "builtin")]
    rules = (f"{'+'.join(rule.operations)}={rule.cast}" for layer in layers for rule in layer.rules)
    return "; ".join(rules) or "no added rules"


def meet(process: Process) -> None:
    """Waits for all processes at torch's store and compares their settings.

    JAX's coordinator would end a process whose peer does not come.

    Raises:
        EngineError: a process did not come within the timeout, or has other settings.
    """
    if process.store is None or not torch.distributed.is_available():
        return
    room = f"xla_amp/{process.store.prefix}"
    serves = process.rank == 0 and not process.store.served
    local = serves and cluster.is_loopback(process.store.host)
    try:
        # As torch's "env://" does, so that a process group made later shares this store.
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            process.store.host,
            process.store.port,
            is_master=serves,
            timeout=datetime.timedelta(seconds=process.timeout),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_loopback_socket(process.store) if local else None,
        )
        store.set(f"{room}/{process.rank}", json.dumps(settings(process)))
    except RuntimeError as error:
        raise _absent(process, 0, error) from error
    _store.append(store)

    def read(rank: int) -> str | bytes:
        try:
            text: bytes = store.get(f"{room}/{rank}")
        except RuntimeError as error:
            came = []
            with contextlib.suppress(RuntimeError):  # process 0 has ended, which serves the store
                came = [each for each in range(process.world_size) if store.check([f"{room}/{each}"])]
            raise _absent(process, rank, error, came) from error
        return text

    compare_settings(process, map(read, range(process.world_size)))


def compare_settings(process: Process, texts: Iterable[str | bytes]) -> None:
    """Compares the `settings` of all processes, as JSON by rank.

    Raises:
        EngineError: a process has other settings.
    """
    found, mine = [], settings(process)
    for rank, text in enumerate(texts):
        theirs = json.loads(text)
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


def _loopback_socket(store: config.Store) -> int | None:
    """Descriptor of a socket that listens on loopback only; without one torch's store listens on all interfaces.

    None if the port is taken: by torch's store, which `torch.distributed.init_process_group` has started before the
    device and which is shared; a store of another program is torch's error.
    """
    family = socket.AF_INET6 if ":" in store.host else socket.AF_INET
    try:
        with socket.create_server((store.host, store.port), family=family, backlog=128) as server:
            return server.detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def rank_on_host(rank: int) -> int | None:
    """How many processes of smaller rank are on the host of process `rank`; None before they have met."""
    if rank >= len(_met):
        return None
    return sum(facts["_host"] == _met[rank]["_host"] for facts in _met[:rank])


def _absent(process: Process, rank: int, error: Exception, came: Sequence[int] = ()) -> EngineError:
    those = f"{len(came)} of {process.world_size} processes came: {', '.join(map(str, came))}. " if came else ""
    return EngineError(
        f"process {process.rank} of {process.world_size} ({socket.gethostname()}, pid {os.getpid()}) waited in vain "
        f"for process {rank}, which did not start within {process.timeout} s or ended at once "
        f"({type(error).__name__}). {those}"
        f"WORLD_SIZE={process.world_size} processes must be started, and reach each other; XLA_AMP_TIMEOUT sets "
        "the seconds"
    )


def _where(facts: Mapping[str, str]) -> str:
    return f"{facts['_host']}, pid {facts['_pid']}"


# ---- ends ------------------------------------------------------------------------------------------------------------


def name_of(rank: int) -> str:
    """A process in the words of errors: ``"process 1 (node-3, pid 4711)"``."""
    return f"process {rank} ({_where(_met[rank])})" if rank < len(_met) else f"process {rank}"


def ended() -> list[str]:
    """What processes have told that ended (`leave`): ``"process 1 (node-3, pid 4711) has ended"``."""
    try:
        return [text for _, text in private_api.coordinator().key_value_dir_get("xla_amp/ended/")]
    except Exception:  # the coordinator has ended, too
        return []


def leave(process: Process, reason: str) -> None:
    """Tells the others that this process ends."""
    with contextlib.suppress(Exception):  # the coordinator has ended
        private_api.coordinator().key_value_set(f"xla_amp/ended/{process.rank}", f"{name_of(process.rank)} {reason}")


def wait_for(client: Any, process: Process, key: str, rank: int, what: str) -> bytes:
    """The value that process `rank` stores under `key` at the coordinator.

    Raises:
        EngineError: nothing within the timeout.
    """
    try:
        value: bytes = client.blocking_key_value_get_bytes(key, 1000 * process.timeout)
        return value
    except Exception as error:
        late = "DEADLINE_EXCEEDED" in str(error)
        reason = "it is late: stopped, busy, or it went another way" if late else "it has ended"
        reason = " and ".join(ended()) or reason
        raise EngineError(
            f"process {process.rank} waited in vain for process {rank} at {what}: {reason} (XLA_AMP_TIMEOUT is "
            f"{process.timeout} s; {type(error).__name__})"
        ) from error
