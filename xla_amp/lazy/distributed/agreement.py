"""Agreement before each program with collectives: all processes are at the same one, or all of them get an error.

A collective of XLA waits until all processes run it: one that runs another program instead makes the others hang, or
abort.  So a program with collectives is dispatched when all processes have come to it.  Processes form a tree of TCP
connections: each hears from those below it, tells the one above it, and gets leave to go on from there.  The end of a
process closes its connections, which the others notice at once; a thread looks after those that are busy elsewhere.
Connections are made through JAX's coordinator, whose key-value store takes ten times as long for an exchange.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from xla_amp.common.config import Process
from xla_amp.errors import EngineError

FANOUT = 16
"""Processes that one process hears from: 512 processes are three levels."""
_NOTICE = 4.0
"""Seconds in which a process must come to a program with collectives after the end of another; then it is ended."""
_PARTING = 5.0
"""Seconds that a process that fails waits for the others' end, as it may take the coordinator along."""
_FOREVER = 1e7
"""Seconds."""
_KEEPALIVE = 15
"""Seconds between questions whether the other machine is there; three without an answer are its end."""
_PATIENCE = 2.0
"""Seconds that a process waits longer than the one above it."""
_HEADER = struct.Struct("!BQ32sI")
_SECRET = 16
"""Bytes by which a process shows that it belongs to the job."""
_FAILED = bytes([1]) * 32
"""In place of a digest: the process that sends this has failed."""
_LONGEST = 1 << 26
"""Most bytes of a message's text."""


class MessageKind(enum.IntEnum):
    """What a message says."""

    SAME = 0
    """Upwards: this process and all below it are at this program.  Downwards: all are."""
    TELL = 1
    """Downwards: your program is another, what is it?  Upwards: the answer."""
    STOP = 2
    """This program cannot run; the next one may."""
    LEFT = 3
    """A process has ended, or is not waited for any longer: no program can run."""


class Message(NamedTuple):
    """One message; `number` counts programs with collectives, from 1."""

    kind: MessageKind
    number: int
    digest: bytes = bytes(32)
    text: bytes = b""


@dataclasses.dataclass(eq=False)
class Peer:
    """A process that this one is connected to."""

    rank: int
    wire: socket.socket

    def send(self, message: Message) -> None:
        """Sends a message; that the peer has ended is seen by `receive`."""
        kind, number, digest, text = message
        with contextlib.suppress(OSError):
            self.wire.sendall(_HEADER.pack(kind, number, digest, len(text)) + text)

    def receive(self, until: float) -> Message | None:
        """The next message; None if the peer has ended.

        Raises:
            TimeoutError: only a part of it has come.
        """
        try:
            kind, number, digest, size = _HEADER.unpack(_read(self.wire, _HEADER.size, until))
            text = _read(self.wire, size, until) if size <= _LONGEST else b""
            return Message(MessageKind(kind), number, digest, text)
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None


