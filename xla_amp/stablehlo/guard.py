"""The process in which MLIR reads and writes programs, and XLA runs them, that could end or stop it.

Damaged bytecode can abort MLIR's parsers or make them loop forever, and so can a module that has no portable artifact
abort the writer.  XLA's compiler ends by a stack overflow for functions that call each other.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from typing import Any, Final

from xla_amp.errors import ModuleError
from xla_amp.stablehlo.workers import Worker, WorkerEndedError

_TIMEOUT: Final = (10.0, 5e-6)
"""Seconds that the process may take, and seconds more per byte."""
_START: Final = 60
"""Seconds more for its start, on a busy machine."""


class _Guard:
    """The worker process; started on first use, ended with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def ask(self, question: Mapping[str, Any], data: bytes, *, failed: str, limit: bool = True) -> dict[str, Any]:
        """The worker's reply; the bytes that it makes of `data` are ``"data"``.

        Args:
            question: as `guard_worker.handle` takes it.
            data: goes with it.
            failed: begins the message if the worker ends.
            limit: whether the worker may take a time that depends on the size of `data` only.

        Raises:
            ModuleError: the worker's; or `failed` with how the worker ended.
        """
        seconds = _TIMEOUT[0] + _TIMEOUT[1] * len(data)
        with self._lock:
            if self._worker is None or self._worker.closed:
                self._worker = Worker("xla_amp.stablehlo.guard_worker")
                atexit.register(self.close)
                seconds += _START
            try:
                reply = self._worker.ask(question, data, timeout=seconds if limit else None)
            except WorkerEndedError as error:
                self.close()
                how = str(error).partition(", it printed")[0]
                raise ModuleError(f"{failed} crashed or did not end ({how})") from None
        if "error" in reply:
            raise ModuleError(f"{failed} failed: {reply['error'].splitlines()[0]}")
        if "refused" in reply:
            raise ModuleError(reply["refused"])
        return reply

    def kill(self) -> None:
        """Ends the process at once, from any thread, whatever it runs."""
        if self._worker is not None:
            self._worker.kill()

    def close(self) -> None:
        """Ends the process; a later `ask` starts another."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            atexit.unregister(self.close)


guard: Final = _Guard()
