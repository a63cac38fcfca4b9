"""Worker processes for native code that can abort or hang, or that needs other environment variables.

A worker is ``python -m <module>``; the module calls `serve`.  The protocol on its pipes:

request   one line of JSON with ``"length": n`` on standard input, then n bytes
reply     one line of JSON on standard output, with bytes as a request has them, or without; ``{"error": text}`` when
          the handler raised

A worker exits at the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO, Any, Final

from xla_amp.common import config

_ENVIRONMENT: Final = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "PYTHONSAFEPATH": "1",  # the working folder may hold a jax.py
        "XLA_FLAGS": "",  # the flags of this process are not for the worker
    }
)

_OUTPUT_TAIL: Final = 2000
"""Bytes of a dead worker's output that the error message quotes."""


class WorkerEndedError(Exception):
    """The worker died or timed out; the message has its exit status and the end of its output."""


class Worker:
    """One worker process, kept until `close`.

    `module` calls `serve`; `environment` has the variables that differ from this process's.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=config.child_environment({**_ENVIRONMENT, **(environment or {}), "PYTHONPATH": path}),
        )

    @property
    def closed(self) -> bool:
        """Whether the process has ended; a closed worker cannot be used again."""
        return self._printed.closed

    def ask(self, question: Mapping[str, Any], data: bytes, timeout: float | None = None) -> dict[str, Any]:
        """The reply to one question; its bytes, if it has some, are ``"data"``.

        Raises:
            WorkerEndedError: the process died, or did not answer within `timeout` seconds; it is closed then.
        """
        header = json.dumps({**question, "length": len(data)}).encode()
        try:
            reply = self._exchange(header + b"\n" + data, timeout)
        except BrokenPipeError:
            reply = b""
        except BaseException:
            self.kill()
            self.close()  # the pending answer would be read as the answer to the next question
            raise
        if not reply.endswith(b"\n"):
            raise WorkerEndedError(self._exit_message())
        answer: dict[str, Any] = json.loads(reply)
        if (length := answer.pop("length", None)) is not None:
            answer["data"] = self._process.stdout.read(length) if self._process.stdout else b""
            if len(answer["data"]) < length:
                raise WorkerEndedError(self._exit_message())
        return answer

    def _exchange(self, request: bytes, timeout: float | None) -> bytes:
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None or replies.closed:
            return b""
        requests.write(request)
        requests.flush()
        if timeout is not None:
            with selectors.DefaultSelector() as ready:
                ready.register(replies, selectors.EVENT_READ)
                if not ready.select(timeout):
                    self._process.kill()
                    self.close()
                    raise WorkerEndedError(f"no answer in {timeout:.0f} s")
        return replies.readline()

    def _exit_message(self) -> str:
        self._end()
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _OUTPUT_TAIL))
        text = self._printed.read().decode(errors="replace").strip()
        self._printed.close()
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}, it printed last:\n{text}" if text else how

    def kill(self) -> None:
        """Ends the process at once; `close` releases what this one holds for it."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        self._end()
        self._printed.close()

    def _end(self) -> None:  # closing its input stops the process; kill it if it does not exit
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(handle: Callable[[dict[str, Any], bytes], dict[str, Any]]) -> None:
    """Answers the questions on standard input until its end; output of native code goes to standard error.

    `handle` gets a question and its bytes; bytes of its reply are ``"data"``.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    while header := requests.readline():
        question = json.loads(header)
        data = requests.read(question["length"])
        try:
            reply = handle(question, data)
        except Exception as error:  # reported to the process that asked
            reply = {"error": f"{type(error).__name__}: {error}"}
        made: bytes | None = reply.pop("data", None)
        if made is not None:
            reply["length"] = len(made)
        replies.write(json.dumps(reply).encode() + b"\n" + (made or b""))
        replies.flush()