def _read(wire: socket.socket, size: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        wire.settimeout(max(0.001, until - time.monotonic()))
        part = wire.recv(size - len(parts))
        if not part:
            raise ConnectionResetError
        parts += part
    wire.settimeout(None)
    return bytes(parts)


class _Stop(Exception):
    """Ends an agreement: `message` goes to all peers but `source`."""

    def __init__(self, message: Message, source: Peer | None = None) -> None:
        self.message, self.source = message, source


class Agreement:
    """The connections of one process.

    Args:
        rank: of this process.
        parent: the process above it; None for process 0.
        children: the processes below it.
        timeout: seconds to wait for others.
        patience: seconds to wait longer for the parent, which knows better who is late.
        name: a process as text, of its rank.
    """

    def __init__(
        self,
        rank: int,
        parent: Peer | None,
        children: Sequence[Peer],
        timeout: float,
        patience: float,
        name: Callable[[int], str],
    ) -> None:
        self._rank, self._parent, self._children = rank, parent, children
        self._peers = [*children, *([] if parent is None else [parent])]
        self._timeout, self._patience, self._name = timeout, patience, name
        self._number = 0
        self._history = b""
        """Changes with each program that was agreed on and then failed in this process."""
        self._over = ""
        """Why no program can run any more, or that this process ends."""
        self._poll = select.poll()
        self._of = {peer.wire.fileno(): peer for peer in self._peers}
        for descriptor in self._of:
            self._poll.register(descriptor, select.POLLIN)
        os.register_at_fork(after_in_child=self._close)  # a loader's worker must not outlive the connection's end

    def _close(self) -> None:
        for peer in self._peers:
            peer.wire.close()

    def agree(
        self,
        digest: bytes,
        describe: Callable[[], bytes],
        difference: Callable[[int, bytes, int, bytes], str],
        where: Callable[[], str],
    ) -> None:
        """Returns when all processes are at the program of this digest.

        Args:
            digest: 32 bytes.
            describe: returns the program as bytes, for a process that has another.
            difference: returns text about two programs: of the rank and the description of one, and of the other.
            where: returns the user's line, for errors.

        Raises:
            EngineError: another process is at another program (then the next program may run), has ended, or did not
                come within the timeout (then none may).
        """
        if self._over:
            raise EngineError(self._over)
        self._number += 1
        if self._history:
            digest = hashlib.sha256(digest + self._history).digest()
        same = Message(MessageKind.SAME, self._number, digest)
        until = time.monotonic() + self._timeout
        try:
            waiting = set(self._children)
            while waiting:
                peer, message = self._next(waiting, until)
                if message.digest != digest:
                    text = difference(self._rank, describe(), peer.rank, self._told(peer, until))
                    raise _Stop(Message(MessageKind.STOP, self._number, text=text.encode()))
                waiting.discard(peer)
            if self._parent is not None:
                self._parent.send(same)
                until += self._patience
                while self._next({self._parent}, until)[1].kind is MessageKind.TELL:
                    self._parent.send(Message(MessageKind.TELL, self._number, text=describe()))
        except _Stop as stop:
            self._stop(stop, where)
        self._tell(self._children, same)

    def _told(self, peer: Peer, until: float) -> bytes:
        """What `peer` says about its program."""
        peer.send(Message(MessageKind.TELL, self._number))
        while True:
            teller, message = self._next({peer}, until)
            if teller is peer:
                return message.text

    def _next(self, waiting: Iterable[Peer], until: float) -> tuple[Peer, Message]:
        """The next message about this program; one of a process that is not in `waiting` is about its end."""
        while True:
            ready = self._poll.poll(max(0, until - time.monotonic()) * 1000)
            try:
                if not ready:
                    raise TimeoutError
                peer = self._of[ready[0][0]]
                message = peer.receive(until)
            except TimeoutError:
                raise _Stop(Message(MessageKind.LEFT, self._number, text=self._late(waiting).encode())) from None
            if message is None:
                text = f"{self._name(peer.rank)} has ended without a word: it was killed, or crashed"
                raise _Stop(Message(MessageKind.LEFT, self._number, text=text.encode()), peer)
            if message.kind is MessageKind.LEFT or (
                message.kind is MessageKind.STOP and message.number == self._number
            ):
                raise _Stop(message, peer)
            if message.number == self._number:  # an older one belongs to a program that was stopped
                return peer, message

    def _stop(self, stop: _Stop, where: Callable[[], str]) -> NoReturn:
        message = stop.message._replace(digest=_FAILED)
        self._tell((peer for peer in self._peers if peer is not stop.source), message)
        text = message.text.decode()
        if message.kind is MessageKind.LEFT:
            at = f"process {self._rank} was at its program {self._number} with collectives, {where()}"
            text = self._over = f"{text}; {at}. Start all processes again, from the last checkpoint"
        raise EngineError(text) from None

    def _late(self, waiting: Iterable[Peer]) -> str:
        names = " and ".join(self._name(peer.rank) for peer in waiting)
        above = self._parent is not None and set(waiting) == {self._parent}
        through = ", or for one that it waits for" if above else ""
        return (
            f"{self._name(self._rank)} waited {self._timeout:.0f} s in vain for {names}{through}: it is stopped, busy, "
            "or went another way (XLA_AMP_TIMEOUT sets the seconds)"
        )

    def _tell(self, peers: Iterable[Peer], message: Message) -> None:
        for peer in peers:
            peer.send(message)

    def failed(self) -> None:
        """Notes that the program that was agreed on did not start here: the others' has, unless it failed there too."""
        self._history = hashlib.sha256(self._history + b"%d" % self._number).digest()

    def leave(self, text: str, *, failed: bool) -> str:
        """Tells the others that this process ends; returns why one of them failed, empty if all end well.

        A process that ends well waits until all do, however long one of them writes its last checkpoint.  One that
        fails waits a few seconds for those below it: they have an error to report before process 0 takes the
        coordinator along.

        Args:
            text: what others are told that still wait for this process.
            failed: whether this process failed.
        """
        self._over = self._over or text
        self._tell(
            self._peers, Message(MessageKind.LEFT, self._number, _FAILED if failed else bytes(32), text.encode())
        )
        reasons = [] if failed else [self._last_word(peer, time.monotonic() + _FOREVER) for peer in self._peers]
        bad = next(filter(None, reasons), "")
        if failed or bad:
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.wire.shutdown(socket.SHUT_WR)
            until = time.monotonic() + _PARTING
            for peer in self._children:
                with contextlib.suppress(TimeoutError):
                    while peer.receive(until) is not None:
                        pass
        self._close()
        return bad

    def watch(self) -> None:
        """Starts a thread that ends this process when another has ended and this one does not notice."""
        threading.Thread(target=self._watch, name="xla_amp-processes", daemon=True).start()

    def gone(self, seconds: float | None) -> list[Peer]:
        """The processes that this one is connected to and that have ended.

        Args:
            seconds: to wait for the end of one; None for ever.
        """
        ends = select.poll()
        hangs_up = getattr(select, "POLLRDHUP", select.POLLHUP)  # the former is Linux's
        for descriptor in self._of:
            ends.register(descriptor, hangs_up)
        found = ends.poll(None if seconds is None else 1000 * seconds)
        return [self._of[descriptor] for descriptor, _ in found]

    def _watch(self) -> None:
        gone = self.gone(None)
        time.sleep(_NOTICE)
        if gone and not self._over:
            peer = gone[0]
            reason, until = "", time.monotonic() + _PATIENCE
            with contextlib.suppress(TimeoutError):
                while (message := peer.receive(until)) is not None:
                    reason = f" ({message.text.decode()})" if message.text else reason
            os.write(
                2, f"xla_amp: {self._name(peer.rank)} has ended{reason}, so {self._name(self._rank)} ends\n".encode()
            )
            os._exit(1)

    def _last_word(self, peer: Peer, until: float) -> str:
        """Waits for the end of `peer`; returns how it failed, empty if it ended well."""
        with contextlib.suppress(TimeoutError):
            while (message := peer.receive(until)) is not None:
                if message.kind is MessageKind.LEFT:
                    return "" if message.digest != _FAILED else message.text.decode()
        return f"{self._name(peer.rank)} has not ended as it should"


# ---- connections -----------------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which no other machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


def connect(process: Process, client: Any, name: Callable[[int], str], *, fanout: int = FANOUT) -> Agreement:
    """Connects this process to its neighbours in the tree.

    Args:
        process: its place.
        client: of JAX's coordinator, whose store tells where processes listen.
        name: as `Agreement`.
        fanout: most processes below one.

    Raises:
        EngineError: a neighbour does not come within the timeout.
    """
    first = process.rank * fanout + 1
    below = range(first, max(first, min(first + fanout, process.world_size)))
    until = time.monotonic() + process.timeout
    parent = None
    children: list[Peer] = []
    with contextlib.ExitStack() as stack:
        try:
            if below:
                secret = secrets.token_bytes(_SECRET)  # a process that reads the coordinator's store belongs to the job
                host, server = _listen(process)
                stack.enter_context(server)
                port = server.getsockname()[1]
                client.key_value_set(f"xla_amp/agreement/{process.rank}", f"{host} {port} {secret.hex()}")
            if process.rank:
                parent = _call((process.rank - 1) // fanout, process, client)
            while len(children) < len(below):
                server.settimeout(max(0.001, until - time.monotonic()))
                peer = _answer(server.accept()[0], secret)
                if peer is not None:
                    children.append(peer)
        except Exception as error:
            raise EngineError(
                f"{name(process.rank)} could not connect to its neighbours among the processes within "
                f"{process.timeout} s: {type(error).__name__}: {error}. They must reach each other on all ports"
            ) from error
    children.sort(key=lambda child: child.rank)
    level, above = 0, process.rank
    while above:
        level, above = level + 1, (above - 1) // fanout
    return Agreement(process.rank, parent, children, process.timeout, level * _PATIENCE, name)


def _listen(process: Process) -> tuple[str, socket.socket]:
    """An address for others, "-" for the coordinator's host, and a socket that listens there."""
    host, port = process.host, process.coordinator.rpartition(":")[2]
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return "-", socket.create_server((host, 0), family=family, backlog=FANOUT)
    if process.rank == 0:  # the others know it as the coordinator, which need not be how it knows itself
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return "-", socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=FANOUT)
    [(family, *_, address), *_] = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: chooses the interface
        mine = str(probe.getsockname()[0])
    return mine, socket.create_server((mine, 0), family=family, backlog=FANOUT)


def _call(rank: int, process: Process, client: Any) -> Peer:
    """Connects to the process above."""
    found = client.blocking_key_value_get(f"xla_amp/agreement/{rank}", 1000 * process.timeout)
    host, port, secret = found.split()
    if host == "-":
        host = process.host
    wire = socket.create_connection((host, int(port)), timeout=process.timeout)
    wire.sendall(bytes.fromhex(secret) + process.rank.to_bytes(4))
    return _peer(rank, wire)


def _answer(wire: socket.socket, secret: bytes) -> Peer | None:
    """The process below that has connected; None for a stranger."""
    try:
        word = _read(wire, _SECRET + 4, time.monotonic() + _PARTING)
    except OSError:
        word = b""
    if not secrets.compare_digest(word[:_SECRET], secret):
        wire.close()
        return None
    return _peer(int.from_bytes(word[_SECRET:]), wire)


def _peer(rank: int, wire: socket.socket) -> Peer:
    wire.settimeout(None)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone closes nothing
    for option, value in (("TCP_KEEPIDLE", _KEEPALIVE), ("TCP_KEEPINTVL", _KEEPALIVE), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Peer(rank, wire)
