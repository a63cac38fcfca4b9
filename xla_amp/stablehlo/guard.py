"""The process in which MLIR reads and writes programs, and XLA runs them, that could end or stop it.

Damaged bytecode can abort MLIR's parsers or make them loop forever, and so can a module that has no portable artifact
abort the writer.  XLA's compiler ends by a stack overflow for functions that call each other.

A question is a dict as JSON, then bytes; so is the reply.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from xla_amp.common import config
from xla_amp.errors import ModuleError

_TIMEOUT: Final = (10.0, 5e-6)
"""Seconds that the process may take, and seconds more per byte."""
_START: Final = 60
"""Seconds more for its start, on a busy machine."""
_ENVIRONMENT: Final = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "PYTHONSAFEPATH": "1",  # the working folder may hold a jax.py
        "XLA_FLAGS": "",  # the flags of this process are not for the worker
    }
)


class Worker:
    """A worker process; started on first use, ended with this process.

    Args:
        module: calls `guard_worker.serve`.
        environment: variables that differ from this process's.
    """

    def __init__(self, module: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._module, self._environment = module, {**_ENVIRONMENT, **environment}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, Any], data: bytes, *, failed: str, limit: bool = True) -> dict[str, Any]:
        """The worker's reply; the bytes that it makes of `data` are ``"data"``.

        Args:
            question: as the worker takes it.
            data: goes with it.
            failed: begins the message if the worker ends.
            limit: whether the worker may take a time that depends on the size of `data` only.

        Raises:
            ModuleError: the worker's; or `failed` with how the worker ended.
        """
        seconds = _TIMEOUT[0] + _TIMEOUT[1] * len(data)
        with self._lock:
            if self._process is None:
                self._start()
                seconds += _START
            try:
                self._wire.send_bytes(json.dumps(question).encode())
                self._wire.send_bytes(data)
                if limit and not self._wire.poll(seconds):
                    raise TimeoutError(f"no answer in {seconds:.0f} s")
                reply: dict[str, Any] = json.loads(self._wire.recv_bytes())
                reply["data"] = self._wire.recv_bytes()
            except (EOFError, OSError) as error:
                status = self.close()
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                how = str(error) if isinstance(error, TimeoutError) else how
                raise ModuleError(f"{failed} crashed or did not end ({how})") from None
            except BaseException:
                self.close()  # the pending answer would be read as the answer to the next question
                raise
        if "error" in reply:
            raise ModuleError(f"{failed} failed: {reply['error'].splitlines()[0]}")
        if "refused" in reply:
            raise ModuleError(reply["refused"])
        return reply

    def _start(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._wire, other = multiprocessing.Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=config.child_environment({**self._environment, "PYTHONPATH": path}),
            )
        atexit.register(self.close)

    def kill(self) -> None:
        """Ends the process at once, from any thread, whatever it runs."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> int:
        """Ends the process, unless it has ended, and returns its status; a later `ask` starts another."""
        process, self._process = self._process, None
        if process is None:
            return 0
        atexit.unregister(self.close)
        self._wire.close()  # the end of its questions
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


guard: Final = Worker("xla_amp.stablehlo.guard_worker")
