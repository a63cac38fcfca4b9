"""Cross-process consistency checks that turn deadlocks into errors.

At start, processes compare their settings through torch's store at ``MASTER_ADDR``.  Later they compare each program
that holds a collective before each run (`agreement`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import linecache
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from xla_amp.common import config, events
from xla_amp.common.config import Process
from xla_amp.errors import EngineError
from xla_amp.lazy.distributed import agreement, shared_numbers
from xla_amp.lazy.distributed.agreement import is_loopback
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.programs import execute, mesh
from xla_amp.lazy.programs.compile import XlaProgram, build
from xla_amp.policy import regions, resolve
from xla_amp.policy.policy import Policy

_met: list[dict[str, str]] = []
"""Settings of each process, by rank."""
_store: list[Any] = []
"""Keeps torch's store alive, which process 0 serves."""
_agreement: list[agreement.Agreement] = []
"""The connections to other processes, once they have met."""
_CERTAINTY = 1.0
"""Seconds to wait until a process with closed connections is reported as ended."""
_ended_at: tuple[str, int] | None = None
"""File and line of the user's that ended the newest program."""
_regions: dict[str, regions.Region] = {}
"""The newest autocast region by device type."""

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
            came = []
            with contextlib.suppress(RuntimeError):  # process 0 has ended, which serves the store
                came = [each for each in range(process.world_size) if store.check([f"{room}/{each}"])]
            raise _absent(process, rank, error, came) from error
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


def ended() -> list[str]:
    """The neighbours that have ended, as text: ``"process 1 (node-3, pid 4711)"``; waits for the end of one."""
    return [name_of(peer.rank) for each in _agreement for peer in each.gone(_CERTAINTY)]


# ---- programs --------------------------------------------------------------------------------------------------------


def connect(process: Process, client: Any) -> None:
    """Connects this process to its neighbours; from then on programs are compared.

    Raises:
        EngineError: a neighbour does not come within the timeout.
    """
    regions.opening.subscribe(_regions.__setitem__)  # names the policies when programs differ
    _agreement[:] = [agreement.connect(process, client, name_of)]
    _agreement[0].watch()
    execute.program_admitted.subscribe(admit)
    execute.running_together.subscribe(together)
    execute.program_ran.subscribe(_note_end)
    mesh.ended.subscribe(ended)


def name_of(rank: int) -> str:
    """A process in the words of errors: ``"process 1 (node-3, pid 4711)"``."""
    return f"process {rank} ({_where(_met[rank])})" if rank < len(_met) else f"process {rank}"


def admit(program: XlaProgram) -> None:
    """Sets the digest of a new program that several processes run together.

    On a CPU it leaves out which inputs the program may overwrite: one process may still hold a value that another has
    dropped.  Elsewhere the executables of all processes must be the same.
    """
    if any(instruction.collective for instruction in program.instructions.values()) or mesh.spans_processes():
        program.digest = hashlib.sha256(_without_donation(program).lower().as_text().encode()).digest()
        if program.context.platform != "cpu":
            program.digest = hashlib.sha256(program.digest + repr(program.donated).encode()).digest()
        program.shared = None if mesh.spans_processes() else shared_numbers.positions(program)


def _without_donation(program: XlaProgram) -> XlaProgram:
    tape = Tape(program.key.code)
    specs, numbers = tape.specs(), [node.first for node in tape if node.is_parameter]
    ints = sum(node.instruction.ints for node in tape)
    _, _, floats, words = program.abstract
    return build(
        dataclasses.replace(program.key, spent=()),
        numbers,
        [spec for number in numbers if (spec := specs[number]) is not None],
        (floats.shape[0], ints),
        (words.shape[0] - ints) // 2,
        program.context.platform,
    )


class together:
    """Waits until all processes are at `program`, which has a digest; inside it is dispatched.

    The Python numbers of the program are compared, too: on a mesh of several processes all, because XLA takes them to
    be equal, and otherwise those that go into weights behind a collective (`shared_numbers`).

    Raises:
        EngineError: another process is at another program, or has other numbers, has ended, or did not come within
            the timeout.
    """

    def __init__(self, program: XlaProgram, arguments: Sequence[Any]) -> None:
        self._program, numbers = program, arguments[2:]
        if program.shared is not None:
            numbers = [each[part] for each, part in zip(numbers, program.shared, strict=True) if part]
        self._numbers = numbers

    def __enter__(self) -> None:
        digest = self._program.digest
        assert digest is not None  # noqa: S101  (`admit`)
        if self._numbers:
            digest = hashlib.sha256(digest + b"".join(each.tobytes() for each in self._numbers)).digest()
        for each in _agreement:
            each.agree(digest, lambda: _describe(self._program, self._numbers), _compare_programs, _line)

    def __exit__(self, kind: object, *_: object) -> None:
        _note_end()
        if kind is not None:
            for each in _agreement:
                each.failed()


