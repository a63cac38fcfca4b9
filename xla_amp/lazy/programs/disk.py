"""A folder of serialized executables, limited in size, that many processes read and write at once.

A file is complete or absent: it is written under a temporary name and renamed.  It begins with the digest of the rest,
so a damaged one is recognized and removed.  What cannot be read or written is a miss, with one warning a process.

A stored executable is machine code and a pickle.  A user who can write to the folder can run code in the processes that
read it, so the folder must belong to this user alone (`files.own_folder`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from xla_amp.common import events

LIMIT: Final = 2 << 30
"""Bytes by default."""
_FORM: Final = b"xla_amp executable 1\n"
_SUFFIX: Final = ".executable"
_TEMPORARY: Final = ".writing"
_ABANDONED: Final = 3600
"""Seconds after which a temporary file belongs to a process that was killed."""
_AFTER: Final = 0.9
"""Share of the limit that is left after old files were removed."""
_LISTED: Final = 8
"""Programs of a command that are listed; a first step rarely needs more."""
_THREAD: Final = "xla_amp loads programs"


class Folder:
    """The stored executables."""

    def __init__(self, path: Path, *, limit: int | None = LIMIT, least_seconds: float = 0.0) -> None:
        """`limit` is in bytes, None is no limit; what compiles in less than `least_seconds` is not stored."""
        self.path = path
        self.limit = limit
        self.least_seconds = least_seconds
        self._warned: set[str] = set()
        self._late: list[str] = []
        self._writes = True

    def read(self, name: str) -> bytes | None:
        """What was written under `name`, which is now the most recently used; None if it is absent or damaged."""
        file = self.path / f"{name}{_SUFFIX}"
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"the stored program {str(file)!r} cannot be read: {error}")
            return None
        head = len(_FORM) + hashlib.sha256().digest_size
        content = data[head:]
        if data[:head] != _FORM + hashlib.sha256(content).digest():
            self.remove(name, "its content is damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Stores `content`, and removes the least recently used files beyond the limit."""
        size = len(content) + len(_FORM) + hashlib.sha256().digest_size
        if not self._writes or (self.limit is not None and size > self.limit):
            return
        temporary = self.path / f"{name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}"
        try:
            # Mode 0600: other users read no program of this one.
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_FORM + hashlib.sha256(content).digest())
                file.write(content)
            self._make_room(size)
            temporary.replace(self.path / f"{name}{_SUFFIX}")
        except OSError as error:
            self._writes = False
            self._warn(
                "write",
                f"compiled programs cannot be stored in {str(self.path)!r} ({error}); this process stores no more. "
                "Free space there, set XLA_AMP_CACHE to another folder, or to off",
            )
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def remove(self, name: str, why: str) -> None:
        """Removes a file that is of no use, with a warning."""
        file = self.path / f"{name}{_SUFFIX}"
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        self._warn("damaged", f"the stored program {str(file)!r} was removed: {why}; it is compiled again")

    def _make_room(self, size: int) -> None:
        found = []
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.path))
                elif entry.name.endswith(_TEMPORARY) and status.st_mtime < time.time() - _ABANDONED:
                    os.unlink(entry.path)
        total = size + sum(size for _, size, _ in found)
        if self.limit is None or total <= self.limit:
            return
        for _, each, path in sorted(found):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= each
            if total <= _AFTER * self.limit:
                return

    def _warn(self, kind: str, text: str) -> None:
        if kind in self._warned:
            return
        self._warned.add(kind)
        if threading.current_thread().name == _THREAD:
            self._late.append(text)
        else:
            events.warn(text)

    def warn_late(self) -> None:
        """Gives what the thread that loads ahead would warn of: `warnings.catch_warnings` elsewhere may lose it."""
        while self._late:
            events.warn(self._late.pop())


class Ahead:
    """Loads the programs that the same command used last time, in a thread, while Python builds the model.

    XLA loads an executable without Python's lock: that of a GPT-2 of 12 layers in 1.6 s of a core.  A file of the
    folder lists the first programs that a command used; it is written again when a run uses one that is not listed.
    At its exit Python waits for the program that is being loaded, and no other one is loaded.
    """

    def __init__(self, folder: Folder, command: Callable[[], str], load: Callable[[str], Any]) -> None:
        """`command` gives the name of the list, empty for none, and `load` loads a program; the thread calls both."""
        self.folder = folder
        self._command, self._load = command, load
        self._file = ""
        self._listed: list[str] = []
        self._used: list[str] = []
        self._futures: dict[str, Future[Any]] = {}
        self._ready = threading.Event()
        """The list is read."""
        threading.Thread(target=self._run, name=_THREAD).start()

    def take(self, name: str) -> Any:
        """A program that is loaded, or being loaded, which is waited for; otherwise None.  It is given once."""
        self._ready.wait()
        self.folder.warn_late()
        future = self._futures.pop(name, None)
        return None if future is None or future.cancel() else future.result()

    def note(self, name: str) -> None:
        """Notes that this command uses a stored program."""
        self._ready.wait()
        self.folder.warn_late()
        if not self._file or name in self._used or len(self._used) == _LISTED:
            return
        self._used.append(name)
        if name not in self._listed:
            self._listed = list(self._used)
            self.folder.write(self._file, "\n".join(self._used).encode())

    def _run(self) -> None:
        try:
            self._file = self._command()
            listed = self.folder.read(self._file) if self._file else None
            self._listed = (listed or b"").decode().split()
            self._futures = {name: Future() for name in self._listed}
        finally:
            self._ready.set()
        for name, future in list(self._futures.items()):
            if threading.main_thread().is_alive() and future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._load(name))
                except BaseException as error:  # raised again where the program is taken
                    future.set_exception(error)