def leave(text: str, *, failed: bool) -> str:
    """Tells the others that this process ends, and how; returns why another one failed, empty if all end well."""
    return "".join(each.leave(text, failed=failed) for each in _agreement)


def _place() -> tuple[str, int]:
    frame = events.user_frame()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _note_end() -> None:
    """Keeps the user's line that ended a program."""
    global _ended_at
    _ended_at = _place()


def _line(place: tuple[str, int] | None = None) -> str:
    """A line, by default the user's that is running: ``"train.py:12: print(float(loss))"``."""
    file, line = place or _place()
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f": {source}" if source else "") if file else "in a backward pass"


def _describe(program: XlaProgram, numbers: Sequence[np.ndarray]) -> bytes:
    """The program as text for a process that has another."""
    tape = Tape(program.key.code)
    found = {
        "operations": [str(node) for node in tape],
        "lines": [node.instruction.location for node in tape],
        "results": len(program.outputs),
        "memory": [] if program.context.platform == "cpu" else list(program.donated),
        "numbers": [repr(number) for each in numbers for number in each.tolist()],
        "autocast": _autocast(),
        "begin": "the start" if _ended_at is None else _line(_ended_at),
        "end": _line(),
    }
    return zlib.compress(json.dumps(found).encode())


def _autocast() -> str:
    found = []
    for device, region in sorted(_regions.items()):
        digest = hashlib.sha256(_rules(region.policy).encode()).hexdigest()[:8]
        found.append(f"{device}: policy {region.policy.name!r} in {region.low} (rules {digest})")
    return ", ".join(found) or "none"


def _compare_programs(first: int, one: bytes, second: int, other: bytes) -> str:
    """Text about two programs of two processes, as `_describe` writes them."""
    here, there = (json.loads(zlib.decompress(text)) for text in (one, other))
    return (
        f"{name_of(first)} and {name_of(second)} cannot run their next program together, because the two are "
        f"different: {_difference(first, here, second, there)}. Process {first} recorded its program between "
        f"{here['begin']} and {here['end']}; process {second} between {there['begin']} and {there['end']}. All "
        "processes must record the same operations between two steps: read values, keep tensors and call sync() on all "
        "of them or on none"
    )


def _difference(first: int, here: Mapping[str, Any], second: int, there: Mapping[str, Any]) -> str:
    found = []
    if here["autocast"] != there["autocast"]:
        found.append(f"autocast is {here['autocast']} on process {first}, {there['autocast']} on process {second}")
    pairs = enumerate(zip(here["operations"], there["operations"], strict=False))
    different = [(index, a) for index, (a, b) in pairs if a != b]
    # That an operation differs says more than that an input does.
    operations = (index for index, text in different if not text.startswith("input "))
    index = next(operations, different[0][0] if different else None)
    lengths = len(here["operations"]), len(there["operations"])
    if index is not None:
        found.append(
            f"operation {index} is {_operation(here, index)} on process {first}, {_operation(there, index)} on process "
            f"{second}"
        )
    elif lengths[0] != lengths[1]:
        longer, rank = (here, first) if lengths[0] > lengths[1] else (there, second)
        found.append(f"operation {min(lengths)} is {_operation(longer, min(lengths))}, only on process {rank}")
    elif here["results"] != there["results"]:
        found.append(f"{here['results']} values are kept on process {first}, {there['results']} on process {second}")
    elif here["memory"] != there["memory"]:
        found.append("a value that the program may overwrite on one of them is still held on the other")
    elif here["numbers"] != there["numbers"]:
        one, other = next((a, b) for a, b in zip(here["numbers"], there["numbers"], strict=True) if a != b)
        found.append(
            f"a Python number that they read, or the seed of random numbers, is {one} on process {first}, {other} on "
            f"process {second}; it goes into the weights, which are the same on all processes"
        )
    same = "the operations are the same and something in them differs, such as a constant, or an earlier program failed"
    return "; ".join(found) or same


def _operation(program: Mapping[str, Any], index: int) -> str:
    line = program["lines"][index]
    return f"{program['operations'][index]} (recorded at {line})" if line else str(program["operations"][index])


def wait_for(client: Any, process: Process, key: str, rank: int, what: str, *, binary: bool = False) -> Any:
    """The value that process `rank` stores under `key` at the coordinator.

    Raises:
        EngineError: nothing within the timeout.
    """
    get = client.blocking_key_value_get_bytes if binary else client.blocking_key_value_get
    try:
        return get(key, 1000 * process.timeout)
    except Exception as error:
        reason = "it is late: stopped, busy, or it went another way"
        if "DEADLINE_EXCEEDED" not in str(error):
            gone = " and ".join(ended()) or "it"
            reason = f"{gone} has ended, perhaps because it waited in vain, too"
        raise EngineError(
            f"process {process.rank} waited in vain for process {rank} at {what}: {reason} (XLA_AMP_TIMEOUT is "
            f"{process.timeout} s; {type(error).__name__})"
        ) from error
